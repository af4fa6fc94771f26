"""The day when every group is lost: the job goes on from its newest checkpoint, and ends with a quiet run's bits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from planaria.chaos.session import with_home
from planaria.torch.checkpoint_files import Checkpoint, checkpoints_in
from tests.e2e.harness import PATIENCE, TRAIN, Run

pytestmark = pytest.mark.e2e
PARALLEL = TRAIN.with_name("parallel.py")
Quiet = Callable[..., str]


def saving(directory: Path, every: int) -> tuple[str, ...]:
    return "--checkpoint", str(directory), "--checkpoint-every", str(every)


def newest(directory: Path) -> int:
    """The step of the newest complete checkpoint."""
    found = checkpoints_in(directory) if directory.exists() else []
    return Checkpoint.read(found[0]).step if found else 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_groups_are_killed_at_once_and_again(tmp_path: Path, quiet: Quiet, ranks: int) -> None:
    steps, where = ("--steps", "60", "--pause", "0.01"), tmp_path / "checkpoints"
    options = (*saving(where, 10), "--nproc-per-group", str(ranks), "--device", "cpu")
    script, words = (TRAIN, steps) if ranks == 1 else (PARALLEL, ("fsdp", *steps))
    with Run(tmp_path / "run", *words, groups=2, options=options, script=script) as run:
        for beyond in (15, 35):
            run.settled(2, beyond)
            for group in (0, 1):
                run.signal(group, rank=ranks - 1)
            run.until(lambda: not run.watch.settled(), "all to be gone")
        assert run.end() == 0, run.log()
        assert len({event["text"] for event in run.events("resume") if "starts again" in event["text"]}) == 2
        digests = run.digests()
        # Nothing was made twice that a checkpoint held: no later life began at the beginning.
        begins = [life.commits[0].step for life in run.watch.lives.values() if life.commits]
        assert sorted(begins)[:3] == [1, 1, max(sorted(begins)[2], 11)], begins
    assert newest(where) == 60
    if ranks == 1:
        assert digests == {quiet(*steps)}
        return
    with Run(tmp_path / "quiet", *words, groups=1, options=options[4:], script=script) as run:
        assert run.end() == 0, run.log()
        assert digests == run.digests()


def test_everything_is_ended_and_started_again_with_other_numbers_of_groups(tmp_path: Path, quiet: Quiet) -> None:
    args, where = ("--steps", "200", "--pause", "0.005"), tmp_path / "checkpoints"
    with Run(tmp_path / "first", *args, options=saving(where, 1000)) as run:
        run.step(20)
        run.interrupt()
        assert run.end() == 130, run.log()
        stopped = run.watch.step
        assert newest(where) == stopped, "an orderly end loses nothing"
    with Run(tmp_path / "second", *args, groups=2, options=saving(where, 40)) as run:
        run.until(lambda: newest(where) >= 80, "a checkpoint")
        process = run._run._process
        assert process is not None
        process.kill()
        process.wait()
        assert run.events("quorum") and f"from the checkpoint of step {stopped}" in run.log()
    with Run(tmp_path / "third", *args, groups=4, options=saving(where, 40)) as run:
        assert run.end() == 0, run.log()
        assert run.digests() == {quiet(*args)}, run.log()
        assert min(life.commits[0].step for life in run.watch.lives.values()) > 80


def test_the_group_that_saves_is_killed_in_mid_save(tmp_path: Path, quiet: Quiet) -> None:
    # A state of 15 MB, so that a save takes long enough to be hit.
    args, where = ("--steps", "40", "--pause", "0.01", "--width", "60000"), tmp_path / "checkpoints"
    with Run(tmp_path / "run", *args, groups=2, options=saving(where, 10)) as run:
        run.until(lambda: newest(where) >= 10, "a checkpoint")
        for life in (0, 1):
            run.until(lambda life=life: list(where.glob(f"*.partial-rg0i{life}")), f"a save of life {life}")
            run.signal(0)
        assert run.end() == 0, run.log()
        assert run.digests() == {quiet(*args)}, run.log()
        assert run.events("lost") and not run.events("resume")
    assert newest(where) == 40
    assert not list(where.glob("*.partial-*"))


def test_a_damaged_checkpoint_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    where = tmp_path / "checkpoints"
    command = [sys.executable, "-m", "planaria", "run", "--groups", "1", "--log-dir", str(tmp_path / "run"), "--quiet"]
    command += [*saving(where, 10), str(TRAIN), "--steps", "20"]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=with_home({}), capture_output=True, text=True, timeout=PATIENCE)

    assert run().returncode == 0
    file = where / "step-00000020" / "rank0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = run()
    assert done.returncode == 2, done.stderr
    assert f"{file} is damaged: the checksum of optimizer.state" in done.stderr
    assert "Traceback" not in done.stderr and file.read_bytes() == data
