"""The keeper over a cluster and a lighthouse that fail in every way they can, in an order that a seed chooses."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path

import pytest

from planaria.core.plan import Finish, GroupState, NodeFailure, PlanSpec, Suspend
from planaria.core.roster import JobStatus
from planaria.engines import memory as memories
from planaria.engines.keeper import Clock, HostState, Keeper, Tick
from tests.slurm.pretend import World

SEEDS = range(25)


class Job:
    """A keeper and its world."""

    def __init__(self, seed: int, groups: int = 3, **spec: float) -> None:
        self.world = World(random.Random(seed), groups)
        self.notes: list[str] = []
        self._spec = spec
        self.keeper = self._begin()

    def _begin(self) -> Keeper:
        return Keeper(
            self.world, self.world, lambda kind, text, group: self.notes.append(text), clock=lambda: self.world.now
        )

    def spec(self, status: JobStatus | None) -> PlanSpec:
        desired = status.desired if status is not None else self.world.desired
        return PlanSpec(desired, budget=10_000, suspect_patience=10.0, **self._spec)

    async def tick(self) -> Tick:
        return await self.keeper.tick(self.spec)

    async def quiet(self) -> None:
        """Nothing fails any more: until all is as it should be."""
        self.world.away = ""
        self.world.down.clear()
        for _ in range(60):
            self.world.place()
            self.world.join()
            await self.tick()
            self.world.now += 7.0

    async def end(self) -> Finish | Suspend | None:
        """What the keeper makes of the end; whoever still runs has some time for it."""
        for _ in range(10):
            if (outcome := (await self.tick()).outcome) is not None:
                return outcome
            self.world.now += 10.0
        return None

    def at_work(self) -> list[int]:
        return sorted(x.group for x in self.world.lives if self.world.at_work(x) and not x.left)


@pytest.mark.parametrize("seed", SEEDS)
async def test_whatever_happens_no_group_has_two_lives_that_count_and_in_the_end_all_are_at_work(seed: int) -> None:
    """The world itself checks what it is asked to create."""
    job = Job(seed)
    await job.tick()
    for _ in range(60):
        job.world.happen()
        tick = await job.tick()
        assert tick.outcome is None, tick.outcome
        if job.world.rng.random() < 0.1:  # the supervisor is killed and started again, with its memory or without
            memory = job.keeper.memory
            job.keeper = job._begin()
            if job.world.rng.random() < 0.7:
                job.keeper.memory = memory
    await job.quiet()
    fewer = job.keeper.memory.fewer
    assert 0 <= fewer <= sum(life.left for life in job.world.lives)
    assert len(job.at_work()) == max(1, job.world.desired - fewer)
    assert len(set(job.at_work())) == len(job.at_work())
    job.world.complete = True
    for life in job.world.lives:
        if job.world.at_work(life):
            job.world.end(life, 0)
    assert await job.end() == Finish(0, "all steps are committed")


async def test_a_group_that_is_cut_off_is_evicted_before_it_is_replaced_and_not_on_its_node() -> None:
    job = Job(1)
    await job.quiet()
    victim = next(x for x in job.world.lives if x.group == 1)
    victim.hung = True
    await job.tick()
    assert not victim.evicted, "it may come back by itself"
    job.world.now += 10.0
    await job.tick()
    assert victim.evicted
    job.world.now += 1.0
    await job.tick()
    assert job.world.asked[-1] == (1, 1, (victim.node,))
    assert victim.state is HostState.RUNNING, "the scheduler has not noticed anything yet"


async def test_where_the_lighthouse_alone_would_wait_for_ever_the_scheduler_is_the_second_witness() -> None:
    """Of two groups one is lost: no majority is left."""
    job = Job(1, groups=2)
    job.world.majority = False
    await job.quiet()
    victim = next(x for x in job.world.lives if x.group == 1)
    victim.hung = True
    for _ in range(10):  # steps are made: it only cannot reach the lighthouse
        job.world.step += 1
        job.world.now += 3.0
        await job.tick()
    assert not victim.evicted
    for _ in range(10):
        job.world.now += 3.0
        await job.tick()
    assert victim.evicted and job.world.asked[-1][:2] == (1, 1)


async def test_a_node_on_which_groups_fail_again_and_again_is_avoided() -> None:
    job = Job(2)
    job.world.nodes = ("bad", "n2", "n3")
    await job.quiet()
    for _ in range(3):
        for life in job.world.lives:
            if life.node == "bad" and job.world.at_work(life):
                job.world.end(life, 139)
        await job.quiet()
    assert "bad" in job.world.asked[-1][2]


async def test_who_waits_may_run_on_a_node_that_is_to_be_avoided_no_longer() -> None:
    """The one that was lost is back, and there is no other: it would wait for ever, and hold the memory of it."""
    job = Job(2)
    job.world.nodes = ("n1", "n2", "n3")
    await job.quiet()
    victim = next(x for x in job.world.lives if x.group == 1)
    job.world.end(victim, None, lost=True)
    job.world.down.add(victim.node)
    for waited in range(3):
        await job.tick()
        job.world.place()
        assert job.world.asked[-1] == (1, 1, (victim.node,)) and not job.world.eased, waited
        job.world.now += 200.0
    await job.tick()
    await job.tick()
    assert job.world.eased == [(1, 1, ())]
    assert job.notes[-1] == f"group 1 (life 1), which waits, may run on {victim.node} again"


async def test_what_was_remembered_by_a_clock_that_was_ahead_ages_as_all_else() -> None:
    job = Job(2)
    job.keeper.memory.replacements = [job.world.now + 1e8]
    job.keeper.memory.node_failures = [NodeFailure("n1", job.world.now + 1e8, lost=True)]
    await job.quiet()
    job.world.now += 700.0
    job.world.end(job.world.lives[0], 137)
    await job.tick()
    assert job.world.asked[-1] == (job.world.lives[0].group, 1, ())
    assert job.keeper.memory.replacements == [job.world.now]


async def test_nothing_waits_for_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the controller is ahead; the own one is set back by an hour."""
    job = Job(2)
    await job.quiet()
    victim = next(x for x in job.world.lives if x.group == 1)
    job.world.end(victim, 137)
    victim.since = job.world.now + 300.0
    await job.tick()
    assert job.world.asked[-1][:2] == (1, 1)
    clock, ahead = Clock(), [0.0, 0.0]  # of the unix clock, and of the monotonic one
    monkeypatch.setattr("planaria.engines.keeper.time.time", lambda: 5000.0 + ahead[0])
    monkeypatch.setattr("planaria.engines.keeper.time.monotonic", lambda: 10.0 + ahead[1])
    assert clock() == 5000.0
    ahead[:] = [-3600.0, 1.0]
    assert clock() == 5001.0
    ahead[:] = [7.0, 2.0]
    assert clock() == 5007.0
    monkeypatch.undo()


async def test_while_the_lighthouse_is_away_nothing_is_decided() -> None:
    job = Job(3)
    await job.quiet()
    before = list(job.world.asked)
    job.world.away = "desk"
    job.world.end(job.world.lives[0], 137)
    tick = await job.tick()
    listed = job.world.listed
    for _ in range(5):
        tick = await job.tick()
    assert job.world.asked == before and tick.wakeup is not None
    assert job.world.listed == listed, "the scheduler cannot help"
    job.world.away = ""
    await job.tick()
    assert job.world.asked[-1][:2] == (job.world.lives[0].group, 1)


async def test_who_was_drained_does_not_come_back_and_is_missed_only_when_somebody_scales() -> None:
    job = Job(4)
    await job.quiet()
    assert await job.world.drain(2) is None
    await job.quiet()
    assert job.at_work() == [0, 1]
    job.world.desired = 4
    await job.quiet()
    assert job.at_work() == [0, 1, 3, 4]
    job.world.desired = 2
    await job.quiet()
    assert job.at_work() == [0, 1]


@pytest.mark.parametrize("left_first", [True, False])
async def test_who_left_because_fewer_were_wanted_is_replaced_when_more_are(left_first: bool) -> None:
    """Whether the keeper sees that it leaves, or only that it has left."""
    job = Job(4)
    await job.quiet()
    job.world.scale(2)
    if left_first:
        job.world.join()
    await job.tick()
    if not left_first:
        job.world.join()
        await job.tick()
    assert job.at_work() == [0, 1]
    job.world.scale(3)
    await job.quiet()
    assert job.at_work() == [0, 1, 3]


async def test_a_wish_that_comes_while_somebody_leaves_because_of_the_last_one_counts_as_it_stands() -> None:
    job = Job(4)
    await job.quiet()
    job.world.scale(1)
    await job.tick()
    job.world.scale(3)
    await job.tick()
    await job.quiet()
    assert job.at_work() == [0, 3, 4]


@pytest.mark.parametrize("ended", [False, True])
async def test_of_two_wishes_between_two_looks_the_last_one_counts(ended: bool) -> None:
    """The number is the one that the keeper knew already, and a group is leaving, or has left, because of the first."""
    job = Job(6)
    await job.quiet()
    job.world.scale(2)
    if ended:
        job.world.join()
    job.world.scale(3)
    await job.quiet()
    assert job.at_work() == [0, 1, 3]
    # A lighthouse that is started again has been asked nothing; who leaves then is not missed.
    job.world.epoch, job.world.scaled = 2, 0
    assert await job.world.drain(1) is None
    await job.quiet()
    assert job.at_work() == [0, 3]
    job.world.scale(3)
    await job.quiet()
    assert job.at_work() == [0, 3, 4]


@pytest.mark.parametrize("seed", SEEDS)
async def test_there_are_as_many_as_were_asked_for_last_but_for_who_was_drained_since(seed: int) -> None:
    """Whenever the leaving ones leave, and whatever else is lost meanwhile."""
    job = Job(seed, groups=4)
    job.world.nodes = tuple(f"n{i}" for i in range(12))
    await job.quiet()
    rng, expected = job.world.rng, 4
    for _ in range(30):
        kind = rng.choice(("scale", "drain", "kill", "join", "look"))
        victims = [life for life in job.world.lives if job.world.at_work(life) and not life.left]
        if kind == "scale":
            for _ in range(rng.choice((1, 1, 2))):
                expected = rng.randint(1, 6)
                job.world.scale(expected)
        elif kind == "drain" and len(victims) == expected > 1:
            rng.choice(victims).left = True
            expected -= 1
        elif kind == "kill" and len(victims) > 1:
            job.world.end(rng.choice(victims), 137)
        elif kind == "join":
            job.world.place()
            job.world.join()
        job.world.now += 1.0
        await job.tick()
    await job.quiet()
    assert len(job.at_work()) == expected


async def test_a_keeper_without_memory_adopts_the_lives_that_there_are() -> None:
    job = Job(5)
    await job.quiet()
    before = list(job.world.asked)
    job.keeper = job._begin()
    await job.quiet()
    assert job.world.asked == before
    assert {g: life.state for g, life in job.keeper.memory.lives.items()} == dict.fromkeys(range(3), GroupState.RUNNING)


async def test_memory_outlives_a_keeper(tmp_path: Path) -> None:
    job = Job(6)
    await job.quiet()
    job.world.end(job.world.lives[0], None, lost=True)
    await job.quiet()
    path = tmp_path / "keeper.json"
    text = memories.write(path, job.keeper.memory)
    assert asdict(memories.read(path)) == asdict(job.keeper.memory)
    before = path.stat()
    assert memories.write(path, job.keeper.memory, text) == text and path.stat() == before, "nothing is new"
    job.keeper.memory.desired += 1
    assert memories.write(path, job.keeper.memory, text) == path.read_text() != text
