"""The day when every group of a JAX job is lost: it goes on from its newest checkpoint, and ends with the same bits."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from planaria.rank.durable import MANIFEST, checkpoints_in
from tests.e2e.harness import Once, Run
from tests.e2e.test_jax_e2e import LONG, SCRIPT, alone, traces

pytest.importorskip("orbax", reason="needs planaria[jax-checkpoint]")
pytest.importorskip("optax", reason="needs optax")
pytestmark = pytest.mark.e2e

ONCE = {"traced {'grad': 1, 'update': 1}"}


@pytest.fixture(scope="module")
def quiet(once: Once) -> Callable[..., str]:
    """Digest of the run of one process in which nothing happens."""
    return lambda *args: once(f"jax {args}", lambda directory: alone(directory, *args))


def saving(directory: Path, every: int) -> tuple[str, ...]:
    return "--checkpoint", str(directory), "--checkpoint-every", str(every)


def newest(directory: Path) -> int:
    found = checkpoints_in(directory) if directory.exists() else []
    return int(found[0].name.removeprefix("step-")) if found else 0


def begins(run: Run) -> list[int]:
    """The first step that every life made, of those that made one."""
    return sorted(life.commits[0].step for life in run.watch.lives.values() if life.commits)


def test_all_groups_are_killed_at_once_and_again(tmp_path: Path, quiet: Callable[..., str]) -> None:
    args, where = ("--steps", "200", "--pause", "0.002"), tmp_path / "checkpoints"
    with Run(tmp_path / "run", *args, groups=2, options=saving(where, 10), script=SCRIPT, patience=LONG) as run:
        for beyond in (15, 45):
            run.settled(2, beyond)
            run.until(lambda: newest(where) >= 10, "a checkpoint")
            for group in (0, 1):
                run.signal(group)
            run.until(lambda: not run.watch.settled(), "all to be gone")
        assert run.end() == 0, run.log()
        assert len({event["text"] for event in run.events("resume") if "starts again" in event["text"]}) == 2
        assert run.digests() == {quiet(*args)}, run.log()
        # Nothing was made twice that a checkpoint held: no later life began at the beginning.
        assert begins(run)[:2] == [1, 1] and begins(run)[2] > 10, begins(run)
    assert newest(where) == 200
    assert traces(run) == ONCE, "what comes from a checkpoint is not compiled for again"


def test_everything_is_killed_and_started_with_other_numbers_of_groups(
    tmp_path: Path, quiet: Callable[..., str]
) -> None:
    args, where = ("--steps", "300", "--pause", "0.002"), tmp_path / "checkpoints"
    reached = 0
    for groups in (2, 1, 3):
        with Run(
            tmp_path / f"run{groups}", *args, groups=groups, options=saving(where, 10), script=SCRIPT, patience=LONG
        ) as run:
            if groups != 3:
                run.until(lambda reached=reached: newest(where) >= reached + 20, "two more checkpoints")
                reached = newest(where)
                process = run._run._process
                assert process is not None
                process.send_signal(signal.SIGKILL)  # the agent; its ranks end with it
                process.wait()
                continue
            assert run.end() == 0, run.log()
            assert run.digests() == {quiet(*args)}, run.log()
            assert min(begins(run)) > 40, begins(run)
    assert traces(run) == ONCE


def test_the_group_that_saves_is_killed_in_mid_save(tmp_path: Path, quiet: Callable[..., str]) -> None:
    # A state of 15 MB, so that a save takes long enough to be hit.
    args, where = ("--steps", "60", "--pause", "0.005", "--width", "90000"), tmp_path / "checkpoints"
    with Run(tmp_path / "run", *args, groups=2, options=saving(where, 10), script=SCRIPT, patience=LONG) as run:
        run.until(lambda: newest(where) >= 10, "a checkpoint")
        for life in (0, 1):
            run.until(lambda life=life: list(where.glob(f"*.partial-rg0i{life}")), f"a save of life {life}")
            run.signal(0)
            assert all((path / MANIFEST).exists() for path in checkpoints_in(where)), "whole, or not there"
        assert run.end() == 0, run.log()
        assert run.digests() == {quiet(*args)}, run.log()
        assert run.events("lost") and not run.events("resume")
    assert newest(where) == 60
    assert not list(where.glob("*.partial-*"))


def test_groups_of_several_devices_and_a_damaged_checkpoint(tmp_path: Path, quiet: Callable[..., str]) -> None:
    args, where = ("--steps", "100", "--pause", "0.002", "--devices", "2"), tmp_path / "checkpoints"
    with Run(tmp_path / "first", *args, groups=2, options=saving(where, 10), script=SCRIPT, patience=LONG) as run:
        run.until(lambda: newest(where) >= 20, "two checkpoints")
        run.interrupt()
        assert run.end() == 130, run.log()
    stopped, before = checkpoints_in(where)[:2]
    with (stopped / "state" / "manifest.ocdbt").open("r+b") as file:
        file.truncate(9)
    with Run(tmp_path / "second", *args, groups=3, options=saving(where, 50), script=SCRIPT, patience=LONG) as run:
        assert run.end() == 0, run.log()
        assert f"the checkpoint {stopped} is passed over, for it is damaged" in said(run)
        assert min(begins(run)) == int(before.name.removeprefix("step-")) + 1
        assert run.digests() == {quiet(*args)}, run.log()


def test_groups_of_several_processes(tmp_path: Path) -> None:
    args, where = ("--steps", "120", "--pause", "0.002"), tmp_path / "checkpoints"

    def start(name: str, groups: int, *options: str) -> Run:
        layout = ("--nproc-per-group", "2", "--device", "cpu", *options)
        return Run(tmp_path / name, *args, groups=groups, options=layout, script=SCRIPT, patience=LONG)

    with start("quiet", 1) as run:
        assert run.end() == 0, run.log()
        (digest,) = run.digests()
    with start("first", 2, *saving(where, 10)) as run:
        run.settled(2, 15)
        run.until(lambda: newest(where) >= 10, "a checkpoint")
        for group, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
            run.signal(group, rank=rank)
        run.until(lambda: begins(run)[2:], "a life that goes on from a checkpoint")
        run.until(lambda: newest(where) >= 40, "more checkpoints")
        run.interrupt()
        assert run.end() == 130, run.log()
        assert begins(run)[2] > 10, begins(run)
    stopped, before = checkpoints_in(where)[:2]
    with (stopped / "state" / "manifest.ocdbt").open("r+b") as file:
        file.truncate(9)
    with start("second", 1, *saving(where, 50)) as run:
        assert run.end() == 0, run.log()
        assert said(run).count(f"the checkpoint {stopped} is passed over, for it is damaged") == 1
        assert begins(run) == [int(before.name.removeprefix("step-")) + 1]
        assert run.digests() == {digest}, run.log()
    assert newest(where) == 120
    assert not list(where.glob("*.partial-*"))
    assert traces(run) == ONCE


def test_the_newest_is_damaged_when_all_groups_are_lost(tmp_path: Path, quiet: Callable[..., str]) -> None:
    args, where = ("--steps", "200", "--pause", "0.002"), tmp_path / "checkpoints"
    with Run(tmp_path / "run", *args, groups=2, options=saving(where, 20), script=SCRIPT, patience=LONG) as run:
        run.until(lambda: len(run.events("saved")) >= 2, "word of two checkpoints")
        for group in (0, 1):
            run.signal(group, signal.SIGSTOP)  # so that nothing is saved any more, nor read before it is damaged
        run.until(lambda: all(run.life(group).stopped for group in (0, 1)), "both to stand still")
        last, before = checkpoints_in(where)[:2]
        (last / MANIFEST).write_bytes(b"{")
        for group in (0, 1):
            run.signal(group)
        assert run.end() == 0, run.log()
        assert run.digests() == {quiet(*args)}, run.log()
        step, older = (int(path.name.removeprefix("step-")) for path in (last, before))
        told = [event["text"] for event in run.events("unshared")]
        assert told == [f"the checkpoint of step {step} is damaged; the newest that is whole is that of step {older}"]
        assert min(b for b in begins(run) if b > 1) == older + 1


def said(run: Run) -> str:
    return "".join(log.read_text() for log in run.directory.glob("rg*/i*/**/stderr.log"))


def test_another_structure_is_refused(tmp_path: Path) -> None:
    args, where = ("--steps", "12"), tmp_path / "checkpoints"
    for words, code in ((args, 0), ((*args, "--width", "33"), 2)):
        with Run(
            tmp_path / str(code), *words, groups=1, options=saving(where, 10), script=SCRIPT, patience=LONG
        ) as run:
            assert run.end() == code, run.log()
    assert "does not fit that of this group: state['opt'][0].mu['b'] is float32[32] there but float32[33] here" in said(
        run
    )
    assert "Traceback" not in run.log() + said(run)
