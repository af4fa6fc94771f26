"""Watches the health of what the groups of this agent run on, and acts on it as the table of rules says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from planaria.agent.moving import NotMoved, drain, move
from planaria.agent.sensors import Sensor, read_out
from planaria.core.health import Action, Reading, Verdict, Watch, slow_rank
from planaria.core.healthtable import HealthTable
from planaria.core.messages import Member
from planaria.core.plan import GroupState

if TYPE_CHECKING:
    from planaria.agent.agent import Agent

_REFUSED = -2  # in place of a group's number
_DAMAGE = "corrupt"  # the signal that groups were caught computing, or holding, what is wrong
_MOST_STRANGE = 8  # are told: whoever reads that many knows what is wrong


@dataclass(frozen=True, slots=True)
class HealthWatch:
    """What is watched on this node. ``gpus``: those that its groups share, as their driver's variable names them."""

    table: HealthTable
    gpus: tuple[str, ...] = ()

    async def run(
        self,
        log: Path,
        placed: Callable[[], Mapping[str, tuple[int, int]]],
        take: Callable[[list[Reading]], None],
        note: Callable[[str], None],
    ) -> None:
        """Keep the sensors going until cancelled. ``placed``: whose each GPU is; readings are told with that."""

        def located(readings: Sequence[Reading]) -> None:
            owners = placed()
            take([_located(reading, owners) for reading in readings])

        async with asyncio.TaskGroup() as tasks:
            for sensor in self._sensors():
                tasks.create_task(read_out(sensor, log, located, note))

    def _sensors(self) -> list[Sensor]:
        found = []
        if self.gpus:
            found.append(Sensor(("gpus", *self.gpus), "the reader of the GPUs' health", self.table.every))
        if (command := self.table.command) is not None:
            words = ("command", *command.argv)
            found.append(Sensor(words, "the runner of the health command", command.every, guards_itself=True))
        return found


def _place_of(reading: Reading) -> tuple[str, str]:
    """What damages are held against."""
    return str(reading.node), reading.device or reading.subject


def _located(reading: Reading, owners: Mapping[str, tuple[int, int]]) -> Reading:
    if not reading.device:
        return reading
    group, rank = owners.get(reading.device, (-1, -1))
    return replace(reading, group=group, rank=rank)


class Health:
    """Judges the readings of all nodes of this agent's groups. ``run`` it as a task of the agent's."""

    def __init__(self, agent: Agent, here: HealthWatch) -> None:
        self._agent = agent
        self._here = here
        self._table = here.table
        self._watch = Watch(here.table.rules)
        self._since = ""  # when the first reading came
        self._steps: dict[int, int] = {}  # of every group, at the newest reading of its speed
        self._told: dict[tuple[str, str, int], str] = {}  # what people know of each verdict, and of each group in it
        self._moving: asyncio.Task[None] | None = None
        self._replacing: set[int] = set()  # groups in which a standby was asked to take a rank's place
        self._members: dict[int, Member] = {}  # what is known of a group is known of this life of it
        self._damages: dict[tuple[str, str], int] = {}  # by node and GPU, or rank: times that a group was caught there
        self._strange: set[str] = set()  # subjects that are not here, of which people know

    async def run(self) -> None:
        """Until cancelled. No process of a sensor is left, and no move is under way."""
        try:
            async with asyncio.TaskGroup() as tasks:
                log = self._agent.assignment.directory / "health.log"
                tasks.create_task(self._here.run(log, self._agent.engine.placed, self.take, self._note))
                tasks.create_task(self._watch_speed())
        except Exception as error:  # a bug here must not go unseen, nor end the training
            self._agent.events.add("health", f"nobody watches the health of this node any more: {error!r}")
        finally:
            if self._moving is not None:
                self._moving.cancel()
                await asyncio.gather(self._moving, return_exceptions=True)

    def take(self, readings: Sequence[Reading]) -> None:
        """Readings of one node. Must be called on the event loop's thread."""
        self._since = self._since or time.strftime("%H:%M")
        self._begin_lives()
        for verdict in self._watch.take([reading for reading in readings if self._counts(reading)]):
            if not verdict.bad:
                self._well_again(verdict)
            elif verdict.rule.action is Action.REPORT:
                self._tell(verdict, verdict.reading.group, "")
        wanted = [self._now(v) for v in self._watch.standing.values() if v.rule.action is Action.DRAIN]
        if self._table.dry_run:
            for verdict in wanted:
                for group in self._groups_of(verdict.reading):
                    self._tell(verdict, group, "would be drained (dry run)" if group >= 0 else "no group uses it")
            return
        self._agent.engine.avoid([v.reading.device for v in wanted if v.reading.device and not v.reading.node])
        if wanted and (self._moving is None or self._moving.done()):
            self._moving = asyncio.get_running_loop().create_task(self._act(wanted))

    def damaged(self, member: Member, rank: int) -> None:
        """What the group held or computed was wrong, as it says itself. It is held against the GPU of the rank that it
        names, whatever group or life comes there next; on another node, whose GPUs are not known here, against the
        rank. If it names none (-1), or there are no GPUs, people are told, by the lighthouse."""
        agent = self._agent
        if agent.lives.of(member) is None or not 0 <= rank < agent.assignment.ranks or not agent.engine.devices():
            return
        node, device = agent.engine.node_of(member, rank), agent.closing.device_of(member.group, rank)
        reading = Reading(_DAMAGE, 0, device, member.group, rank, node=node)
        key = _place_of(reading)
        self._damages[key] = self._damages.get(key, 0) + 1
        self.take([replace(reading, value=self._damages[key])])

    # --- what is read here -----------------------------------------------------------------------------------

    async def _watch_speed(self) -> None:
        while True:
            await asyncio.sleep(self._table.every)
            if readings := self._speeds():
                self.take(readings)

    def _speeds(self) -> list[Reading]:
        """Of every group that has made a step since it was read last: nothing new is known of the others."""
        readings = []
        for group, life in self._agent.lives.groups.items():
            if not life.alive or life.view is None or not life.view.slowness or life.step == self._steps.get(group):
                continue
            self._steps[group] = life.step
            own = [rank.view.shard_seconds if rank.view is not None else 0.0 for rank in life.ranks]
            rank = slow_rank(own)
            which = f"because of rank {rank}" if rank >= 0 else "which of its ranks it is cannot be told"
            readings.append(Reading("slow", life.view.slowness, group=group, text=which if len(own) > 1 else ""))
        return readings

    # --- what is done ----------------------------------------------------------------------------------------

    def _begin_lives(self) -> None:
        """A group that was started again is not what it was."""
        for group, life in self._agent.lives.groups.items():
            if self._members.setdefault(group, life.member) != life.member:
                self._members[group] = life.member
                for rank in range(-1, self._agent.assignment.ranks):
                    self._forget(Reading("", 0.0, group=group, rank=rank).subject)

    def _forget(self, subject: str) -> None:
        self._watch.forget(subject)
        self._told = {key: fate for key, fate in self._told.items() if key[1] != subject}

    def _counts(self, reading: Reading) -> bool:
        """What is said of a group that is leaving must not be held against its next life."""
        if not reading.about_group:
            return True
        life = self._agent.lives.groups.get(reading.group)
        if life is not None and reading.rank < self._agent.assignment.ranks:
            return life.state is GroupState.RUNNING and life.moving is None
        if self._agent.lives.groups and reading.subject not in self._strange and len(self._strange) < _MOST_STRANGE:
            self._strange.add(reading.subject)
            self._note(f"the site's health command speaks of {reading.subject}, which is none of this agent's")
        return False

    def _now(self, verdict: Verdict) -> Verdict:
        """Damages are read once, so whose the GPU is may have changed since."""
        if verdict.reading.signal != _DAMAGE or verdict.reading.node:
            return verdict
        return replace(verdict, reading=_located(verdict.reading, self._agent.engine.placed()))

    def _groups_of(self, reading: Reading) -> list[int]:
        """Whom it is about: -1 for a GPU that nobody uses."""
        if reading.device or reading.about_group:
            return [reading.group]
        return [life.member.group for life in self._agent.lives.alive()]

    async def _act(self, wanted: list[Verdict]) -> None:
        """Move groups away, one after the other; who cannot be moved now is tried again with the next readings."""
        self._replacing = {group for group in self._replacing if self._agent.moves.under_way(group)}
        for verdict in wanted:
            for group in self._groups_of(verdict.reading):
                life = self._agent.lives.groups.get(group)
                if group < 0 and not self._known(verdict):
                    self._tell(verdict, group, "no group uses it now, and none will if there is another")
                if life is None or life.state is not GroupState.RUNNING or not life.adopted or life.moving:
                    continue  # one that starts is judged when it is at work
                if self._replacing:
                    return  # until then the lighthouse does not count that group among those that are missing
                reading = verdict.reading
                reason = f"{reading.subject} {verdict.words(self._since)}"
                stays = bool(reading.device) or reading.about_group  # else it is the node that is not well
                drains = reading.signal == _DAMAGE  # nothing is read any more once nobody computes there
                try:
                    if drains and reading.device:
                        done = await drain(self._agent, group, reading.rank, reason, self._table.share)
                    else:
                        done = await move(
                            self._agent, group, reading.rank, reason, self._table.share, stays, not drains
                        )
                except NotMoved as refusal:
                    self._tell(verdict, group, f"not drained: {refusal}", known_as=_REFUSED)
                    break  # the others would be refused as well
                self._tell(verdict, group, done)
                if self._agent.moves.under_way(group):
                    self._replacing.add(group)
                if drains:
                    self._damages.pop(_place_of(reading), None)
                if reading.about_group or drains:
                    self._forget(reading.subject)

    # --- what is said ----------------------------------------------------------------------------------------

    def _known(self, verdict: Verdict) -> bool:
        """Whether anything was said of it: then that may be why the GPU is nobody's now."""
        return any(key[:2] == (verdict.rule.name, verdict.reading.subject) for key in self._told)

    def _tell(self, verdict: Verdict, group: int, fate: str, known_as: int | None = None) -> None:
        reading = verdict.reading
        key = (verdict.rule.name, reading.subject, group if known_as is None else known_as)
        if self._told.get(key) == fate:
            return
        self._told[key] = fate
        text = f"{reading.subject} {verdict.words(self._since)}"
        if group >= 0 and not reading.about_group:
            ranked = reading.rank >= 0 and self._agent.assignment.ranks > 1
            text = f"group {group}" + (f" rank {reading.rank}" if ranked else "") + f": {text}"
        facts = {"rule": verdict.rule.name, "signal": reading.signal, "value": verdict.value, "bad": True}
        facts |= {"subject": reading.subject, "rank": reading.rank, "done": fate or verdict.rule.action.value}
        self._agent.events.add("health", text + (f": {fate}" if fate else ""), group, facts)

    def _well_again(self, verdict: Verdict) -> None:
        reading = verdict.reading
        self._told = {k: v for k, v in self._told.items() if k[:2] != (verdict.rule.name, reading.subject)}
        facts = {"rule": verdict.rule.name, "signal": reading.signal, "value": verdict.value, "bad": False}
        text = f"{reading.subject} is well again, by rule {verdict.rule.name}"
        self._agent.events.add("health", text, reading.group, {**facts, "subject": reading.subject})

    def _note(self, sentence: str) -> None:
        # Who has written a table wants to know what of it cannot be read; for others it is for the record.
        self._agent.events.add("health" if self._table.given else "note", sentence)
