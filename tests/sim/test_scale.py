"""What an agent costs the lighthouse does not depend on how many there are."""

from __future__ import annotations

from itertools import count

from planaria.core.ledger import LARGE
from planaria.sim.scale import Fleet


def fleet(agents: int) -> Fleet:
    """Every message costs the same: what a busy machine takes is not what these are about."""
    instants = count()
    return Fleet(agents, clock=lambda: next(instants) * 50e-6)


def test_many_deaths_at_once_are_one_or_two_changes() -> None:
    # Each of six used to be a quorum of its own, told to everybody.
    found = fleet(6 * 100).run()
    assert found.agents > LARGE
    for cost in found.costs:
        assert cost.quorums <= 3 and cost.sent <= 4 * found.agents, cost


def test_few_are_decided_upon_at_once() -> None:
    costs = {cost.name: cost for cost in fleet(LARGE).run().costs}
    assert costs["1 % die at once"].quorums == 1 and costs["they come back"].quorums == 1
