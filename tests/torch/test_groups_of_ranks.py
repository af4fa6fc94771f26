"""Groups of several ranks: each rank hears the news in its own time, and all of them do the same."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from planaria.core.messages import Adopted, Finished, Trouble
from tests.torch.pretend_agent import PretendAgent

SCRIPT = Path(__file__).parents[1] / "e2e" / "scripts" / "parallel.py"


def parallel(tmp_path: Path, layout: str, *words: str) -> PretendAgent:
    return PretendAgent(SCRIPT, 2, 4, tmp_path, ranks=2, words=[layout, *words])


def held(tmp_path: Path, layout: str, *words: str) -> PretendAgent:
    """One that gets through 40 steps only when ``release`` says so: nothing that is to happen comes too late."""
    return parallel(tmp_path, layout, *words, "--steps", "40", "--pause", "0.01", "--hold", str(tmp_path / "release"))


def release(tmp_path: Path) -> None:
    (tmp_path / "release").touch()


def end(agent: PretendAgent, members: int) -> None:
    agent.until(lambda: len(agent.told(Finished)) == members)
    assert {report.digest for report in agent.told(Finished)} == {agent.quiet()}


def test_every_layout_trains_the_same_model(tmp_path: Path) -> None:
    # Equal but for rounding: every part of every batch, every gradient once, and the norm of the whole.
    losses = {}
    for layout, ranks in (("plain", 1), ("fsdp", 2), ("tp", 2), ("pp", 2), ("fsdp-tp", 4)):
        with PretendAgent(SCRIPT, 1, 4, tmp_path / layout, ranks, [layout, "--steps", "20"]) as agent:
            losses[layout] = agent.alone()["metrics"]["loss"]
    assert losses == {layout: pytest.approx(losses["plain"], rel=1e-6) for layout in losses}


@pytest.mark.parametrize("seed", range(2))
def test_quorums_that_the_ranks_hear_of_at_different_times(tmp_path: Path, seed: int) -> None:
    # Each rank is told later or earlier than its neighbour, in the middle of shards, of rounds and of other quorums.
    chance = random.Random(seed)
    random.seed(seed)
    with held(tmp_path, "fsdp") as agent:
        members = [agent.start(group) for group in range(2)]
        agent.wait_for(*members)
        founding = agent.publish(members, founding=True)
        agent.until(lambda: len(agent.told(Adopted, quorum=founding.id)) == 2)
        for _ in range(12):
            time.sleep(chance.choice((0.0, 0.0, 0.05, 0.2)))
            agent.publish(members, urgent=chance.random() < 0.6, skew=lambda: time.sleep(chance.choice((0, 0, 0.03))))
        last = agent.publish(members)
        agent.until(lambda: len(agent.told(Adopted, quorum=last.id)) == 2)
        release(tmp_path)
        end(agent, 2)


@pytest.mark.parametrize("words", ["fsdp", "tp", "pp", "fsdp --rich", "fsdp --compile"])
def test_a_group_dies_and_its_successor_heals(tmp_path: Path, words: str) -> None:
    with held(tmp_path, *words.split()) as agent:
        first, second = agent.start(0), agent.start(1)
        agent.wait_for(first, second)
        founding = agent.publish([first, second], founding=True)
        agent.until(lambda: len(agent.told(Adopted, quorum=founding.id)) == 2)
        time.sleep(0.3)
        agent.kill(second)
        agent.until(lambda: bool(agent.told(Trouble, member=first, quorum=founding.id)))
        agent.publish([first])
        third = agent.start(1, 1)
        agent.wait_for(third)
        agent.publish([first, third], urgent=False)
        agent.until(lambda: bool(agent.told(Adopted, member=third)))
        release(tmp_path)
        end(agent, 2)


def test_only_one_rank_speaks(tmp_path: Path) -> None:
    with parallel(tmp_path, "fsdp", "--steps", "5") as agent:
        members = [agent.start(group) for group in range(2)]
        agent.wait_for(*members)
        agent.publish(members, founding=True)
        end(agent, 2)
        assert len(agent.told(Finished)) == len(agent.ready) == 2
