"""The examples say what the README says, and do it."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import torch

from planaria.chaos.session import with_home
from planaria.demo.tiny_llama import Text, TinyLlama
from planaria.errors import UsageError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY_LM = EXAMPLES / "tiny_lm.py"


def run(script: Path, *args: str, directory: Path | None = None) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PLANARIA_")} | {"OMP_NUM_THREADS": "1"}
    if directory is not None:
        env["PLANARIA_DIR"] = str(directory)
    done = subprocess.run(
        [sys.executable, str(script), *args], env=with_home(env), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_demos_script_is_short_and_the_same_in_the_package() -> None:
    text = TINY_LM.read_text()
    assert len(text.splitlines()) < 60
    assert resources.files("planaria.demo").joinpath("tiny_lm.py").read_text() == text


def test_the_tiny_model_trains_alone_on_ones_own_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("many a thing happens\n" * 100)
    args = ("--data", str(tmp_path / "te*t"), "--steps", "11", "--batch-size", "1", "--length", "16")
    out = run(TINY_LM, *args, directory=tmp_path / "out")
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 11 and losses[-1] < losses[0] / 2
    assert "step 10: loss" in out


def test_little_communication_learns_as_well(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("many a thing happens\n" * 100)
    args = ("--data", str(tmp_path / "te*t"), "--steps", "18", "--every", "6", "--batch-size", "1", "--length", "16")
    out = run(EXAMPLES / "diloco.py", "--method", "streaming", *args, directory=tmp_path / "out")
    losses = [json.loads(line)["loss"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert "round 5 of groups (0,): loss" in out


def test_before_and_after_differ_in_five_lines_and_an_import() -> None:
    before, after = (
        [line.strip() for line in (EXAMPLES / name).read_text().splitlines()[1:]]
        for name in ("plain_loop.py", "plain_loop_planaria.py")
    )
    added = [line[2:] for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:]]
    added = [line for line in added if "import" not in line]
    assert len(added) == 5, added


@pytest.mark.parametrize("name", ["plain_loop.py", "plain_loop_planaria.py", "foreign_loop.py"])
def test_the_loops_all_learn(name: str) -> None:
    words = run(EXAMPLES / name).split()
    assert words[0] == "right:" and float(words[1].rstrip("%")) > 80


def test_text_is_the_standard_librarys_own() -> None:
    text = Text()
    x, y = text[0]
    assert len(text) > 10_000 and x.shape == y.shape == (64,) and x.dtype == torch.int64
    assert bool((x[1:] == y[:-1]).all())
    last = text[len(text) - 1]
    assert last[1].shape == (64,)


def test_text_follows_a_pattern_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("def")
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.txt").write_text("gh")
    text = Text(str(tmp_path / "**" / "*.txt"), length=3)
    assert [bytes(x.tolist()) for x, _ in (text[i] for i in range(len(text)))] == [b"abc", b"def"]


def test_text_that_is_not_there_or_too_short_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no file matches '.*none\*'"):
        Text(str(tmp_path / "none*"))
    (tmp_path / "short").write_text("x" * 64)
    with pytest.raises(UsageError, match="64 bytes of text; a sample needs 65"):
        Text(str(tmp_path / "short"))


def test_the_model_is_causal_and_small() -> None:
    torch.manual_seed(0)
    model = TinyLlama()
    assert 300_000 < sum(p.numel() for p in model.parameters()) < 500_000
    x = torch.randint(0, 256, (2, 12))
    changed = x.clone()
    changed[:, 8:] = 0
    with torch.no_grad():
        one, two = model(x), model(changed)
    assert one.shape == (2, 12, 256)
    torch.testing.assert_close(one[:, :8], two[:, :8])
    assert not torch.allclose(one[:, 8:], two[:, 8:])


def test_the_model_knows_positions() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        logits = TinyLlama()(torch.tensor([[1, 2, 3], [2, 1, 3]]))
    assert not torch.allclose(logits[0, 2], logits[1, 2])
