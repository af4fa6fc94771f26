"""The promise: any kill, at any moment, and the same bits. Every stall that was ever seen has a test here."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from planaria.core.messages import Phase
from tests.e2e.harness import Run, alone

pytestmark = pytest.mark.e2e
Quiet = Callable[..., str]
SLOW = ("--steps", "80", "--pause", "0.01")


def finish(run: Run, quiet: Quiet) -> None:
    """The run ends well, with the bits of the quiet reference."""
    assert run.end() == 0, run.log()
    assert run.digests() == {quiet(*run.script.args)}, run.log()


def test_nothing_happens(tmp_path: Path, quiet: Quiet) -> None:
    with Run(tmp_path / "run", "--steps", "60") as run:
        finish(run, quiet)
    assert len(list((tmp_path / "run").glob("rg*/i*/result.json"))) == 3


def test_the_group_that_hosts_the_rendezvous_is_killed(tmp_path: Path, quiet: Quiet) -> None:
    with Run(tmp_path / "run", *SLOW) as run:
        run.step(10)
        run.signal(0)
        run.incarnation(0, 1)
        finish(run, quiet)


def test_two_are_killed_at_once(tmp_path: Path, quiet: Quiet) -> None:
    with Run(tmp_path / "run", *SLOW, groups=4) as run:
        run.step(10)
        run.signal(1)
        run.signal(3)
        finish(run, quiet)


def test_a_second_kill_before_the_first_recovery_ends(tmp_path: Path, quiet: Quiet) -> None:
    with Run(tmp_path / "run", *SLOW, "--linger", "FORMING", groups=4) as run:
        run.step(10)
        run.signal(0)
        run.phase(1, 0, Phase.FORMING)
        run.signal(1)
        finish(run, quiet)


def test_all_but_one_are_killed(tmp_path: Path, quiet: Quiet) -> None:
    with Run(tmp_path / "run", *SLOW, groups=4) as run:
        run.step(10)
        for group in (0, 1, 3):
            run.signal(group)
        finish(run, quiet)


def test_the_joiner_is_killed_while_it_joins(tmp_path: Path, quiet: Quiet) -> None:
    with Run(tmp_path / "run", "--steps", "150", "--pause", "0.01") as run:
        run.step(10)
        run.signal(2)
        run.phase(2, 1, Phase.FORMING)
        run.signal(2)
        run.incarnation(2, 2)
        finish(run, quiet)


def test_a_source_is_killed_while_a_joiner_heals(tmp_path: Path, quiet: Quiet) -> None:
    # A state of 30 MB, so that healing takes long enough to be hit.
    args = ("--steps", "40", "--pause", "0.01", "--width", "120000")
    with Run(tmp_path / "run", *args) as run:
        run.step(3)
        run.signal(2)
        run.phase(2, 1, Phase.HEALING)
        run.signal(0)
        finish(run, quiet)


def test_a_kill_while_the_lighthouse_is_down(tmp_path: Path, quiet: Quiet) -> None:
    with Run(tmp_path / "run", *SLOW) as run:
        run.step(10)
        run.kill_lighthouse()
        run.signal(1)
        finish(run, quiet)
        assert len({e["text"] for e in run.events("epoch")}) == 2


def test_the_lighthouse_is_killed_during_a_recovery(tmp_path: Path, quiet: Quiet) -> None:
    with Run(tmp_path / "run", *SLOW) as run:
        run.step(10)
        run.signal(1)
        run.kill_lighthouse()
        finish(run, quiet)


def test_no_step_needs_the_lighthouse(tmp_path: Path, quiet: Quiet) -> None:
    with Run(tmp_path / "run", *SLOW) as run:
        run.step(10)
        run.kill_lighthouse()
        finish(run, quiet)
        assert not run.events("lost")


def test_a_hang_is_fenced_and_a_zombie_heals(tmp_path: Path, quiet: Quiet) -> None:
    with Run(tmp_path / "run", "--steps", "300", "--pause", "0.01") as run:
        run.step(10)
        stopped = run.signal(1, signal.SIGSTOP)
        before = run.watch.step
        run.until(lambda: run.watch.step > before + 5, "the others to go on without the stopped group")
        run.signal(1, signal.SIGCONT)
        run.until(lambda: stopped.look().step > before + 5, "the zombie to be healed and to count again")
        assert stopped.alive
        finish(run, quiet)
        assert run.events("suspect")


def test_a_hang_that_does_not_end_is_replaced(tmp_path: Path, quiet: Quiet) -> None:
    with Run(tmp_path / "run", "--steps", "400", "--pause", "0.01") as run:
        run.step(10)
        run.signal(2, signal.SIGSTOP)
        run.incarnation(2, 1)
        finish(run, quiet)


def test_kills_one_after_the_other(tmp_path: Path, quiet: Quiet) -> None:
    with Run(tmp_path / "run", "--steps", "400", "--pause", "0.005") as run:
        for turn, group in enumerate((0, 2, 1, 0)):
            run.settled(3, beyond=10 + 20 * turn)
            run.signal(group)
        finish(run, quiet)


def test_all_are_killed(tmp_path: Path) -> None:
    with Run(tmp_path / "run", *SLOW) as run:
        run.step(10)
        for group in (0, 1, 2):
            run.signal(group)
        assert run.end() == 1
        assert "every group that held the state is lost" in run.log()


def test_fast_reduction_loses_nothing(tmp_path: Path) -> None:
    with Run(tmp_path / "run", *SLOW, options=("--reduction", "fast")) as run:
        run.step(10)
        run.signal(1)
        assert run.end() == 0, run.log()
        assert len(run.digests()) == 1  # equal on all groups, though not those of the tree
        shards = {s for _, s in _shards_by_step(run)}
        assert shards == {6}


def test_codes_have_the_bits_of_a_run_alone(tmp_path: Path) -> None:
    with Run(tmp_path / "run", *SLOW, options=("--reduction", "int8")) as run:
        run.step(10)
        run.signal(1)
        run.incarnation(1, 1)
        assert run.end() == 0, run.log()
        assert run.digests() == {alone(tmp_path, "--steps", "80", reduction="int8")}, run.log()


def test_shrink_goes_on_with_fewer_samples(tmp_path: Path) -> None:
    with Run(tmp_path / "run", *SLOW, options=("--policy", "shrink")) as run:
        run.step(10)
        run.signal(1)
        assert run.end() == 0, run.log()
        assert len(run.digests()) == 1
        shards = {s for _, s in _shards_by_step(run)}
        assert shards == {4, 6}


def _shards_by_step(run: Run) -> set[tuple[int, int]]:
    import json

    found = set()
    for file in run.directory.glob("rg*/i*/metrics.jsonl"):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            found.add((entry["step"], entry["shards"]))
    return found
