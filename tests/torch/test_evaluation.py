"""FSDP2 leaves parameters gathered after a forward pass without a backward: no state may be taken from those."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from planaria.core.messages import Adopted, Finished
from tests.torch.pretend_agent import PretendAgent
from tests.torch.waiting import appear


# The step after which a group dies: within the next one's batches the others heal its successor, or, after the last
# of the twelve, at its end.
@pytest.mark.parametrize(("how", "at"), [("", 11), ("keep state", 5), ("first early", 11)])
def test_a_group_heals_from_one_that_has_just_evaluated(tmp_path: Path, how: str, at: int) -> None:
    gate = tmp_path / "gate"
    with PretendAgent("evaluating.py", 2, 4, tmp_path, ranks=2) as agent:
        first, second = (agent.start(group, HOW=how, GATE=str(gate), AT=str(at)) for group in range(2))
        agent.wait_for(first, second)
        agent.publish([first, second], founding=True)
        appear(*(tmp_path / f"gate-{group}-{rank}" for group in range(2) for rank in range(2)))
        agent.kill(second)
        third = agent.start(1, 1, HOW=how)
        agent.wait_for(third)
        healing = agent.publish([first, third])
        gate.touch()
        agent.until(lambda: len(agent.told(Finished)) == 2)
        assert agent.told(Adopted, member=third, quorum=healing.id, step=at + 1)
        assert {report.digest for report in agent.told(Finished)} == {agent.quiet(HOW=how)}


@pytest.mark.parametrize("how", ["first early", "keep first state"])
def test_a_checkpoint_is_taken_after_an_evaluation(tmp_path: Path, how: str) -> None:
    saved = tmp_path / "checkpoints"
    where = {"HOW": how, "PLANARIA_CHECKPOINT": str(saved), "PLANARIA_CHECKPOINT_EVERY": "5"}
    with PretendAgent("evaluating.py", 1, 4, tmp_path, ranks=2) as agent:
        quiet = agent.alone(**where)
        for step in (10, 12):
            shutil.rmtree(saved / f"step-{step:08}")
        assert agent.alone(**where) == quiet
