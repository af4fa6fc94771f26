"""The day when every group is lost: the job goes on from its newest checkpoint, and ends with a quiet run's bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from planaria.chaos.session import end, spawn, with_home
from planaria.rank.durable import checkpoints_in
from planaria.torch.checkpoint_files import Checkpoint
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
            run.until(lambda: newest(where) >= 10, "a checkpoint")  # written beside the steps that follow
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


@contextmanager
def lighthouse(directory: Path) -> Iterator[str]:
    """``planaria lighthouse`` by itself; its address."""
    log = directory / "lighthouse.log"
    store = ("--store", str(directory / "lighthouse.db"))
    process = spawn([sys.executable, "-m", "planaria", "lighthouse", "--bind", "127.0.0.1:0", *store], os.environ, log)
    try:
        while not (said := [x for x in log.read_text().splitlines(True) if x.startswith("{") and x.endswith("\n")]):
            assert process.poll() is None, log.read_text()
            time.sleep(0.01)
        yield str(json.loads(said[0])["address"])
    finally:
        end(process)


def part(address: str, group: int) -> tuple[str, ...]:
    """Options of one of two agents, with a group each. Neither begins alone."""
    words = ("--lighthouse", address, "--job", "shared", "--min-groups", "2")
    return *words, "--first-group", str(group), "--local-groups", "1"


def begins(*runs: Run) -> list[int]:
    """The first step of every life that made one."""
    return sorted(life.commits[0].step for run in runs for life in run.watch.lives.values() if life.commits)


@pytest.mark.parametrize("agents", [1, 2])
def test_a_checkpoint_of_which_nobody_lived_to_tell(tmp_path: Path, quiet: Quiet, agents: int) -> None:
    args, where = ("--steps", "60", "--pause", "0.01", "--odd", "mute"), tmp_path / "checkpoints"
    with lighthouse(tmp_path) as address, ExitStack() as stack:
        options = [part(address, 0), part(address, 1)] if agents == 2 else [()]
        runs = [
            stack.enter_context(Run(tmp_path / f"run{i}", *args, groups=2, options=(*words, *saving(where, 10))))
            for i, words in enumerate(options)
        ]
        for run in runs:
            run.settled(2 // agents)
        runs[0].until(lambda: newest(where) == 10, "a checkpoint")
        for group in (0, 1):
            runs[group % agents].signal(group)
        for run in runs:
            assert run.end(*runs) == 0, run.log()
            assert not run.events("saved")[0]["text"].startswith("group 0 (incarnation 0)")
            assert run.events("resume")
        assert set().union(*(run.digests() for run in runs)) == {quiet(*args)}
        assert begins(*runs) == [1, 1, 11, 11]


def test_all_agents_are_killed_and_started_again(tmp_path: Path, quiet: Quiet) -> None:
    args, where = ("--steps", "200", "--pause", "0.005"), tmp_path / "checkpoints"
    with lighthouse(tmp_path) as address:
        for life in (0, 1):
            with ExitStack() as stack:
                runs = [
                    stack.enter_context(
                        Run(tmp_path / f"run{i}", *args, groups=2, options=(*part(address, i), *saving(where, 20)))
                    )
                    for i in (0, 1)
                ]
                if not life:
                    runs[0].until(lambda: newest(where) >= 20, "a checkpoint")
                    for run in runs:
                        assert run._run._process is not None
                        run._run._process.kill()
                    continue
                for run in runs:
                    assert run.end(*runs) == 0, run.log()
                    assert run.digests() == {quiet(*args)}
                    (journal,) = run.directory.glob("rg*/i*/metrics.jsonl")
                    assert journal.parent.name != "i0", "a new incarnation"
                    assert json.loads(journal.read_text().splitlines()[0])["step"] >= 20, "from the checkpoint"


def test_two_agents_that_do_not_see_the_same_directory(tmp_path: Path, quiet: Quiet) -> None:
    args = ("--steps", "60", "--pause", "0.01")
    with lighthouse(tmp_path) as address, ExitStack() as stack:
        runs = [
            stack.enter_context(
                Run(
                    tmp_path / f"run{group}",
                    *args,
                    groups=2,
                    options=(*part(address, group), *saving(tmp_path / f"checkpoints{group}", 10)),
                )
            )
            for group in (0, 1)
        ]
        runs[0].step(1)
        runs[0].until(lambda: runs[0].events("saved"), "word of a checkpoint")
        for group in (1, 0):
            runs[group].signal(group)
        for run in runs:
            assert run.end(*runs) == 0, run.log()
            (told,) = run.events("unshared")
            assert "group 1" in told["text"] and "sees step 0, but there is a checkpoint of step" in told["text"]
            assert run.digests() == {quiet(*args)}
            shown = f"[planaria] {told['text']}" in run._run.log.read_text()
            assert shown is (run is runs[0]), "people are told once, by the agent with group 0"
        assert begins(*runs)[:3] == [1, 1, max(11, begins(*runs)[2])]


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
    args, where = ("--steps", "60", "--pause", "0.01", "--width", "60000"), tmp_path / "checkpoints"
    with Run(tmp_path / "run", *args, groups=2, options=saving(where, 10)) as run:
        run.until(lambda: newest(where) >= 10, "a checkpoint")
        for life in (0, 1):
            run.until(lambda life=life: list(where.glob(f"*.partial-rg0i{life}")), f"a save of life {life}")
            run.signal(0)
        assert run.end() == 0, run.log()
        assert run.digests() == {quiet(*args)}, run.log()
        assert run.events("lost") and not run.events("resume")
    assert newest(where) == 60
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
