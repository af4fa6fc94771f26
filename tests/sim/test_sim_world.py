"""Whole runs, scenario files, the shrinking of failures and the command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from planaria.core.actions import Exchange
from planaria.core.messages import Member, Policy, Quorum, QuorumId
from planaria.core.stepper import Stepper
from planaria.core.tree import Node
from planaria.sim.__main__ import main
from planaria.sim.invariants import Checker, Violation, add, gradient, reduce
from planaria.sim.scenario import MENUS, Fault, Scenario, random_scenario
from planaria.sim.shrink import shrink
from planaria.sim.world import PATIENCE, Outcome, World

SMALL = Scenario(groups=3, nodes=3, shards=4, steps=4)


class NeverTells(Stepper):
    def broken(self, id: QuorumId, text: str):  # type: ignore[no-untyped-def]
        super().broken(id, text)
        return []


def test_a_quiet_run_finishes_with_one_quorum() -> None:
    outcome = World(SMALL).run()
    assert (outcome.verdict, outcome.failed, outcome.quorums, outcome.commits) == ("finished", False, 1, 12)


def test_equal_scenarios_give_equal_runs() -> None:
    scenario = random_scenario(11, SMALL)
    first, second = World(scenario, keep_trace=True).run(), World(scenario, keep_trace=True).run()
    assert first == second
    other = World(replace(scenario, seed=12), keep_trace=True).run()
    assert other.lines != first.lines


def test_a_trace_is_kept_for_failures_and_on_request_only() -> None:
    assert World(SMALL).run().lines == []
    lines = World(SMALL, keep_trace=True).run().lines
    assert any("founding 1.1 [0.0 1.0 2.0]" in text for text in lines)
    assert any("commit: step 3 under 1.1" in text for text in lines)


def test_what_is_expected_is_compared() -> None:
    outcome = World(replace(SMALL, expect="stopped")).run()
    assert outcome.failed and "'stopped' is expected" in outcome.verdict
    outcome = World(replace(SMALL, finishers=("0.0", "1.0", "2.1"))).run()
    assert outcome.failed and "is expected" in outcome.verdict


def test_a_fault_can_wait_for_an_event() -> None:
    fault = Fault("kill", at=0.0, target=1, on="commit", whose=0, nth=2)
    lines = World(replace(SMALL, faults=(fault,)), keep_trace=True).run().lines
    struck = next(number for number, text in enumerate(lines) if "*** kill 1" in text)
    assert sum("group 0: commit" in text for text in lines[:struck]) == 2


def test_a_stall_is_found_and_names_who_waits() -> None:
    scenario = replace(SMALL, faults=(Fault("cut data", 1.7, 0, 1, 60.0),))
    outcome = World(scenario, stepper=NeverTells).run()
    assert outcome.failed
    assert outcome.verdict.startswith(f"no end {PATIENCE:.0f} s after the last fault: group ")
    assert "group 0.0 FORMING step" in outcome.verdict


@pytest.mark.parametrize("policy", list(Policy))
def test_scenarios_survive_being_written_and_read(policy: Policy, tmp_path: Path) -> None:
    for seed in range(20):
        scenario = replace(random_scenario(seed, SMALL), policy=policy, about="A word.", finishers=("0.0",))
        path = tmp_path / "s.json"
        path.write_text(scenario.to_json())
        assert Scenario.load(path) == scenario


def test_a_misspelt_field_is_named() -> None:
    with pytest.raises(ValueError, match="a scenario has no \\['shard'\\]"):
        Scenario.from_json('{"shard": 3}')


def test_random_scenarios_can_be_played_and_differ() -> None:
    scenarios = [random_scenario(seed, SMALL) for seed in range(50)]
    assert all(s.shards >= s.groups >= s.nodes >= 1 for s in scenarios)
    assert len({s.faults for s in scenarios}) > 40
    only = random_scenario(3, SMALL, ("kill",))
    assert {f.kind for f in only.faults} == {"kill"}
    assert {kind for menu in MENUS for kind in menu} >= {"kill", "pause", "fail over", "drain"}


def test_shrinking_leaves_the_one_fault_that_matters() -> None:
    guilty = Fault("pause", 1.0, 1)
    faults = (Fault("kill", 1.0), guilty, Fault("kill", 2.0), Fault("slow", 3.0))

    def run(scenario: Scenario) -> Outcome:
        failed = guilty in scenario.faults
        return Outcome(0, "broken" if failed else "finished", failed, 1.0, 1, 1, [])

    small, outcome = shrink(replace(SMALL, faults=faults), run(replace(SMALL, faults=faults)), run)
    assert small.faults == (guilty,) and small.steps == 2 and outcome.failed


# --- the checker ----------------------------------------------------------------------------------------------

QUORUM = Quorum(QuorumId(1, 1), (Member(0, 0), Member(1, 0)), ("", ""), True, "lineage")


def exchange(*owned: set[int]) -> tuple[object, ...]:
    return ("exchange", 0, tuple(frozenset(o) for o in owned))


@pytest.mark.parametrize(
    ("owned", "text"),
    [
        (({0, 1}, {1, 2, 3}), "has a shard twice"),
        (({0, 1}, {2}), "has shards \\[0, 1, 2\\] of 4"),
        ((set(), set()), "without any shard"),
    ],
)
def test_every_step_has_every_shard_exactly_once(owned: tuple[set[int], ...], text: str) -> None:
    checker = Checker(4, 4, Policy.REDISTRIBUTE)
    with pytest.raises(Violation, match=text):
        checker.collective(QUORUM, exchange(*owned), (None, None))
    checker.collective(QUORUM, exchange({0, 1}, {2, 3}), (None, None))


def test_a_commit_must_have_the_state_of_the_quiet_run() -> None:
    checker = Checker(2, 4, Policy.REDISTRIBUTE)
    whole = Exchange(QUORUM.id, 0, (frozenset({0}), frozenset({1})))
    nodes = [Node(0, 1), Node(1, 2)]
    checker.committed(Member(0, 0), whole, nodes, checker.reference[1], 0.0)
    with pytest.raises(Violation, match="not that of the quiet run"):
        checker.committed(Member(0, 0), whole, nodes, checker.reference[1] + 1, 0.0)
    with pytest.raises(Violation, match="with shards \\[0\\] instead of \\[0, 1\\]"):
        checker.committed(Member(0, 0), whole, nodes[:1], checker.reference[1], 0.0)


def test_sources_of_a_healing_must_agree() -> None:
    checker = Checker(2, 4, Policy.REDISTRIBUTE)
    assert checker.healed(Member(1, 0), 2, [(2, 99, 0), (2, 99, 0)]) == (99, 0)
    for other in ((2, 98, 0), (2, 99, 1)):
        with pytest.raises(Violation, match="sources that disagree"):
            checker.healed(Member(1, 0), 2, [(2, 99, 0), other])
    with pytest.raises(Violation, match="from a source that holds step 1"):
        checker.healed(Member(1, 0), 2, [(1, 99, 0)])


def test_a_run_begins_with_the_newest_checkpoint_and_makes_no_step_of_it_again() -> None:
    checker, me = Checker(2, 4, Policy.REDISTRIBUTE), Member(0, 0)
    checker.begins(QuorumId(1, 3), 2)
    founding = Quorum(QuorumId(1, 4), (me,), ("",), True, "", founding=True)
    with pytest.raises(Violation, match=r"1\.4 begins at step 1, but there was a checkpoint of step 2"):
        checker.starts(founding, 1)
    checker.starts(founding, 3)
    shards = (frozenset({0, 1}),)
    with pytest.raises(Violation, match="in a run that began at 3, out of turn"):
        checker.committed(me, Exchange(founding.id, 2, shards), [Node(0, 2)], checker.reference[3], 0.0)
    with pytest.raises(Violation, match="but the job began again meanwhile"):
        checker.committed(me, Exchange(QuorumId(1, 2), 3, shards), [Node(0, 2)], checker.reference[4], 0.0)
    checker.committed(me, Exchange(founding.id, 3, shards), [Node(0, 2)], checker.reference[4], 0.0)


def test_epochs_only_rise_and_finishers_agree() -> None:
    checker = Checker(2, 4, Policy.SHRINK)
    checker.rolled(Member(0, 0), QuorumId(2, 1))
    with pytest.raises(Violation, match=r"works under 1.9 after 2.1"):
        checker.rolled(Member(0, 0), QuorumId(1, 9))
    checker.finished(Member(0, 0), 4, 5)
    with pytest.raises(Violation, match="finished members hold different states"):
        checker.finished(Member(1, 0), 4, 6)


def test_brackets_matter_in_the_sum_and_sides_do_not() -> None:
    leaves = [(Node(s, s + 1), gradient(1, 0, s)) for s in range(3)]
    a, b, c = (value for _, value in leaves)
    assert add(a, b) == add(b, a)
    assert add(add(a, b), c) != add(a, add(b, c))
    assert reduce(leaves, 3) == add(add(a, b), c) == reduce([(Node(0, 2), add(a, b)), leaves[2]], 3)


# --- the command line -----------------------------------------------------------------------------------------


def test_a_sweep_says_what_it_saw(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "6", "--jobs", "1", "--groups", "2", "--shards", "3", "--steps", "3", "-v"]) == 0
    text = capsys.readouterr().out
    assert "seed 5: " in text
    assert "6 seeds from 0: " in text and "virtual hours" in text


def test_two_processes_see_the_same_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for jobs in ("1", "2"):
        main(["--seeds", "30", "--jobs", jobs, "--groups", "2", "--shards", "3", "--steps", "3", "-v"])
        said.append([text for text in capsys.readouterr().out.splitlines() if text.startswith("seed ")])
    assert said[0] == said[1] and len(said[0]) == 30


def test_every_seed_is_counted_once_and_a_failure_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(start: int, seeds: int, base: Scenario, menu: tuple[str, ...], jobs: int) -> Iterator[Outcome]:
        for seed in range(start, start + seeds):
            verdict = ("finished", "stopped", f"broken in its own way {seed}")[seed % 3]
            yield Outcome(seed, verdict, seed % 3 == 2, 360.0, 10, 2, [])

    monkeypatch.setattr("planaria.sim.__main__.outcomes", run)
    assert main(["--seeds", "9", "--keep-going", "9", "--groups", "1", "--steps", "2"]) == 1
    assert (
        "9 seeds from 0: 3 FAILED, 3 finished, 3 stopped; 90 commits under 18 quorums in 0.9" in capsys.readouterr().out
    )
    assert main(["--seeds", "9", "--keep-going", "2", "--groups", "1", "--steps", "2"]) == 1
    assert "6 seeds from 0: 2 FAILED, 2 finished, 2 stopped" in capsys.readouterr().out, "ends at the second"
    assert main(["--seeds", "2", "--groups", "1", "--steps", "2"]) == 0
    assert "2 seeds from 0: 1 finished, 1 stopped" in capsys.readouterr().out


def test_a_failing_seed_is_shrunk_shown_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Stepper, "broken", lambda self, id, text: [])
    assert main(["--seeds", "300", "--jobs", "1", "--groups", "3", "--steps", "4", "--save", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "FAILED: " in text and "Fault(kind=" in text
    assert len(text.splitlines()) < 60
    (path,) = tmp_path.glob("seed-*.json")
    assert main(["--scenario", str(path)]) == 1, "the file fails as the seed did"


def test_a_scenario_file_can_be_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "quiet.json"
    path.write_text(SMALL.to_json())
    assert main(["--scenario", str(path), "-v"]) == 0
    text = capsys.readouterr().out
    assert "commit: step 3" in text and "quiet.json: finished after" in text
