"""Flipped bits, in real processes: seen before the step that they spoilt is committed, and the bits of a quiet run."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from planaria.core.bitflips import DONE, GRADIENT, MOMENT, ORDER, PARAMETER, VARIABLE
from tests.e2e.harness import Run
from tests.e2e.layouts import SCRIPT, start

pytestmark = pytest.mark.e2e
LOW_COMM = Path(__file__).parent / "scripts" / "low_comm.py"
SLOW = ("--steps", "80", "--pause", "0.01")


@pytest.fixture(autouse=True)
def _takes_orders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "1")
    yield


def flip(run: Run, group: int, target: str, number: int, rank: int = 0) -> None:
    """Have it done, and wait for that."""
    life = run.life(group)
    directory = life.directory / f"rank{rank}" if rank else life.directory
    (directory / "draft").write_text(f"{target} {number}")
    (directory / "draft").rename(directory / ORDER)
    done = directory / DONE
    run.until(lambda: done.exists() and f'"number": {number}' in done.read_text(), f"a flip in group {group}")


def named(run: Run, group: int, count: int) -> str:
    """The newest of ``count`` events about what was wrong in the group."""

    def met() -> list[str]:
        texts = [event["text"] for event in run.events("corrupt") if event["group"] == group]
        return texts if len(texts) >= count else []

    found: list[str] = run.until(met, f"{count} findings about group {group}")
    return found[-1]


def test_three_groups_find_who_is_wrong_and_heal_it(tmp_path: Path, quiet: Callable[..., str]) -> None:
    options = ("--check-state", "1000", "--recheck", "1")  # not due in between: moments show in the parameters
    with Run(tmp_path / "run", *SLOW, options=options) as run:
        run.step(5)
        pids = {group: run.life(group).processes[0].pid for group in range(3)}
        flip(run, 1, PARAMETER, 5)
        assert "state is not that of the others (model." in named(run, 1, 1)
        flip(run, 2, MOMENT, 6)
        assert "state is not that of the others" in named(run, 2, 1)
        flip(run, 0, GRADIENT, 7)
        assert "gradients are not those that others agree on" in named(run, 0, 1)
        assert run.end() == 0, run.log()
        assert run.digests() == {quiet(*SLOW)}, run.log()
        assert len(run.events("corrupt")) == 3
        assert {group: run.life(group).processes[0].pid for group in range(3)} == pids  # nobody was started again


def test_the_rank_of_a_group_is_named(tmp_path: Path, unhurt: Callable[[str], str]) -> None:
    with start(tmp_path / "run", "fsdp", groups=3, more=("--check-state", "1", "--recheck", "1")) as run:
        run.step(3)
        flip(run, 1, PARAMETER, 5, rank=1)
        assert "(rank 1: " in named(run, 1, 1)
        flip(run, 2, GRADIENT, 8, rank=1)
        assert "(rank 1: shards" in named(run, 2, 1)
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt("fsdp")}, run.log()


def test_the_gpu_of_the_rank_that_is_caught_three_times_is_drained(
    tmp_path: Path, unhurt: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as anybody knows: the groups' ranks have GPUs, and compute on the CPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    options = ("--nproc-per-group", "2", "--check-state", "1")
    with Run(tmp_path / "run", "fsdp", "--pause", "0.05", options=options, script=SCRIPT) as run:
        for number in range(1, 4):
            run.step(2 * number)
            flip(run, 1, PARAMETER, 4 + number, rank=1)
            assert "(rank 1: " in named(run, 1, number)
        (event,) = run.until(lambda: run.events("health"), "word of it")
        why = "group 1 rank 1: GPU 3 was caught with a wrong state or wrong gradients 3 times"
        assert event["text"] == f"{why}: drained, until planaria undrain takes it back"
        run.incarnation(1, 1)
        run.settled(3, beyond=run.watch.step)
        shown = json.loads(run.operate("status", "--json").stdout)
        assert [each.rpartition(":")[2] for each in shown["drained"]] == ["3"], "the other rank's is free for others"
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt("fsdp")}, run.log()


def test_two_groups_stop_with_the_evidence_or_go_back_to_a_checkpoint(
    tmp_path: Path, quiet: Callable[..., str]
) -> None:
    with Run(tmp_path / "run", *SLOW, groups=2, options=("--check-state", "1")) as run:
        run.step(5)
        flip(run, 1, PARAMETER, 5)
        assert run.end() == 1
        assert "nobody can tell whose is right (" in run.log()
        files = sorted(run.directory.glob("rg*/i0/corruption.json"))
        assert len(files) == 2
        facts = json.loads(files[0].read_text())
        ((name, sums),) = facts["ranks"]["0"].items()
        assert name.startswith("model.") and len(set(sums.values())) == 2
    more = ("--check-state", "1", "--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "4")
    with Run(tmp_path / "again", *SLOW, groups=2, options=more) as run:
        run.until(lambda: run.events("saved"), "a checkpoint")
        flip(run, 1, PARAMETER, 5)
        assert run.end() == 0, run.log()
        assert run.events("resume") and run.digests() == {quiet(*SLOW)}, run.log()


def test_a_group_is_killed_when_another_has_a_flipped_bit(tmp_path: Path, quiet: Callable[..., str]) -> None:
    with Run(tmp_path / "run", *SLOW, groups=4, options=("--check-state", "3", "--recheck", "0.5")) as run:
        for group in (1, 2):
            run.settled(4, beyond=run.watch.step + 2)
            life = run.life(group)
            (life.directory / "draft").write_text(f"{PARAMETER} {group}")
            (life.directory / "draft").rename(life.directory / ORDER)
            run.signal((group + 1) % 4, signal.SIGKILL)
            named(run, group, 1)
        assert run.end() == 0, run.log()
        assert run.digests() == {quiet(*SLOW)}, run.log()


@pytest.mark.parametrize(
    ("words", "options", "targets"),
    [
        (("--exact", "--shards", "6"), ("--check-state", "1000", "--recheck", "1"), (PARAMETER, MOMENT, GRADIENT)),
        ((), ("--check-state", "1000"), (PARAMETER, MOMENT)),
        (("--method", "streaming"), ("--check-state", "2", "--reduction", "int8"), (PARAMETER, MOMENT)),
    ],
    ids=["exact", "diloco", "streaming"],
)
def test_what_groups_share_between_syncs_is_compared_at_them(
    tmp_path: Path, words: tuple[str, ...], options: tuple[str, ...], targets: tuple[str, ...]
) -> None:
    """Low communication: the shared parameters and the outer optimizer's state, and with exact=True what was made of a
    shard too. Nobody is started again, and all end with the same."""
    device = ("--device", "cpu")
    with Run(tmp_path / "run", *words, "--pause", "0.01", options=(*device, *options), script=LOW_COMM) as run:
        run.step(3)
        pids = {group: run.life(group).processes[0].pid for group in range(3)}
        for group, target in zip((1, 2, 0), targets, strict=False):
            flip(run, group, target, 5 + group)
            what = "gradients are not those" if target == GRADIENT else "state is not that of the others (sync."
            assert what in named(run, group, 1)
        assert run.end() == 0, run.log()
        (found,) = run.digests()
        assert len(run.events("corrupt")) == len(targets)
        assert {group: run.life(group).processes[0].pid for group in range(3)} == pids
    if "--exact" in words:
        with Run(tmp_path / "quiet", *words, groups=1, options=device, script=LOW_COMM) as quiet:
            assert quiet.end() == 0 and quiet.digests() == {found}


def test_two_groups_that_share_different_things_stop_with_the_evidence(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--check-state", "1")
    with Run(tmp_path / "run", "--pause", "0.01", groups=2, options=options, script=LOW_COMM) as run:
        run.step(3)
        flip(run, 1, MOMENT, 5)
        assert run.end() == 1
        assert "nobody can tell whose is right (" in run.log() and "sync.outer.state[" in run.log()
        assert len(sorted(run.directory.glob("rg*/i0/corruption.json"))) == 2
