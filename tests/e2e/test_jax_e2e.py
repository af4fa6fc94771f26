"""Groups of JAX processes: the same promise."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from planaria.chaos.session import Script, with_home
from tests.e2e.harness import PATIENCE, Run

pytest.importorskip("jax", reason="needs planaria[jax]")
pytest.importorskip("optax", reason="needs optax")
pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parent / "scripts" / "jax_train.py"
LONG = 2 * PATIENCE  # for several processes that compile at once
STEPS = ("--steps", "400")


def alone(directory: Path, *args: str) -> str:
    directory.mkdir(exist_ok=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith("PLANARIA_") and k != "NPROC"}
    env |= {"PLANARIA_DIR": str(directory), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        Script(SCRIPT, args).command(), env=with_home(env), capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == 0, done.stderr
    return str(json.loads((directory / "result.json").read_text())["digest"])


def traces(run: Run) -> set[str]:
    """Of all processes that came to the end: how often their two functions were traced."""
    found = (line for log in run.directory.glob("rg*/i*/stdout.log") for line in log.read_text().splitlines())
    return {line for line in found if line.startswith("traced")}


def test_kills_leave_no_trace(tmp_path: Path) -> None:
    with Run(tmp_path / "run", *STEPS, script=SCRIPT, patience=LONG) as run:
        run.step(5)
        run.signal(1)
        run.incarnation(1, 1)
        run.settled(3)
        run.signal(0)  # which hosts the rendezvous
        run.incarnation(0, 1)
        run.settled(3)
        assert run.end() == 0, run.log()
        assert run.digests() == {alone(tmp_path / "alone", *STEPS)}, run.log()
        assert len(list(run.directory.glob("rg*/i*/result.json"))) == 3
    # What `planaria explain` reads.
    assert '"what": "committed"' in (run.directory / "rg0" / "i1" / "quorums.jsonl").read_text()
    # Neither a change of members nor a healing compiles anything.
    assert traces(run) == {"traced {'grad': 1, 'update': 1}"}


def test_a_group_of_several_devices(tmp_path: Path) -> None:
    spread = (*STEPS, "--devices", "2")
    with Run(tmp_path / "run", *spread, groups=2, script=SCRIPT, patience=LONG) as run:
        run.step(5)
        run.signal(1)
        run.incarnation(1, 1)
        run.settled(2)
        assert run.end() == 0, run.log()
        assert run.digests() == {alone(tmp_path / "alone", *spread)}, run.log()
    assert traces(run) == {"traced {'grad': 1, 'update': 1}"}


def test_a_damaged_state_is_named_and_healed(tmp_path: Path) -> None:
    words = ("--steps", "60", "--odd", "damage")
    with Run(tmp_path / "run", *words, options=("--check-state", "1"), script=SCRIPT, patience=LONG) as run:
        assert run.end() == 0, run.log()
        assert run.digests() == {alone(tmp_path / "alone", *words)}, run.log()
    (event,) = run.events("corrupt")
    said = "its state is not that of the others (state['params']['b'][(0, 32)])"
    assert event["text"] == f"group 1 (incarnation 0) at step 11: {said}"


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ("state", "['params']['extra']"),  # the path that differs
        ("version", "jax ("),
        ("program", "in program ("),
        ("metrics", "metrics (loss there, accuracy here)"),  # else the mean of both would have one name here, one there
    ],
)
def test_bad_input(tmp_path: Path, odd: str, said: str) -> None:
    with Run(tmp_path / "run", "--odd", odd, groups=2, script=SCRIPT, patience=LONG) as run:
        assert run.end() == 2, run.log()
        assert said in run.log()
        assert "Traceback" not in run.log()


def test_a_callback_that_raises(tmp_path: Path) -> None:
    """In one group, whenever it starts: it is given up, and says why and where; the others lose nothing by it."""
    words = ("--odd", "callback", "--steps", "20")
    with Run(
        tmp_path / "run", *words, groups=2, options=("--max-replacements", "1"), script=SCRIPT, patience=LONG
    ) as run:
        run.end()
    said = "".join(log.read_text() for log in run.directory.glob("rg1/i*/stderr.log"))
    assert "this callback always fails" in said
    assert "step 0, shard 0: in the script's program" in said
