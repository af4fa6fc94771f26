"""One rank of a group is lost, and another process takes its place under the living others."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria.core.messages import Adopted, Trouble
from tests.torch.test_groups_of_ranks import end, held, release


@pytest.mark.parametrize(
    ("words", "lost"),
    [("fsdp", 0), ("fsdp", 1), ("tp", 0), ("pp", 1), ("pp-loops", 0), ("fsdp --rich", 1), ("fsdp --compile", 0)],
)
def test_a_rank_is_replaced_under_the_others(tmp_path: Path, words: str, lost: int) -> None:
    with held(tmp_path, *words.split(), "--guard") as agent:
        first, second = agent.start(0), agent.start(1)
        agent.wait_for(first, second)
        founding = agent.publish([first, second], founding=True)
        agent.until(lambda: len(agent.told(Adopted, quorum=founding.id)) == 2)
        agent.wait_for_step(second, 2)  # what is made in a first step is there
        survivor = agent.process(second, 1 - lost)
        third = agent.replace(second, lost)
        agent.until(lambda: bool(agent.told(Trouble, member=first, quorum=founding.id)))
        agent.publish([first])
        agent.wait_for(third)
        agent.publish([first, third], urgent=False)
        agent.until(lambda: bool(agent.told(Adopted, member=third)))
        assert survivor.is_alive() and agent.process(third, 1 - lost) is survivor
        release(tmp_path)
        end(agent, 2)
