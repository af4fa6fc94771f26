"""The agent of one node: starts, watches and restarts its groups and keeps a stream to the lighthouse."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from planaria.core.messages import (
    NO_QUORUM,
    Adopted,
    Close,
    Desired,
    Died,
    Drain,
    Finished,
    Heartbeat,
    Host,
    Kill,
    Leaving,
    Member,
    Migrate,
    Order,
    Phase,
    Policy,
    Prepared,
    Publish,
    Pulse,
    Quorum,
    QuorumId,
    Ready,
    Refuse,
    Report,
    Resume,
    Stop,
    Suspected,
    Welcome,
)
from planaria.sim.memory import Memory
from planaria.sim.trainer import RANK_LOST, Trainer
from planaria.sim.uplink import Uplink

if TYPE_CHECKING:
    from planaria.sim.world import World

SOCKET_TIME = 0.0002  # always the same, which keeps the order
NOTICE_TIME = (0.0005, 0.02)  # from the end of a process to its agent knowing
RESTART_TIME = (0.1, 0.6)
SWAP_TIME = (0.0, 0.02)  # in which a standby becomes a rank; then its script begins
PREPARE_TIME = (0.3, 2.0)  # of a standby
REFILL_TIME = (0.01, 0.3)  # until one rank is there, and the others have met it
SUSPECT_AFTER = 1.5  # the real one is derived from progress seen
FINISH_GRACE = 10.0  # PlanSpec.finish_grace
KILL_AFTER = 4.0  # grace for a stopped process to come back by itself


class Ward:
    """The newest incarnation of one group here."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.trainer: Trainer | None = None
        self.ready = False
        self.suspected = False
        self.finished = False
        self.runs = True  # not known to have ended
        self.adopted = False  # works in a quorum
        self.founder = True  # looked for a checkpoint
        self.run = NO_QUORUM  # see Supervisor.run, when it was started
        self.wanted = True  # to be started again when it ends
        self.moving = False  # it leaves in order, and is started again
        self.moved = False  # its group goes on at another node
        self.held: Ready | None = None  # it has said so, and must not join yet
        self.holds = False
        self.memory: Memory | None = None  # its ranks', but for one that is new

    @property
    def gone(self) -> bool:
        return self.trainer is not None and not self.trainer.process.alive


class Supervisor(Uplink):
    """One life of an agent. Its groups die with it."""

    def __init__(self, world: World, node: str, groups: list[int]) -> None:
        super().__init__(world, node)
        self.process.on_death.append(self._all_die)
        self.wards: dict[int, Ward] = {}
        self.wanted = world.config.groups  # groups of the whole job
        self.complete = False
        self.standbys = world.config.standbys  # that are warm
        self.quorum: Quorum | None = None  # the newest heard of
        self.run = NO_QUORUM  # the newest Resume.run
        for group in groups:
            self._start(group)
        self._connect()
        self._beat()

    # --- the link to the lighthouse --------------------------------------------------------------------------

    def echo(self) -> None:
        """Something old comes late, as from a lighthouse that was deposed and does not know it: to all groups here."""
        known = self.world.checker.quorums
        if known:
            quorum = self.kernel.random.choice(known[:-1] or known)
            for ward in self.wards.values():
                self._order(Publish(ward.member, quorum))

    def _hosted(self) -> tuple[int, ...]:
        homes = self.world.homes.items()
        return tuple(g for g, home in homes if home == self.node and g in self.wards and not self.wards[g].holds)

    def _beats(self) -> Heartbeat:
        told = [w for w in self.wards.values() if w.runs and not w.holds]
        pulses = [w.trainer.pulse() if w.trainer else _starting(w.member) for w in told]
        return Heartbeat(tuple(pulses), self.standbys)

    # --- orders ----------------------------------------------------------------------------------------------

    def _order(self, message: object) -> None:
        order: Order = message  # type: ignore[assignment]
        match order:
            case Publish(member, quorum):
                if self.quorum is None or quorum.id > self.quorum.id:
                    self.quorum = quorum
                ward = self._ward(member)
                if ward is not None and ward.trainer is not None:
                    trainer = ward.trainer
                    trainer.process.after(SOCKET_TIME, lambda: trainer.hear(quorum))
            case Refuse(member, reason):
                if self.world.config.shared:
                    self.world.checker.fail(f"all members are alike and see the same disk, but {reason}")
                if (ward := self._ward(member)) is not None:
                    ward.wanted = False
                    self._end(ward, f"refused: {reason}")
            case Drain(member, moved):
                ward = self.wards.get(member.group) if moved else self._ward(member)
                if ward is not None and (moved or not self.closed):
                    ward.wanted, ward.moved = False, moved
                    starts = ward.trainer is not None and ward.trainer.phase in (Phase.STARTING, Phase.PARKED)
                    if moved and starts:
                        self._end(ward, "it was drained")
            case Host():
                self._host(order)
            case Close(_, opens):
                self._close(opens)
            case Kill(group, _):
                if group in self.wards:
                    self._end(self.wards[group], "killed by an operator")
            case Migrate(group, _):
                self._move(group)
            case Desired(groups):
                self._desired(groups)
            case Stop(reason):
                if reason:
                    self._stop(reason)
                else:
                    self._dismissed()
            case Resume():
                self._resume(order)
            case Welcome():
                pass

    def _ward(self, member: Member) -> Ward | None:
        ward = self.wards.get(member.group)
        return ward if ward is not None and ward.member == member else None

    def _move(self, group: int) -> None:
        ward = self.wards.get(group)
        if ward is not None and ward.runs and ward.wanted and ward.adopted and self._others_hold_the_state(group):
            ward.moving = True
            self._pass_on(ward, Leaving(ward.member))

    def _host(self, order: Host) -> None:
        """A group comes here from another node: it is started, and joins when the older life has left."""
        group, ward = order.member.group, self._ward(order.member)
        if order.off:
            if ward is not None and ward.holds:
                ward.wanted = False
                self._end(ward, "it is not needed")
        elif order.joins:
            if ward is not None and ward.held is not None:
                self.world.homes[group] = self.node
                ready, ward.holds, ward.held = ward.held, False, None
                self._pass_on(ward, ready)
            elif ward is not None and ward.holds and not ward.runs:
                self.world.homes[group] = self.node  # it ended while this was on its way
                self._start(group)
        elif ward is None:
            known = self.wards.get(group)
            if self.closed or self.stopped or self.complete or (known is not None and known.runs):
                self._send(Prepared(order.member, "there is no place for it"))
                return
            self.world.takes(order.member)
            ward = self.wards[group] = Ward(order.member)
            ward.holds = True
            self.process.after(self.kernel.between(*RESTART_TIME), lambda: self._spawn(ward))

    def _close(self, opens: bool) -> None:
        self.closed = not opens
        for group, ward in list(self.wards.items()):
            if self.closed and ward.runs and not ward.ready:
                if ward.trainer is None:  # its process is being made, and heartbeats tell of it
                    ward.runs, ward.memory = False, None
                    if not ward.holds:
                        self._pass_on(ward, Died(ward.member, "its node is drained"))
                self._end(ward, "its node is drained")
            elif opens and ward.wanted and not (ward.runs or ward.holds or self.complete or self.stopped):
                self._start(group)

    def _desired(self, groups: int) -> None:
        if groups > self.wanted and not self.closed:
            for group in range(groups):
                ward = self.wards.get(group)
                ended = ward is None or not (ward.wanted or ward.runs or ward.finished)
                if self.world.node_of(group) == self.node and ended and not self.complete:
                    self._start(group)
        self.wanted = groups

    def _stop(self, reason: str) -> None:
        if not self.stopped:
            self.world.check_stop(reason)
        self.stopped = reason
        self.world.emit("stop", -1, "{} hears: {}", self.node, reason)
        for ward in self.wards.values():
            ward.wanted = False
            self._end(ward, "the job was stopped")

    def _resume(self, order: Resume) -> None:
        self.world.emit("resume", -1, "{} hears: {}", self.node, order)
        if order.run >= self.run:
            self.run, self.quorum = order.run, None
        for ward in self.wards.values():
            late = ward.runs and (ward.run < self.run or not ward.founder)
            if late and ward.memory is not None and ward.memory.whole is not None:
                if ward.trainer is not None:  # else it will ask again, and be told again
                    self._look(ward.trainer, order.run)
            elif late:
                self._end(ward, "it makes way for one that looks for a checkpoint")

    def _look(self, trainer: Trainer, run: QuorumId) -> None:
        trainer.process.after(SOCKET_TIME, lambda: trainer.look_for_copies(run))

    def _others_hold_the_state(self, but: int = -1) -> bool:
        members = self.quorum.members if self.quorum is not None else ()
        elsewhere = any(member.group not in self.wards for member in members)
        here = any(ward.adopted and ward.runs for group, ward in self.wards.items() if group != but)
        return elsewhere or here

    def _dismissed(self) -> None:
        """The job is complete, and no group here has a part in that."""
        self.world.check_complete(self.node)
        self.complete = True
        for ward in self.wards.values():
            self._end(ward, "the job finished without it")
        self.world.emit("stop", -1, "{} hears that the job is complete", self.node)

    @property
    def at_rest(self) -> bool:
        """Nothing runs here, and nothing will be started."""
        ended = self.complete or bool(self.stopped)
        return self.process.alive and all(w.gone or (ended and w.trainer is None) for w in self.wards.values())

    @property
    def deserted(self) -> bool:
        """No group runs here, or is to: it ends by itself, whether it hears that the job is over or not."""
        return not any(ward.wanted or ward.runs for ward in self.wards.values())

    @property
    def keeps_copies(self) -> bool:
        """Whether a group here has, or will have, a copy to go back to."""
        here = [ward for ward in self.wards.values() if self.process.alive and ward.wanted and not ward.finished]
        joins = [w for w in here if w.trainer is None or (w.trainer.joins and w.trainer.process.alive)]
        return any(ward.memory is not None and ward.memory.whole is not None for ward in joins)

    # --- groups ----------------------------------------------------------------------------------------------

    def _start(self, group: int, memory: Memory | None = None) -> None:
        """``memory``: of the ranks that are left, under which one is new."""
        ward = self.wards[group] = Ward(self.world.next_incarnation(group))
        ward.memory = memory
        needs = RESTART_TIME if memory is None else REFILL_TIME
        self.process.after(self.kernel.between(*needs), lambda: self._spawn(ward))

    def _spawn(self, ward: Ward) -> None:
        over = self.stopped or self.complete or self.closed or not ward.wanted
        if over or self.wards.get(ward.member.group) is not ward:
            ward.runs = False
            if ward.holds:
                self._tell_prepared(Prepared(ward.member, "there is no place for it any more"))
            return
        member = ward.member
        ward.founder, ward.run = ward.memory is None and not self._others_hold_the_state(), self.run
        speed = self.world.speed_of(member.group)
        trainer = Trainer(
            self.world, member, self.node, lambda r: self._said(ward, r), speed, ward.founder, ward.memory
        )
        ward.trainer, ward.memory = trainer, trainer.memory
        self.world.trainers[member] = trainer
        self.world.emit("start", member.group, "incarnation {} starts", member.incarnation)
        trainer.process.on_death.append(
            lambda: self.process.after(self.kernel.between(*NOTICE_TIME), lambda: self._ended(ward))
        )

    def _said(self, ward: Ward, report: Report) -> None:
        """A report of a member, over its socket; passed on as it is."""
        self.process.after(SOCKET_TIME, lambda: self._pass_on(ward, report))

    def _pass_on(self, ward: Ward, report: Report) -> None:
        if isinstance(report, Ready):
            report = replace(report, looked=max(ward.run, report.looked))
        if ward.holds:
            if isinstance(report, Ready):
                ward.ready, ward.held = True, report
                self._tell_prepared(Prepared(ward.member))
            elif isinstance(report, Died):
                ward.runs, ward.wanted, ward.held = False, False, None
                self._tell_prepared(Prepared(ward.member, report.cause))
            return
        self.world.emit("report", ward.member.group, "{}", report)
        self.told.record(report)
        match report:
            case Ready():
                ward.ready, ward.suspected, ward.adopted = True, False, False
            case Adopted():
                ward.adopted = True
            case Suspected():
                ward.suspected = True
            case Finished():
                ward.finished, ward.wanted, self.complete = True, False, True
            case Died():
                ward.runs = False
        self._send(report)

    def _tell_prepared(self, report: Prepared) -> None:
        self.world.emit("report", report.member.group, "{}", report)
        self.told.record(report)
        self._send(report)

    def _end(self, ward: Ward, cause: str) -> None:
        if ward.trainer is not None and ward.trainer.process.alive:
            ward.trainer.exit = ward.trainer.exit or cause
            ward.trainer.process.die()

    def _ended(self, ward: Ward) -> None:
        assert ward.trainer is not None
        cause = ward.trainer.exit or "SIGKILL"
        if cause.startswith("leave") and not ward.moving and not self.closed:
            ward.wanted = False
        lost = not cause.startswith("leave") and ward.adopted and ward.wanted and not ward.finished
        spare = lost and self.standbys > 0 and not (self.complete or self.stopped or self.closed)
        self._pass_on(ward, Died(ward.member, cause, spare, ward.moved))
        if spare and self.world.config.policy is Policy.SPARE:
            self._replace_by_standby(ward)
            return
        if ward.finished:
            self._end_late(settled=False)
            self.process.after(FINISH_GRACE, lambda: self._end_late(settled=True))
        if ward.wanted and not self.complete and not self.stopped and not self.closed:
            kept = ward.memory if cause == RANK_LOST and ward.adopted else None
            if kept is not None and kept.whole is None and not self._others_hold_the_state(ward.member.group):
                kept = None  # there is nothing that the ranks which are left could go back to
            self._start(ward.member.group, kept.inherited() if kept is not None else None)

    def _replace_by_standby(self, ward: Ward) -> None:
        """It may be found dead when it is needed, and it may die as it takes the place."""
        self.standbys -= 1
        self.process.after(self.kernel.between(*PREPARE_TIME), self._prepared)
        if self.kernel.chance(0.1):
            self._pass_on(ward, Died(ward.member, "no standby takes its place after all"))
            self._start(ward.member.group)
            return
        newer = self.wards[ward.member.group] = Ward(self.world.next_incarnation(ward.member.group))
        self.process.after(self.kernel.between(*SWAP_TIME), lambda: self._spawn(newer))
        if self.kernel.chance(0.1):
            self.process.after(self.kernel.between(0.0, 1.5), lambda: self._end(newer, "a standby dies"))

    def _prepared(self) -> None:
        self.standbys += 1

    def _end_late(self, settled: bool) -> None:
        """A group here has finished. Whoever holds no state has nobody left to heal from; the others are given time."""
        for ward in self.wards.values():
            if ward.trainer is not None and not ward.finished and (settled or not ward.trainer.stepper.settled):
                self._end(ward, "the job finished without it")

    def _all_die(self) -> None:
        for ward in self.wards.values():
            self._end(ward, "its agent died")

    # --- suspicion -------------------------------------------------------------------------------------------

    def member_paused(self, group: int) -> None:
        """The world stopped a member: with time the progress page shows it."""
        ward = self.wards.get(group)
        if ward is not None:
            self.process.after(SUSPECT_AFTER, lambda: self._suspect(ward))
            self.process.after(SUSPECT_AFTER + KILL_AFTER, lambda: self._give_up(ward))

    def suspect(self, group: int) -> None:
        """A false alarm: the member is only slow, and is seen to go on soon after."""
        ward = self.wards.get(group)
        if ward is not None and ward.trainer is not None and ward.ready and ward.runs:
            self._accuse(ward, "no progress seen (a false alarm)")

    def _suspect(self, ward: Ward) -> None:
        if ward.trainer is not None and ward.trainer.process.paused and ward.ready and ward.runs:
            self._accuse(ward, "stopped")

    def _accuse(self, ward: Ward, why: str) -> None:
        self._pass_on(ward, Suspected(ward.member, why))
        self.process.after(0.3, lambda: self._look_again(ward))

    def _look_again(self, ward: Ward) -> None:
        if ward.trainer is None or not ward.runs or not ward.suspected:
            return
        if ward.trainer.process.paused:
            self.process.after(0.3, lambda: self._look_again(ward))
        elif (ready := self.told.ready(ward.member)) is not None:
            self._pass_on(ward, ready)

    def _give_up(self, ward: Ward) -> None:
        if ward.trainer is not None and ward.trainer.process.paused and ward.suspected:
            self._end(ward, "stopped for too long, killed by its agent")


def _starting(member: Member) -> Pulse:
    return Pulse(member, Phase.STARTING, 0, NO_QUORUM, 0.0, 0.0)
