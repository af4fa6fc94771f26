"""Real ranks under quorums that come at the worst moments. What counts is the digest of the quiet run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from planaria.core.messages import Adopted, Finished, Trouble
from tests.torch.pretend_agent import PretendAgent
from tests.torch.waiting import appear


def same_bits(agent: PretendAgent, members: int) -> None:
    agent.until(lambda: len(agent.told(Finished)) == members)
    assert {report.digest for report in agent.told(Finished)} == {agent.quiet()}


@pytest.mark.parametrize("loop", ["set", "schedule"])
def test_healing_inside_a_body_that_works_at_its_top(tmp_path: Path, loop: str) -> None:
    # B has run the top of its body for step 3 when it learns that step 3 is committed and heals to step 4. What the
    # top of the body did must not stand, and must be done for step 4.
    with PretendAgent("top_of_body.py", 2, 2, tmp_path) as agent:
        first = agent.start(0, ACTS="slow-after-3", LOOP=loop)
        second = agent.start(1, ACTS="miss-step-3", LOOP=loop)
        agent.until(lambda: len(agent.ready) == 2)
        agent.publish([first, second], founding=True)
        agent.until(lambda: bool(agent.told(Trouble)))
        agent.publish([first, second])
        agent.until(lambda: len(agent.told(Finished)) == 2)
        digests = {report.digest for report in agent.told(Finished)}
        if loop == "set":
            assert digests == {agent.quiet()}
        assert len(digests) == 1


def test_a_source_in_the_middle_of_its_body_gives_the_state_of_the_boundary(tmp_path: Path) -> None:
    with PretendAgent("top_of_body.py", 2, 2, tmp_path) as agent:
        first = agent.start(0, ACTS="slow-shards", LOOP="schedule")
        joiner = agent.start(1, LOOP="schedule")
        agent.until(lambda: len(agent.ready) == 2)
        agent.publish([first], founding=True)
        agent.until(lambda: bool(agent.told(Adopted, member=first)))
        time.sleep(1.0)  # well inside the body of some step
        agent.publish([first, joiner])
        agent.until(lambda: len(agent.told(Finished)) == 2)
        assert len({report.digest for report in agent.told(Finished)}) == 1


def test_shards_that_two_members_hold_count_once(tmp_path: Path) -> None:
    # The third member does not hear of the quorum that replaces it, and keeps its shards; the others compute them
    # again; then a new epoch has all three.
    with PretendAgent("slow_shards.py", 3, 6, tmp_path) as agent:
        members = [agent.start(group) for group in range(3)]
        agent.until(lambda: len(agent.ready) == 3)
        founding = agent.publish(members, founding=True)
        agent.until(lambda: len(agent.told(Adopted, quorum=founding.id)) == 3)
        time.sleep(2.0)  # group 0 is in its second shard, the others have all of theirs
        second = agent.publish(members[:2])
        agent.until(lambda: len(agent.told(Adopted, quorum=second.id)) == 2)
        agent.until(lambda: bool(agent.told(Trouble, member=members[2])))
        time.sleep(1.0)
        agent.publish(members, epoch=2)
        same_bits(agent, 3)


def test_a_member_that_computes_nothing_of_the_first_step_knows_its_metrics(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with PretendAgent("first_step.py", 2, 2, tmp_path) as agent:
        first, joiner = agent.start(0, GATE=str(gate)), agent.start(1)
        agent.wait_for(first, joiner)
        agent.publish([first], founding=True)
        appear(tmp_path / "gate-here")
        agent.publish([first, joiner])  # when the first has all shards of the step
        gate.touch()
        same_bits(agent, 2)
    first_line = json.loads((tmp_path / "rg1i0" / "metrics.jsonl").read_text().splitlines()[0])
    assert first_line["step"] == 0 and first_line["loss"] > 0
