"""How many agents a lighthouse remembers: those that are there, and those whose groups somebody may ask for."""

from __future__ import annotations

from planaria.core.attendance import AWAY_KEPT
from planaria.core.messages import Hello, JobSpec, Member, Ready, Report, Synced, Welcome
from planaria.core.quorum import Lighthouse
from planaria.core.roster import Effect, Send


def test_agents_that_are_gone_for_good_are_forgotten_but_for_those_with_groups() -> None:
    """Every start of an agent is another agent: in a job of weeks whose nodes are replaced they are thousands."""
    lighthouse, now = Lighthouse("j", 1), 0.0
    ready = Ready(Member(0, 0), "h:0", (), "", 4, 10)

    def comes(agent: str, *reports: Report) -> list[Effect]:
        effects: list[Effect] = []
        for report in (Hello(agent, "host", JobSpec("j", 4), closed=("0",)), *reports, Synced()):
            effects += lighthouse.handle(agent, report, now)
        return effects

    comes("keeper", ready)
    lighthouse.agent_lost("keeper", now)
    for number in range(3 * AWAY_KEPT):
        now += 0.01
        comes(f"agent-{number}")
        lighthouse.agent_lost(f"agent-{number}", now)
        lighthouse.tick(now)
    assert len(lighthouse.seen.agents) <= AWAY_KEPT + 2
    assert len(lighthouse.closed) <= AWAY_KEPT + 2
    assert [group.agent for group in lighthouse.snapshot().groups] == ["keeper"]
    assert Send("agent-0", Welcome(1)) in comes("agent-0"), "one that was forgotten comes back"
    assert Send("keeper", Welcome(1)) in comes("keeper", ready)


def test_many_agents_that_are_out_of_reach_with_their_groups_are_all_kept() -> None:
    lighthouse, many = Lighthouse("j", 1), 2 * AWAY_KEPT
    for number in range(many):
        agent = f"agent-{number}"
        lighthouse.handle(agent, Hello(agent, "host", JobSpec("j", many)), 0.0)
        lighthouse.handle(agent, Ready(Member(number, 0), f"h:{number}", (), "", many, 10), 0.0)
        lighthouse.agent_lost(agent, 0.0)
    assert len(lighthouse.seen.agents) == many == len(lighthouse.snapshot().groups)
