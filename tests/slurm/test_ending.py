"""Ctrl-C while Slurm's commands do what they do at bad moments. (They are scripts here; the supervisor is real.)"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.placed import PATIENCE, Placed

JOB = "7|bad-rg0-i0|PENDING|0||N/A|N/A|Resources"
SQUEUE = """
[ -e {here}/down ] && {{ echo "squeue: error: Unable to contact slurm controller" >&2; exit 1; }}
cat {here}/jobs 2> /dev/null || true
"""
SBATCH = """
cat > /dev/null
echo "{job}" > {here}/jobs
[ -e {here}/hangs ] && exec sleep 600
echo 7
"""
SCANCEL = """
[ -e {here}/down ] && exit 1
rm {here}/jobs
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Placed]:
    programs = tmp_path / "programs"
    programs.mkdir()
    texts = {"squeue": SQUEUE, "sbatch": SBATCH, "scancel": SCANCEL, "scontrol": "", "srun": ""}
    for name, text in texts.items():
        (programs / name).write_text("#!/bin/sh\n" + text.format(here=tmp_path, job=JOB))
        (programs / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    options = ("--engine", "slurm", "--host", "127.0.0.1", "--groups", "1")
    found = Placed(env, tmp_path / "run", "bad", options=options)
    yield found
    found.__exit__()


def test_while_slurm_is_away_it_is_asked_again_until_nothing_is_left(run: Placed, tmp_path: Path) -> None:
    run.start()
    run.said("group 0 waits: Resources")
    (tmp_path / "down").touch()
    assert run.process is not None
    run.process.send_signal(signal.SIGINT)
    run.said("squeue: Unable to contact slurm controller")
    (tmp_path / "down").unlink()
    assert run.process.wait(PATIENCE) == 130
    assert not (tmp_path / "jobs").exists() and "Traceback" not in run.log()


def test_a_job_that_was_just_being_submitted_is_cancelled_too(run: Placed, tmp_path: Path) -> None:
    (tmp_path / "hangs").touch()
    run.start()
    run.until((tmp_path / "jobs").exists, "the job")
    assert run.interrupt() == 130
    assert not (tmp_path / "jobs").exists() and "Traceback" not in run.log()
