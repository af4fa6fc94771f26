"""Groups of several JAX processes: one is killed, its world with it, and the bits are those of the quiet run."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from planaria.core.messages import Phase
from tests.e2e.harness import PATIENCE, Once, Run, ended

pytest.importorskip("jax", reason="needs planaria[jax]")
pytest.importorskip("optax", reason="needs optax")
pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parent / "scripts" / "jax_train.py"
LONG = 2 * PATIENCE  # for several processes that compile at once
STEPS = ("--steps", "400")


def start(directory: Path, *words: str, groups: int = 2, more: tuple[str, ...] = ()) -> Run:
    options = ("--nproc-per-group", "2", "--device", "cpu", *more)
    return Run(directory, *words, groups=groups, options=options, script=SCRIPT, patience=LONG)


@pytest.fixture(scope="module")
def quiet(once: Once) -> str:
    """The digest of the quiet run of one group of that layout."""
    return once("jax groups", lambda directory: ended(start(directory, *STEPS, groups=1)))


def test_processes_are_killed(tmp_path: Path, quiet: str) -> None:
    with start(tmp_path / "run", *STEPS) as run:
        run.step(5)
        run.signal(1, rank=1)
        run.incarnation(1, 1)
        run.settled(2)
        run.phase(0, 0, Phase.EXCHANGING)
        run.signal(0, rank=0)  # the coordinator of its JAX world, and the host of both rendezvous
        run.incarnation(0, 1)
        run.settled(2)
        run.phase(1, 1, Phase.EXCHANGING)
        run.signal(1, rank=0)
        assert run.end() == 0, run.log()
        assert run.digests() == {quiet}, run.log()
    # It is the kill that is told, not what JAX does to the other process.
    told = [event["text"].partition("is gone: ")[2] for event in run.events("lost")]
    assert told[:3] == [f"rank {rank}: killed by SIGKILL" for rank in (1, 0, 0)]
    logs = [log.read_text() for log in (tmp_path / "run").glob("rg*/i*/**/stdout.log")]
    assert {line for log in logs for line in log.splitlines() if line.startswith("traced")} == {
        "traced {'grad': 1, 'update': 1}"
    }


def test_a_process_hangs(tmp_path: Path, quiet: str) -> None:
    with start(tmp_path / "run", *STEPS) as run:
        run.step(5)
        life = run.signal(1, signal.SIGSTOP, rank=1)
        run.until(lambda: "suspect" in run.log(), "the suspicion")
        run.step(life.commits[-1].step + 3)  # the others go on without it
        assert run.end() == 0, run.log()
        assert run.digests() == {quiet}, run.log()


def test_a_process_leaves_by_itself(tmp_path: Path) -> None:
    with start(tmp_path / "run", "--odd", "rank-leaves", groups=1) as run:
        assert run.end() == 1, run.log()
    assert "rank 1, exited with code 3: the script exited with code 3" in run.log()


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ("rank-seed", "the ranks of a group differ in seed (3, 4)"),
        ("rank-state", "state['params']['b'] differs between the processes of the group (ranks 0, 1)"),
        ("rank-program", "are about to run different programs (gradient 1 "),
        ("no-mesh", "no array of the state is on a mesh of all 2 devices of this group"),
        ("own-gradient", "is this process's alone"),
    ],
)
def test_bad_input(tmp_path: Path, odd: str, said: str) -> None:
    with start(tmp_path / "run", "--odd", odd, groups=1) as run:
        assert run.end() == 2, run.log()
    reason = json.loads((tmp_path / "run" / "summary.json").read_text())["reason"]
    assert said in reason and "Traceback" not in reason
