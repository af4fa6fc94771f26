"""``planaria train`` and ``python -m planaria.train`` from the outside: what goes wrong before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from planaria.train.config import load
from tests.train.harness import PATIENCE, environment, lines, train, write_config

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model.flavour=1B"], "planaria: there is no key model.flavour; keys of [model] are name, flavor,"),
        (["--data.files=nowhere/*"], "planaria: data.files: no file matches 'nowhere/*'"),
        (["--fault_tolerance.enable", "--fault_tolerance.group_size=2", "--data.files=nowhere/*"], "no file matches"),
        (
            ["--validation.enable", "--validation.held_out=0.001"],
            "has 1 samples but needs the 2 of a shard",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, words: list[str], says: str) -> None:
    done = train(write_config(tmp_path), tmp_path / "out", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_a_group_of_another_size_than_its_mesh(tmp_path: Path) -> None:
    """The trainer as a script of `planaria run`, which was told another number of ranks."""
    config = write_config(tmp_path)
    command = [sys.executable, "-m", "planaria", "run", "--nproc-per-group=2", "--log-dir=logs", "-m", "planaria.train"]
    words = [str(config), "--parallelism.data_parallel_shard_degree=1"]
    done = subprocess.run(
        [*command, *words], env=environment(), capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path
    )
    assert done.returncode == 2
    assert "[parallelism]: a group of 2 processes cannot be data_parallel_shard_degree 1 x" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_lists_every_key(tmp_path: Path) -> None:
    done = train(write_config(tmp_path), tmp_path, "--help")
    assert done.returncode == 0 and "--training.steps = 1000: optimizer steps" in done.stdout


def test_python_m_without_a_configuration() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "planaria.train"], env=environment(), capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 2 and "needs a configuration" in done.stderr and "Traceback" not in done.stderr


def test_mock_data_needs_nothing(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[training]\nsteps = 2\nseq_len = 16\nlocal_batch_size = 2\n")
    done = train(config, tmp_path / "out", "--data.mock")
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in lines(tmp_path / "out")] == [0, 1]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.stem)
def test_examples_are_good(path: Path) -> None:
    config = load(path)
    assert config.micro_batches(config.shards) >= 1


def test_a_configuration_is_read_without_torch() -> None:
    code = "import sys, planaria.cli.train, planaria.train.tokens; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), timeout=PATIENCE).returncode == 0
