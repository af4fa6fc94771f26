"""Golden scenarios of the lighthouse: how a job starts."""

from __future__ import annotations

from quorum_desk import Desk, working

from planaria.core.founding import FOUNDING_GRACE
from planaria.core.messages import (
    QuorumId,
)


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


def test_what_may_differ_is_told_once_when_the_job_starts_and_when_a_member_joins() -> None:
    desk = Desk(3)
    for group, device in enumerate(("H100", "H200", "H100")):
        desk.ready(group, fingerprint=(("torch", "2.13"), ("~device", device)))
    told = "group 1 (incarnation {}) differs from group 0 in device (H100 there, H200 here): its sums may round "
    told += "differently"
    assert [text for text in desk.events() if "differs" in text] == [told.format(0)]
    for group in range(3):
        desk.adopts(group, 1)
    desk.dies(1)
    desk.adopts(0, 2), desk.adopts(2, 2)
    for _ in range(2):  # the second is said again after a reconnect
        desk.ready(1, fingerprint=(("torch", "2.13"), ("~device", "H200")))
    desk.ready(3, fingerprint=(("torch", "2.13"), ("~device", "H100")))
    assert [text for text in desk.events() if "differs" in text] == [told.format(0), told.format(1)]


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
