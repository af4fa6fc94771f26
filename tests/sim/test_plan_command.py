"""``planaria plan``: what it refuses, and what it prints and writes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from planaria.cli.plan import parameters_of, plan
from planaria.errors import UsageError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": 0}, "--gpus 0"),
        ({"gpus": 17}, "--gpus 17: not whole machines"),
        ({"gpus": 64, "model": "big"}, "--model big"),
        ({"gpus": 64}, "needs 128 GPUs or more"),
        ({"gpus": 16_384, "group_size": 64}, "--group-size 64: the model needs 128"),
        ({"gpus": 16_384, "group_size": 129}, "--group-size 129: must be whole machines"),
        ({"gpus": 16_384, "mtbf_gpu_hours": float("nan")}, "--mtbf-gpu-hours nan"),
        ({"gpus": 16_384, "repair_hours": -1.0}, "--repair-hours -1"),
        ({"gpus": 16_384, "hard": 1.5}, "--hard 1.5"),
        ({"gpus": 16_384, "spares": 16_384}, "--spares 16384"),
        ({"gpus": 16_384, "spares": 3}, "--spares 3"),
        ({"gpus": 16_384, "only": "prayer"}, "--only 'prayer': unknown"),
        ({"gpus": 16_384, "seeds": 0}, "--seeds 0"),
        ({"gpus": 16_384, "mtbf_gpu_hours": 0.001}, "too many to simulate"),
        ({"gpus": 16_384, "json_file": Path("/nowhere/x.json")}, "--json /nowhere/x.json: there is no directory"),
    ],
)
def test_bad_input_is_one_sentence(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        plan(**options)  # type: ignore[arg-type]
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_sizes() -> None:
    assert [parameters_of(text) for text in ("405b", "1.5T", "800m")] == [405e9, 1.5e12, 800e6]


def test_it_prints_its_assumptions_and_writes_its_figures(tmp_path: Path) -> None:
    figures, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    command = [
        sys.executable,
        "-m",
        "planaria",
        "plan",
        "--gpus",
        "1024",
        "--model",
        "8b",
        "--days",
        "5",
        "--seeds",
        "3",
    ]
    more = ["--plot", str(picture)] if importlib.util.find_spec("matplotlib") else []
    done = subprocess.run([*command, "--json", str(figures), *more], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "assumptions:" in done.stdout and "nothing of it was measured on more" in done.stdout
    found = json.loads(figures.read_text())
    assert {each["strategy"] for each in found["strategies"]} > {"checkpoint-restart", "planaria redistribute"}
    for each in found["strategies"]:
        assert len(each["effective"]) == 3 and 0.5 < min(each["effective"]) <= max(each["effective"]) <= 1
        assert sum(each["time"].values()) == pytest.approx(1)
    if more:
        assert picture.read_bytes().startswith(b"\x89PNG")
