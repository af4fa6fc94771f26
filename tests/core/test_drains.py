"""A node or a GPU is drained, and taken back: who leaves, what agents are told, and what is refused."""

from __future__ import annotations

import pytest
from quorum_desk import Desk, line, working

from planaria.core.messages import (
    Adopted,
    Close,
    Drain,
    Heartbeat,
    Hello,
    JobSpec,
    Member,
    Migrate,
    Phase,
    Pulse,
    QuorumId,
    Synced,
)
from planaria.core.roster import Effect, Record, Send


def sent(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if not isinstance(effect, Record)]


def with_gpus(*gpus: str) -> Desk:
    """Two groups of two ranks at work, on an agent each that has these GPUs; group 1 has the first two of its own."""
    desk = Desk(2, ready=False)
    for group in range(2):
        spec = JobSpec("job", 2, ranks=2)
        desk.tell(group, Hello(f"a{group}", f"host{group}", spec, devices=gpus))
        desk.tell(group, Synced())
        desk.ready(group)
    for group in range(2):
        desk.adopts(group, 1)
    desk.tell(1, Heartbeat((Pulse(desk.member(1), Phase.COMPUTING, 3, QuorumId(1, 1), 0.5, 0.1, 7, gpus[:2]),)))
    return desk


def test_its_groups_leave_by_a_planned_quorum_and_come_back_when_it_is_undrained() -> None:
    desk = working()
    said = desk.lines(desk.lighthouse.drain_node("a1", "", desk.now))
    planned = ["store 1.2 [0 2]", *[f"a{group}: planned 1.2 [0 2]" for group in range(3)]]
    assert said == ["a1: close", "a1: drain", *planned]
    assert desk.lighthouse.snapshot().drained == ("a1",)
    for group in (0, 2):
        desk.adopts(group, 2, 5)
    assert desk.dies(1) == []
    assert [line(e) for e in sent(desk.lighthouse.undrain_node("a1", "", desk.now))] == ["a1: close"]
    assert desk.ready(1)[0] == "store 1.3 [0 1.1 2]"


def test_a_group_that_comes_to_a_drained_node_leaves_again() -> None:
    desk = working()
    desk.dies(1)
    desk.lines(desk.lighthouse.drain_node("a1", "", desk.now))
    assert desk.ready(1) == ["a1: drain"]  # it was being started; nobody is to wait for it


def test_a_lighthouse_that_was_restarted_hears_of_it_from_the_agent() -> None:
    desk = Desk(3, ready=False)
    for group in range(3):
        desk.tell(group, Hello(f"a{group}", "host", JobSpec("job", 3), closed=("",) if group == 1 else ()))
        desk.tell(group, Synced())
        desk.ready(group)
    assert desk.lighthouse.snapshot().drained == ("a1",)
    assert Member(1, 0) not in (desk.lighthouse.current.members if desk.lighthouse.current else ())


def test_an_agent_that_was_started_again_hears_of_it_from_the_lighthouse() -> None:
    desk = working()
    desk.lines(desk.lighthouse.drain_node("a1", "", desk.now))
    desk.lines(desk.lighthouse.agent_lost("a1", desk.now))
    assert "a1: close" in desk.tell(1, Hello("a1", "host", JobSpec("job", 3), fresh=True))
    assert "a1: close" not in desk.tell(1, Hello("a1", "host", JobSpec("job", 3), closed=("",)))


def test_all_agents_of_a_host_are_its_node() -> None:
    desk = with_gpus()
    with pytest.raises(ValueError, match="no group elsewhere holds the state; draining node host1 would end the job"):
        desk.lines(desk.lighthouse.drain_node("a0", "", desk.now))
        desk.lighthouse.drain_node("host1", "", desk.now)


def test_a_gpu_is_closed_and_its_agent_sees_to_the_rest() -> None:
    desk = with_gpus("4", "5", "6")
    assert sent(desk.lighthouse.drain_node("host1", "5", desk.now)) == [Send("a1", Close("5"))]
    assert sent(desk.lighthouse.drain_node("a1", "6", desk.now)) == [Send("a1", Close("6"))], "nobody has it"
    assert desk.lighthouse.snapshot().drained == ("a1:5", "a1:6")
    assert sent(desk.lighthouse.undrain_node("a1", "5", desk.now)) == [Send("a1", Close("5", opens=True))]


def test_a_rank_moves_and_its_gpu_is_closed() -> None:
    desk = with_gpus("4", "5", "6")
    assert sent(desk.lighthouse.drain_rank(1, 1, desk.now)) == [Send("a1", Migrate(1, 1, drains=True))]
    assert desk.lighthouse.snapshot().drained == ("a1:5",)


def test_a_gpu_that_a_rule_wants_drained_is_so_within_its_share_and_taken_back_by_an_operator() -> None:
    desk = with_gpus("4", "5", "6")
    effects = desk.lighthouse.drain_rank(1, 1, desk.now, "GPU 5 was caught", share=0.1)
    assert sent(effects) == [Send("a1", Migrate(1, 1, drains=True))]
    assert any("rank 1 of group 1 is to move: GPU 5 was caught" in str(effect) for effect in effects)
    assert desk.lighthouse.snapshot().drained == ("a1:5",)
    assert sent(desk.lighthouse.undrain_node("a1", "5", desk.now)) == [Send("a1", Close("5", opens=True))]
    assert desk.lighthouse.snapshot().drained == ()
    desk.lines(desk.lighthouse.drain(1, desk.now))
    with pytest.raises(ValueError):
        desk.lighthouse.drain_rank(0, 1, desk.now, "GPU 5 was caught", share=0.1)
    assert desk.lighthouse.snapshot().drained == ()


@pytest.mark.parametrize(
    ("node", "device", "why"),
    [
        ("a7", "", r"job job has no node a7 \(nodes: a0, a1\)"),
        ("a1", "9", r"node a1 has no GPU 9 of this job \(GPUs: 4, 5\)"),
        ("a1", "4", "no group elsewhere holds the state; draining GPU 4 of node a1 would end the job"),
        ("a1", "", "no group elsewhere holds the state; draining node a1 would end the job"),
    ],
)
def test_what_cannot_be_drained(node: str, device: str, why: str) -> None:
    desk = with_gpus("4", "5")
    desk.dies(0)
    desk.tell(1, Adopted(desk.member(1), QuorumId(1, 2), 4))
    desk.ready(0)  # it has not healed yet: the state is group 1's
    before = str(desk.lighthouse.snapshot())
    with pytest.raises(ValueError, match=why):
        desk.lighthouse.drain_node(node, device, desk.now)
    assert str(desk.lighthouse.snapshot()) == before and desk.lines(desk.lighthouse.tick(desk.now)) == []


def test_what_is_drained_already_or_not_at_all_or_out_of_reach() -> None:
    desk = working()
    with pytest.raises(ValueError, match=r"node a1 is not drained \(drained: nothing\)"):
        desk.lighthouse.undrain_node("a1", "", desk.now)
    desk.lighthouse.drain_node("a1", "", desk.now)
    with pytest.raises(ValueError, match="node a1 is drained already"):
        desk.lighthouse.drain_node("a1", "", desk.now)
    desk.lines(desk.lighthouse.agent_lost("a2", desk.now))
    with pytest.raises(ValueError, match="node a2 is out of reach"):
        desk.lighthouse.drain_node("a2", "", desk.now)


def test_it_is_said_to_its_agent_before_its_groups_are_drained() -> None:
    effects = sent(working().lighthouse.drain_node("a1", "", 100.0))
    assert effects[:2] == [Send("a1", Close("")), Send("a1", Drain(Member(1, 0)))]
