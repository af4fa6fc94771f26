"""Golden scenarios of the lighthouse: an event, and the effects that it must have, in order.

Every group has its own agent, ``a0``, ``a1``, … An effect reads ``store 1.2 [0 2]`` or ``a0: publish …``; lines for
people (``Record``) are left out unless a test is about them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from planaria.core.messages import (
    NO_QUORUM,
    Adopted,
    Died,
    Finished,
    Heartbeat,
    Hello,
    JobSpec,
    Kill,
    Member,
    Phase,
    Publish,
    Pulse,
    Quorum,
    QuorumId,
    Ready,
    Refuse,
    Report,
    Stop,
    Suspected,
    Synced,
    Trouble,
    Welcome,
)
from planaria.core.quorum import FOUNDING_GRACE, REPLAN_DELAY, Lighthouse
from planaria.core.roster import Effect, LineageRecord, Persist, Record, Send, lineage_after


def names(members: tuple[Member, ...]) -> str:
    return "[" + " ".join(str(m.group) if not m.incarnation else f"{m.group}.{m.incarnation}" for m in members) + "]"


def kind(quorum: Quorum) -> str:
    return "founding" if quorum.founding else "urgent" if quorum.urgent else "planned"


def line(effect: Effect) -> str:
    match effect:
        case Persist(record):
            return f"store {record.id} {names(record.members)}"
        case Send(agent, Publish(_, quorum)):
            return f"{agent}: {kind(quorum)} {quorum.id} {names(quorum.members)}"
        case Send(agent, Stop(reason)):
            return f"{agent}: stop: {reason}"
        case Send(agent, Refuse(_, reason)):
            return f"{agent}: refuse: {reason}"
        case Send(agent, order):
            return f"{agent}: {type(order).__name__.lower()}"
        case Record(event):
            return f"event {event.kind}: {event.text}"


class Desk:
    """A lighthouse and a clock, with words for what may happen."""

    def __init__(self, groups: int = 3, epoch: int = 1, last: LineageRecord | None = None, ready: bool = True) -> None:
        self.lighthouse = Lighthouse("job", epoch, last)
        self.now = 100.0
        self.groups = groups
        self.incarnations = dict.fromkeys(range(groups), 0)
        if ready:
            for group in range(groups):
                self.connects(group)

    def member(self, group: int) -> Member:
        return Member(group, self.incarnations.setdefault(group, 0))

    def tell(self, group: int, report: Report) -> list[str]:
        return self.lines(self.lighthouse.handle(f"a{group}", report, self.now))

    def lines(self, effects: list[Effect]) -> list[str]:
        return [line(e) for e in effects if not isinstance(e, Record)]

    def connects(self, group: int, *again: Report) -> list[str]:
        """A new stream: Hello, what is told again, Synced."""
        told = [Hello(f"a{group}", "host", JobSpec("job", self.groups)), *again, Synced()]
        return [text for report in told for text in self.tell(group, report)]

    def report(self, group: int, **changes: object) -> Ready:
        base = Ready(self.member(group), f"host{group}:1", (("torch", "2.13"),), "start", 6, 10)
        return replace(base, **changes)  # type: ignore[arg-type]

    def ready(self, group: int, **changes: object) -> list[str]:
        return self.tell(group, self.report(group, **changes))

    def adopts(self, group: int, number: int, step: int = 0, epoch: int = 1) -> list[str]:
        return self.tell(group, Adopted(self.member(group), QuorumId(epoch, number), step))

    def trouble(self, group: int, number: int, step: int = 0) -> list[str]:
        return self.tell(group, Trouble(self.member(group), QuorumId(1, number), step, "rank 1 is gone"))

    def dies(self, group: int) -> list[str]:
        effects = self.tell(group, Died(self.member(group), "signal 9"))
        self.incarnations[group] += 1  # the next life
        return effects

    def suspects(self, group: int) -> list[str]:
        return self.tell(group, Suspected(self.member(group), "stopped"))

    def beat(self, group: int, step: int, seconds: float = 0.1) -> list[str]:
        quorum = self.lighthouse.current.id if self.lighthouse.current else NO_QUORUM
        pulse = Pulse(self.member(group), Phase.COMPUTING, step, quorum, 0.0, seconds)
        return self.tell(group, Heartbeat((pulse,)))

    def wait(self, seconds: float) -> list[str]:
        """Time passes; the lighthouse is ticked whenever it wants to be, and agents in reach beat once a second."""
        end, found, beat = self.now + seconds, [], self.now + 1.0
        while True:
            wakeup = self.lighthouse.next_wakeup()
            due = min(beat, wakeup if wakeup is not None else beat)
            if due > end:
                break
            self.now = max(due, self.now)
            if due == beat:
                beat += 1.0
                for name in [n for n, agent in self.lighthouse.agents.items() if agent.connected]:
                    found += self.lines(self.lighthouse.handle(name, Heartbeat(()), self.now))
            found += self.lines(self.lighthouse.tick(self.now))
        self.now = end
        return found

    def events(self) -> list[str]:
        return [event.text for event in self.lighthouse.snapshot().events]


def working(groups: int = 3, step: int = 0) -> Desk:
    """All groups work under quorum 1.1."""
    desk = Desk(groups)
    for group in range(groups):
        desk.ready(group)
    for group in range(groups):
        desk.adopts(group, 1, step)
    return desk


# --- the start ------------------------------------------------------------------------------------------------


def test_the_first_quorum_waits_for_all_groups_and_is_stored_before_it_is_told() -> None:
    desk = Desk(3)
    assert desk.ready(0) == []
    assert desk.ready(1) == []
    assert desk.ready(2) == [
        "store 1.1 [0 1 2]",
        "a0: founding 1.1 [0 1 2]",
        "a1: founding 1.1 [0 1 2]",
        "a2: founding 1.1 [0 1 2]",
    ]


def test_the_first_quorum_does_not_wait_for_ever() -> None:
    desk = Desk(3)
    desk.ready(0)
    desk.ready(1)
    assert desk.wait(FOUNDING_GRACE - 0.1) == []
    assert desk.wait(0.2) == ["store 1.1 [0 1]", "a0: founding 1.1 [0 1]", "a1: founding 1.1 [0 1]"]


def test_a_late_group_joins_by_a_planned_change() -> None:
    desk = Desk(3)
    desk.ready(0)
    desk.ready(1)
    desk.wait(FOUNDING_GRACE + 0.1)
    desk.ready(2)
    assert desk.adopts(0, 1) == [], "one change at a time: not before all have taken the last one"
    assert desk.adopts(1, 1) == [
        "store 1.2 [0 1 2]",
        "a0: planned 1.2 [0 1 2]",
        "a1: planned 1.2 [0 1 2]",
        "a2: planned 1.2 [0 1 2]",
    ]
    assert desk.lighthouse.current is not None and desk.lighthouse.current.id == QuorumId(1, 1), "not in force yet"
    desk.adopts(0, 2, 4)
    assert desk.lighthouse.current.id == QuorumId(1, 2), "taken by one is taken by all"


def test_an_odd_fingerprint_is_refused_by_name() -> None:
    desk = Desk(3)
    desk.ready(0)
    desk.ready(1, fingerprint=(("torch", "2.12"),))
    found = desk.ready(2)
    assert found == ["a1: refuse: group 1 (incarnation 0) differs from group 0 in torch (2.13 there, 2.12 here)"]
    assert desk.wait(FOUNDING_GRACE + 0.1)[0] == "store 1.1 [0 2]"


def test_different_starts_are_refused_with_advice() -> None:
    desk = Desk(3)
    desk.ready(0)
    desk.ready(1, initial="other")
    (refusal,) = desk.ready(2)
    assert "seed every group alike" in refusal


def test_a_joiner_with_another_fingerprint_is_refused() -> None:
    desk = working()
    desk.dies(2)
    found = desk.ready(2, shards=7)
    assert found == ["a2: refuse: group 2 (incarnation 1) differs from group 0 in shards (6 there, 7 here)"]


def test_a_member_that_dies_before_anybody_began_costs_nothing() -> None:
    """Group 0 has ended the first roll call and dies. The others have not, so no step can have been committed."""
    desk = Desk(3)
    for group in range(3):
        desk.ready(group)
    desk.adopts(0, 1)
    assert desk.dies(0) == ["store 1.2 [1 2]", "a1: founding 1.2 [1 2]", "a2: founding 1.2 [1 2]"]


def test_all_die_before_anybody_began_and_the_job_starts_afresh() -> None:
    desk = Desk(2)
    desk.ready(0)
    desk.ready(1)
    desk.dies(0)
    desk.dies(1)
    assert desk.ready(0) == []
    assert desk.ready(1)[0] == "store 1.3 [0.1 1.1]"


# --- losses ---------------------------------------------------------------------------------------------------


def test_a_death_is_answered_at_once() -> None:
    desk = working()
    assert desk.dies(1) == ["store 1.2 [0 2]", "a0: urgent 1.2 [0 2]", "a2: urgent 1.2 [0 2]"]


def test_a_restarted_group_joins_by_a_planned_change() -> None:
    desk = working()
    desk.dies(1)
    desk.ready(1)
    desk.adopts(0, 2)
    assert desk.adopts(2, 2)[0] == "store 1.3 [0 1.1 2]"


def test_a_broken_communicator_waits_a_moment_for_a_death_to_be_told() -> None:
    desk = working()
    assert desk.trouble(0, 1) == []
    assert desk.wait(0.01) == []
    assert desk.dies(1)[0] == "store 1.2 [0 2]"
    assert desk.wait(1.0) == []


def test_a_broken_communicator_without_a_death_is_formed_again() -> None:
    desk = working()
    desk.trouble(0, 1)
    assert desk.wait(0.1)[0] == "store 1.2 [0 1 2]"
    assert desk.trouble(1, 1) == [] and desk.wait(1.0) == [], "the other members' trouble with the old one is old news"


def test_two_members_that_cannot_reach_each_other_are_parted() -> None:
    desk = working()
    stored = []
    for number in (1, 2, 3, 4):
        desk.trouble(0, number)
        stored.append(desk.wait(1.0)[0])
    assert stored == ["store 1.2 [0 1 2]", "store 1.3 [0 1 2]", "store 1.4 [0 1]", "store 1.5 [0 2]"]


def test_progress_makes_an_end_of_strikes() -> None:
    desk = working()
    for number in (1, 2):
        desk.trouble(0, number)
        desk.wait(1.0)
    for group in range(3):
        desk.adopts(group, 3, step=5)
    desk.trouble(0, 3, step=5)
    assert desk.wait(1.0)[0] == "store 1.4 [0 1 2]"


def test_a_suspect_is_fenced_and_comes_back() -> None:
    desk = working()
    assert desk.suspects(1) == [
        "store 1.2 [0 2]",
        "a0: urgent 1.2 [0 2]",
        "a1: urgent 1.2 [0 2]",
        "a2: urgent 1.2 [0 2]",
    ], "the fenced one is told as well"
    desk.adopts(0, 2)
    desk.adopts(2, 2)
    assert desk.ready(1, after=QuorumId(1, 2))[0] == "store 1.3 [0 1 2]"


def test_the_only_holder_is_waited_for_while_it_is_only_suspected() -> None:
    desk = working(1)
    assert desk.suspects(0) == []
    assert desk.wait(5.0) == []
    assert desk.ready(0) == [], "its agent sees it go on: nothing has changed"
    assert not desk.lighthouse.stopped


def test_all_lost_ends_the_job_with_a_reason() -> None:
    desk = working(2, step=4)
    desk.dies(0)
    found = desk.dies(1)
    assert [text.split(":")[0] for text in found] == ["store 1.3 []", "a0", "a1"], "only who is not deposed may say so"
    assert "every group that held the state is lost (last commit seen: step 4)" in found[1]
    assert desk.connects(0)[1].startswith("a0: stop"), "an agent that comes later hears it too"


def test_a_fenced_member_saves_the_job_when_the_others_die() -> None:
    """Its state is older, but whole: with the same bits as ever, the job goes on from there."""
    desk = working(2, step=4)
    desk.suspects(0)
    desk.adopts(1, 2, step=7)
    assert desk.dies(1) == [], "group 0 may come back"
    assert "only groups 0 hold a state; waiting for them" in desk.events()[-1]
    assert desk.ready(0, after=QuorumId(1, 2)) == ["store 1.3 [0]", "a0: founding 1.3 [0]"]


def test_a_joiner_that_may_have_healed_is_asked_before_the_job_is_given_up() -> None:
    desk = working(2)
    desk.dies(1)
    desk.adopts(0, 2)
    desk.ready(1)
    desk.adopts(0, 3, step=5)  # the planned one, with the joiner in it, is in force
    assert desk.dies(0) == ["store 1.4 [1.1]", "a1: urgent 1.4 [1.1]"]
    found = desk.ready(1, after=QuorumId(1, 4))  # its roll call: nobody here holds a state
    assert "every group that held the state is lost" in found[1]


# --- silence --------------------------------------------------------------------------------------------------


def test_a_silent_agent_is_no_loss_while_the_others_make_progress() -> None:
    desk = working()
    desk.lines(desk.lighthouse.agent_lost("a2", desk.now))
    for second in range(30):
        assert desk.wait(1.0) == []
        assert desk.beat(0, second) == [] and desk.beat(1, second) == []


def test_a_silent_agent_is_given_up_when_nobody_makes_progress() -> None:
    desk = working()
    desk.lines(desk.lighthouse.agent_lost("a2", desk.now))
    found = []
    for _ in range(6):
        found += desk.wait(1.0)
        desk.beat(0, 3)
        desk.beat(1, 3)
    assert found[0] == "store 1.2 [0 1]"


def test_trouble_and_a_silent_agent_make_a_loss() -> None:
    desk = working()
    desk.lines(desk.lighthouse.agent_lost("a2", desk.now))
    desk.trouble(0, 1)
    assert desk.wait(0.1) == [
        "store 1.2 [0 1]",
        "a0: urgent 1.2 [0 1]",
        "a1: urgent 1.2 [0 1]",
        "a2: urgent 1.2 [0 1]",
    ]


def test_a_minority_waits_for_the_others_and_says_so() -> None:
    desk = working(4)
    for group in (1, 2, 3):
        desk.lines(desk.lighthouse.agent_lost(f"a{group}", desk.now))
    desk.trouble(0, 1)
    assert desk.wait(60.0) == []
    assert "out of reach, the others are no majority of it; waiting for them" in "".join(desk.events())
    assert desk.connects(1, desk.report(1), Adopted(desk.member(1), QuorumId(1, 1), 0))[:1] == ["a1: welcome"]
    assert desk.wait(1.0) == [], "two of four are no majority either"
    found = desk.connects(2, desk.report(2), Adopted(desk.member(2), QuorumId(1, 1), 0))
    assert "store 1.2 [0 1 2]" in found


def test_an_operator_may_say_that_the_missing_are_dead() -> None:
    desk = working(3)
    for group in (1, 2):
        desk.lines(desk.lighthouse.agent_lost(f"a{group}", desk.now))
    desk.trouble(0, 1)
    assert desk.wait(60.0) == []
    assert desk.lines(desk.lighthouse.evict(1, desk.now))[0] == "a1: kill"
    assert desk.lines(desk.lighthouse.evict(2, desk.now))[1] == "store 1.2 [0]"


def test_an_evicted_group_that_turns_up_is_killed() -> None:
    desk = working(3)
    desk.lines(desk.lighthouse.agent_lost("a1", desk.now))
    desk.lighthouse.evict(1, desk.now)
    assert "a1: kill" in desk.connects(1, desk.report(1))


def test_a_lighthouse_that_was_stopped_condemns_nobody() -> None:
    desk = working()
    desk.now += 3600.0  # nobody called it for an hour
    assert desk.beat(0, 50) == []
    assert desk.wait(1.0) == []
    assert desk.beat(1, 51) == [] and desk.beat(2, 51) == []


def test_a_clock_that_goes_backwards_does_no_harm() -> None:
    desk = working()
    desk.now -= 50.0
    assert desk.dies(1)[0] == "store 1.2 [0 2]"


# --- the operator ---------------------------------------------------------------------------------------------


def test_a_drained_group_leaves_by_a_planned_change_and_its_end_is_no_loss() -> None:
    desk = working()
    assert desk.lines(desk.lighthouse.drain(1, desk.now)) == [
        "a1: drain",
        "store 1.2 [0 2]",
        "a0: planned 1.2 [0 2]",
        "a1: planned 1.2 [0 2]",
        "a2: planned 1.2 [0 2]",
    ]
    assert desk.dies(1) == [], "it left before the others have said that they took the change"
    assert desk.adopts(0, 2) == []
    assert desk.adopts(2, 2) == []


def test_a_drained_group_that_died_too_early_is_a_loss() -> None:
    desk = working()
    desk.lighthouse.drain(1, desk.now)
    desk.dies(1)
    assert desk.trouble(0, 1)[0] == "store 1.3 [0 2]"


def test_the_last_group_cannot_be_drained_or_evicted() -> None:
    desk = working(1)
    with pytest.raises(ValueError, match="is the only one that works"):
        desk.lighthouse.drain(0, desk.now)
    with pytest.raises(ValueError, match="is the only one that holds the state"):
        desk.lighthouse.evict(0, desk.now)


def test_who_leaves_stays_until_a_joiner_has_healed() -> None:
    desk = working(2)
    desk.dies(1)
    desk.adopts(0, 2)
    desk.ready(1)  # 1.3 is planned
    assert desk.lines(desk.lighthouse.drain(0, desk.now)) == ["a0: drain"]
    assert desk.adopts(0, 3, step=4) == []
    assert desk.adopts(1, 3, step=4)[0] == "store 1.4 [1.1]", "the joiner has healed"


def test_scaling_down_drains_the_highest_groups() -> None:
    desk = working(4)
    found = desk.lines(desk.lighthouse.scale(2, desk.now))
    assert found[:2] == ["a2: drain", "a3: drain"]
    assert "store 1.2 [0 1]" in found
    assert found.count("a0: desired") == 1


def test_more_groups_than_shards_cannot_work() -> None:
    with pytest.raises(ValueError, match="6 shards a step, so at most 6 groups"):
        working().lighthouse.scale(7, 100.0)


def test_a_kill_goes_to_the_group_s_agent() -> None:
    desk = working()
    effects = desk.lighthouse.kill(1, 15, desk.now)
    assert Send("a1", Kill(1, 15)) in effects


def test_unknown_groups_are_named_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="job job has no running group 9 \\(known groups: 0, 1, 2\\)"):
        working().lighthouse.kill(9, 9, 100.0)


# --- planned changes that fail --------------------------------------------------------------------------------


def test_a_planned_change_that_cannot_be_built_is_proposed_again_later() -> None:
    desk = working(2)
    desk.dies(1)
    desk.adopts(0, 2)
    desk.ready(1)
    assert desk.trouble(0, 3) == [], "withdrawn; the old quorum goes on"
    assert desk.wait(REPLAN_DELAY[0] - 0.01) == []
    assert desk.wait(0.02)[0] == "store 1.4 [0 1.1]"


def test_a_planned_change_that_was_taken_and_then_broke_is_replaced() -> None:
    """Group 0 has switched when the joiner dies: its trouble is with the quorum in force, not with a mere plan."""
    desk = working(2)
    desk.dies(1)
    desk.adopts(0, 2)
    desk.ready(1)
    desk.adopts(0, 3, step=2)
    desk.trouble(0, 3, step=2)
    assert desk.dies(1) == ["store 1.4 [0]", "a0: urgent 1.4 [0]"]


def test_a_joiner_that_dies_again_is_simply_forgotten() -> None:
    desk = working(2)
    desk.dies(1)
    desk.adopts(0, 2)
    desk.ready(1)
    assert desk.dies(1) == []
    assert desk.ready(1)[0] == "store 1.4 [0 1.2]"


# --- a lighthouse that was started again ----------------------------------------------------------------------

MEMBERS = (Member(0, 0), Member(1, 0), Member(2, 0))
LAST = LineageRecord("job", 1, 4, MEMBERS, lineage_after("", QuorumId(1, 4), MEMBERS), 7)


def test_a_restarted_lighthouse_learns_everything_and_changes_nothing() -> None:
    desk = Desk(3, epoch=2, last=LAST, ready=False)
    for group in range(3):
        found = desk.connects(group, desk.report(group), Adopted(desk.member(group), QuorumId(1, 4), 7))
        assert found == [f"a{group}: welcome", f"a{group}: desired"]
    assert desk.wait(20.0) == []
    assert desk.lighthouse.current is not None and desk.lighthouse.current.id == QuorumId(1, 4)


def test_after_a_restart_quorums_have_the_new_epoch_and_the_old_lineage() -> None:
    desk = Desk(3, epoch=2, last=LAST, ready=False)
    for group in range(3):
        desk.connects(group, desk.report(group), Adopted(desk.member(group), QuorumId(1, 4), 7))
    effects = desk.lighthouse.handle("a1", Died(Member(1, 0), "signal 9"), desk.now)
    (record,) = [e.record for e in effects if isinstance(e, Persist)]
    assert record.id == QuorumId(2, 1)
    assert record.lineage == lineage_after(LAST.lineage, record.id, (Member(0, 0), Member(2, 0)))


def test_after_a_restart_nothing_is_decided_before_all_were_heard() -> None:
    desk = Desk(3, epoch=2, last=LAST, ready=False)
    for group in (0, 1):
        desk.connects(group, desk.report(group), Adopted(desk.member(group), QuorumId(1, 4), 7))
    assert desk.trouble(0, 4) == [] and desk.wait(2.0) == []
    found = desk.connects(2, desk.report(2), Adopted(desk.member(2), QuorumId(1, 4), 7))
    assert "store 2.1 [0 1 2]" in [*found, *desk.wait(0.1)]


def test_after_the_end_of_a_run_the_next_one_starts_afresh_and_the_lineage_goes_on() -> None:
    ended = replace(LAST, members=())
    desk = Desk(2, epoch=2, last=ended)
    desk.ready(0)
    effects = desk.lighthouse.handle("a1", desk.report(1), desk.now)
    (record,) = [e.record for e in effects if isinstance(e, Persist)]
    assert record.lineage == lineage_after(LAST.lineage, record.id, (Member(0, 0), Member(1, 0)))
    assert line(effects[-2]) == "a1: founding 2.1 [0 1]"


def test_a_quorum_that_was_stored_but_never_told_is_replaced() -> None:
    desk = Desk(3, epoch=2, last=LAST, ready=False)
    found = []
    for group in range(3):
        found += desk.connects(group, desk.report(group), Adopted(desk.member(group), QuorumId(1, 3), 7))
    assert "store 2.1 [0 1 2]" in found


def test_a_group_that_died_with_its_agent_is_missed_when_the_agent_is_back() -> None:
    desk = working()
    found = desk.connects(1)  # says hello, and nothing of the group that it had
    assert "store 1.2 [0 2]" in found


def test_what_was_published_during_a_broken_stream_is_told_again() -> None:
    desk = working(4)
    desk.lines(desk.lighthouse.agent_lost("a2", desk.now))
    desk.dies(1)
    desk.trouble(0, 1)
    desk.wait(1.0)
    found = desk.connects(2, desk.report(2), Adopted(desk.member(2), QuorumId(1, 1), 0))
    assert "a2: urgent 1.2 [0 3]" in found, "it was fenced meanwhile"
    assert found.index("a2: urgent 1.2 [0 3]") == len(found) - 1, "nothing newer was told before"


# --- the end --------------------------------------------------------------------------------------------------


def test_when_one_has_finished_nobody_joins_any_more() -> None:
    desk = working(2)
    desk.dies(1)
    desk.tell(0, Finished(desk.member(0), 10, "d"))
    assert desk.ready(1) == []
    assert desk.lighthouse.snapshot().complete


def test_a_member_that_missed_the_farewell_gets_a_quorum_of_its_own() -> None:
    desk = working(2)
    desk.tell(0, Finished(desk.member(0), 10, "d"))
    desk.trouble(1, 1, step=10)
    assert desk.wait(0.1) == ["store 1.2 [1]", "a1: urgent 1.2 [1]"]


def test_different_ends_are_shouted_about() -> None:
    desk = working(2)
    desk.tell(0, Finished(desk.member(0), 10, "one"))
    desk.tell(1, Finished(desk.member(1), 10, "two"))
    assert "finished groups hold different states" in desk.events()[-1]


def test_the_status_shows_every_group() -> None:
    desk = working()
    desk.beat(1, 5, seconds=0.25)
    desk.lighthouse.drain(2, desk.now)
    rows = {row.member.group: row for row in desk.lighthouse.snapshot().groups}
    assert [rows[g].state for g in range(3)] == ["active", "active", "draining"]
    assert (rows[1].step, rows[1].step_seconds, rows[1].phase) == (5, 0.25, Phase.COMPUTING)


def test_a_welcome_names_the_epoch() -> None:
    effects = Lighthouse("job", 3).handle("a", Hello("a", "host", JobSpec("job", 1)), 0.0)
    assert Send("a", Welcome(3)) in effects
