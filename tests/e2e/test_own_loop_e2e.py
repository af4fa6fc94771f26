"""The promise for loops that Planaria does not drive: any kill, and the bits of the quiet run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from planaria.core.messages import Phase
from tests.e2e.harness import Once, Run, ended
from tests.e2e.test_lost_ranks_e2e import pids
from tests.e2e.test_standbys_e2e import warm

pytestmark = pytest.mark.e2e
SCRIPT = Path(__file__).parent / "scripts" / "own_loop.py"


def start(directory: Path, *words: str, groups: int = 3, options: tuple[str, ...] = ()) -> Run:
    return Run(directory, *words, groups=groups, options=options, script=SCRIPT)


@pytest.fixture(scope="module")
def unhurt(once: Once) -> Callable[..., str]:
    def digest(form: str, ranks: int = 1) -> str:
        options = ("--nproc-per-group", str(ranks))
        made = lambda directory: ended(start(directory, form, groups=1, options=options))  # noqa: E731
        return once(f"own loop {form} {ranks}", made)

    return digest


@pytest.mark.parametrize("form", ["state", "file"])
def test_groups_are_killed(tmp_path: Path, unhurt: Callable[..., str], form: str) -> None:
    with start(tmp_path / "run", form, "--pause", "0.01") as run:
        run.step(5)
        run.signal(0)  # the host of the rendezvous
        run.incarnation(0, 1)
        run.settled(3, beyond=run.watch.step)
        run.signal(1)
        run.signal(2)  # so that the one that has healed is all that is left
        run.incarnation(2, 1)
        run.settled(3, beyond=run.watch.step)
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt(form)}, run.log()
    shards = {json.loads(line)["shards"] for f in run.directory.glob("rg*/i*/metrics.jsonl") for line in f.open()}
    assert shards == {6}


def test_a_load_that_fails_ends_its_group_and_no_other(tmp_path: Path, unhurt: Callable[..., str]) -> None:
    with start(tmp_path / "run", "state", "--pause", "0.01", "--odd", "load") as run:
        run.step(5)
        run.signal(1)
        (refused,) = run.until(
            lambda: [e for e in run.events("exit") if e["group"] == 1 and e["data"]["incarnation"] == 1],
            "the end of group 1",
        )
        assert refused["data"]["exit_code"] == 2, run.log()
        assert "load, registered with job.register, failed: KeyError: 'optimizer.0'" in refused["text"], run.log()
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt("state")}, run.log()


def test_whoever_loads_is_seen_to_do_so(tmp_path: Path, unhurt: Callable[..., str]) -> None:
    """A load that hangs holds up everybody, and no peer is to blame: see core.liveness."""
    with start(tmp_path / "run", "state", "--pause", "0.01", "--odd", "wait") as run:
        run.step(5)
        run.signal(1)
        run.phase(1, 1, Phase.LOADING)
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt("state")}, run.log()


def test_all_groups_are_killed_and_the_disk_has_the_state(tmp_path: Path, unhurt: Callable[..., str]) -> None:
    options = ("--checkpoint", str(tmp_path / "checkpoints"), "--checkpoint-every", "4")
    with start(tmp_path / "run", "file", "--pause", "0.01", options=options) as run:
        run.until(lambda: list((tmp_path / "checkpoints").glob("step-????????")), "a checkpoint")
        for group in range(3):
            run.signal(group)
        run.until(lambda: run.events("resume"), "the job to begin again")
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt("file")}, run.log()


@pytest.mark.parametrize(("form", "ranks"), [("state", 2), ("file", 2), ("file", 1)])
def test_standbys_take_the_places_of_ranks(tmp_path: Path, unhurt: Callable[..., str], form: str, ranks: int) -> None:
    """They wait in ``job.register``, and what they hold when they are needed is the state of the others."""
    options = ("--standbys", "1", "--nproc-per-group", str(ranks))
    with start(tmp_path / "run", form, "--pause", "0.01", groups=2, options=options) as run:
        before = pids(run, 1, 0, ranks)
        standby = warm(run, 1)  # tries itself as rank 0
        run.signal(1)
        assert pids(run, 1, 1, ranks) == {**before, 0: standby}, run.log()
        before = pids(run, 0, 0, ranks)
        standby = warm(run, 2)
        moves = str(ranks - 1)  # as another rank than it is, it runs the script again
        assert run.operate("migrate", "0", "--rank", moves).returncode == 0
        assert pids(run, 0, 1, ranks) == {**before, ranks - 1: standby}, run.log()
        run.settled(2, beyond=run.watch.step)
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt(form, ranks)}, run.log()
        assert not run.events("unprepared"), run.log()
