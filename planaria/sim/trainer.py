"""A rank: the real ``Stepper``, a simulated data plane, and the loop that a real shell runs around them.

``Trainer.train`` is the training thread and the reference for every front. It is written as a generator: each
``yield`` is a place where the thread waits, and what it waits for. Everything else here is the control thread.

The "weights" are a chain of hashes. The gradient of a shard depends on the weights, the step and the shard; a commit
folds exactly the gradients that were exchanged. So one wrong, missing or doubled gradient changes every later state.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from planaria.core import actions as core
from planaria.core.corruption import signs
from planaria.core.messages import (
    NO_QUORUM,
    ControlWord,
    Member,
    Phase,
    Pulse,
    Quorum,
    QuorumId,
    Ready,
    Report,
    Standing,
)
from planaria.core.tree import Node, merge_plan
from planaria.sim.catching_up import CatchUp
from planaria.sim.disk import Saver
from planaria.sim.fabric import Result
from planaria.sim.flips import State
from planaria.sim.invariants import add, gradient, reduce
from planaria.sim.kernel import Process
from planaria.sim.memory import Memory

if TYPE_CHECKING:
    from planaria.sim.world import World

ROLL_TIME = (0.001, 0.01)  # seconds
EXCHANGE_TIME = (0.003, 0.03)
HEAL_TIME = (0.05, 0.4)
RESTORE_TIME = (0.001, 0.1)
APPLY_TIME = (0.001, 0.02)
LOOK_TIME = (0.001, 0.1)  # in memory
RANK_LOST = "it lost a rank"  # how an incarnation ends whose other ranks live on
WAKE_TIME = (0.0, 0.0005)  # from the end of an operation to the training thread holding the lock
SLOW_WAKE_TIME = (0.0, 0.05)  # on a busy machine


@dataclass(frozen=True, slots=True)
class Sleep:
    """Work that takes this long and that no news can end."""

    seconds: float


@dataclass(frozen=True, slots=True)
class News:
    """Wait until the control thread has changed something."""


@dataclass(frozen=True, slots=True)
class Collective:
    """Enter a collective and wait for its end: a Result comes back."""

    quorum: QuorumId
    key: object  # equal at all members that are in the same collective
    payload: object
    seconds: tuple[float, float]


Thread = Generator[Sleep | News | Collective, Result | None, None]


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a member puts into an exchange."""

    word: ControlWord
    sums: tuple[tuple[Node, int], ...]  # of the subtrees that it holds
    state: State  # as the control word found it
    origin: int  # step of the checkpoint from which its state comes


class Trainer:
    """One incarnation of one group. ``tell`` sends a report to its agent. ``founder``: nobody is known to hold the
    state, so that it looks for a checkpoint. ``memory``: of the ranks that lived on, if one was replaced under them."""

    def __init__(
        self,
        world: World,
        member: Member,
        node: str,
        tell: Callable[[Report], None],
        speed: float,
        founder: bool,
        memory: Memory | None = None,
    ) -> None:
        self.world = world
        self.kernel = world.kernel
        self.member = member
        self.node = node
        self.address = f"{node}:{member.group}.{member.incarnation}"
        self.speed = speed  # shards per unit of time, relative
        self.process = Process(world.kernel, f"group {member.group}.{member.incarnation}")
        self.process.on_death += [lambda: world.fabric.gone(self), lambda: world.died(self)]
        self.tell = tell
        self.phase = Phase.STARTING
        self.state = self._called = State()  # what it holds, and what it held when the roll was called
        self.flips = 0  # bits of that which have flipped
        self.sums: dict[Node, int] = {}  # gradients of the shards held, as sums of whole subtrees
        self.orderly = False
        self.exit = ""  # why the process ended by itself
        config = world.config
        self.saver = Saver(self, world.disk_of(node), config.save_every) if config.save_every else None
        self.founder = founder
        self.joins = memory is not None
        self.memory = memory or (Memory(config.copy_every) if config.copy_every else None)
        self.catch_up = CatchUp(self)
        self._told = self._looked = NO_QUORUM  # runs for which it was told to look for copies, and has looked
        self.veteran = False  # it has held a state that counts
        self.origin = 0
        self.ready = Ready(member, self.address, (), str(self.state.weights), config.shards, config.steps)
        self.stepper = world.stepper(self.ready, config.policy, config.groups)
        self._ranks: dict[QuorumId, int] = {}  # own rank in the communicators asked for
        self._thread: Thread | None = None
        self._waits_for_news = False
        self.process.after(0.0 if self.joins else self.kernel.between(0.2, 1.2), self._built)

    def _built(self) -> None:
        """Imports, model and data are there."""
        if self.saver is not None and self.founder:
            self.saver.look()
        else:
            self.present(0)

    def present(self, step: int) -> None:
        """Ask to take part, with the state of a checkpoint or, at step 0, that of the script."""
        saves = self.saver is not None
        initial = str(self.state.weights) if not self.joins and (self.founder or not saves) else ""
        self.origin = step
        self.ready = replace(self.ready, initial=initial, step=step, saves=saves, keeps=self.memory is not None)
        config = self.world.config
        self.stepper = self.world.stepper(self.ready, config.policy, config.groups)
        self.tell(self.ready)
        self._thread = self.train()
        self._run(None)

    def look_for_copies(self, run: QuorumId) -> None:
        if self._thread is not None:
            self._told = max(self._told, run)
            self.notice()

    def _go_back(self) -> Thread:
        """Nobody has the state any more: the newest of what is in memory and on the disk."""
        run = self._looked = self._told
        for id in self._ranks:
            self.world.fabric.drop(self, id)
        yield Sleep(self.kernel.between(*LOOK_TIME))
        assert self.memory is not None and self.memory.whole is not None
        found, kept = self.memory.whole, self.memory.whole.under
        self.origin, self.state = found.step, found.state
        if self.saver is not None and self.saver.disk.newest > found.step:
            self.origin = self.saver.newest = self.saver.disk.newest
            self.state, kept = self.saver.disk.states[self.origin], NO_QUORUM
        self.sums.clear()
        self.catch_up.lost()
        initial = str(self.state.weights) if kept == NO_QUORUM else f"{self.origin} {kept}"
        self.ready = replace(self.ready, initial=initial, step=self.origin, looked=run, kept=kept)
        self.stepper = self.world.stepper(self.ready, self.world.config.policy, self.world.config.groups)
        self.world.emit("goes back", self.member.group, "to step {}", self.origin)
        self.tell(self.ready)

    def pulse(self) -> Pulse:
        """The progress page, as the agent reads it."""
        target = self.stepper.target
        quorum = target.id if target is not None else QuorumId(0, 0)
        return Pulse(self.member, self.phase, self.stepper.step, quorum, 0.0, 0.2)

    def describe(self) -> str:
        stepper = self.stepper
        settled = "settled" if stepper.settled else "unsettled"
        target = stepper.target.id if stepper.target is not None else "none"
        return f"{self.process.name} {self.phase.name} step {stepper.step} {settled}, quorum {target}"

    # --- the control thread ----------------------------------------------------------------------------------

    def hear(self, quorum: Quorum) -> None:
        if self._thread is None:
            return  # it is not connected yet
        self.world.emit("hear", self.member.group, "{}", quorum)
        self._do(self.stepper.hear(quorum))
        self.notice()

    def formed(self, id: QuorumId) -> None:
        self.world.emit("formed", self.member.group, "{}", id)
        self._do(self.stepper.formed(id))
        self.notice()

    def broken(self, id: QuorumId, text: str) -> None:
        self.world.emit("broken", self.member.group, "{}: {}", id, text)
        if text != "given up here" and self.stepper.settled and self.stepper.works_under(id):
            self.world.checker.broken(self.member, id, text)
        self._do(self.stepper.broken(id, text))
        self.notice()

    def _do(self, effects: list[core.Effect]) -> None:
        for effect in effects:
            match effect:
                case core.Form(quorum):
                    self._ranks[quorum.id] = quorum.members.index(self.member)
                    self.world.fabric.form(self, quorum)
                case core.Drop(id):
                    self.world.fabric.drop(self, id)
                case core.Tell(report):
                    self.veteran = self.veteran or self.stepper.settled
                    self.tell(report)

    # --- the training thread ---------------------------------------------------------------------------------

    def train(self) -> Thread:
        while True:
            if self._told > self._looked:
                yield from self._go_back()
            stepper = self.stepper
            action = stepper.next()
            match action:
                case core.Wait(parked):
                    self.phase = Phase.PARKED if parked else Phase.FORMING
                    yield News()
                case core.RollCall(quorum, standing):
                    self.phase = Phase.FORMING
                    told = self.catch_up.told(self._signed(standing))
                    result = yield Collective(quorum, "roll call", told, ROLL_TIME)
                    if (payloads := self._ended(quorum, result)) is not None:
                        standings = [p for p in payloads if isinstance(p, Standing)]
                        self.world.checker.rolled(self.member, quorum)
                        self.world.witness.rolled(self.member, quorum, stepper.works_under(quorum))
                        if stepper.target is not None and stepper.target.id == quorum and stepper.target.founding:
                            self.world.check_founding(stepper.target, standings)
                        self._do(stepper.rolled(quorum, standings))
                        self._forget_uncounted()
                        self.world.emit("rolled", self.member.group, "{} at step {}", quorum, stepper.step)
                case core.Heal():
                    self.phase = Phase.HEALING
                    yield from self._heal(action)
                case core.Compute(step, shard):
                    self.phase = Phase.COMPUTING
                    yield Sleep(self.kernel.between(0.7, 1.3) * self.world.config.shard_seconds / self.speed)
                    self._keep(shard, gradient(self.state.weights, step, shard))
                    stepper.shard_done(shard)
                case core.Exchange():
                    self.phase = Phase.EXCHANGING
                    yield from self._exchange(action)
                case core.Finish(step):
                    self.phase = Phase.FINISHED
                    if self.checks and stepper.target is not None:
                        self.world.witness.counts(self.member, stepper.target.id, step, self._called)
                    self.world.checker.finished(self.member, step, self._called.weights)
                    self._do(stepper.finished(str(self._called.weights)))
                    yield from self._last_save(step)
                    self._leave("finished")
                    return
                case core.Disputed():
                    self._end_disputed()
                    return
                case core.Leave(reason):
                    yield from self._last_save(0)
                    self._leave(f"leave: {reason}")
                    return

    def _last_save(self, step: int) -> Thread:
        """Nothing of an orderly end shall be lost. ``step``: of the state to be saved, if it is not yet; 0: of none."""
        saver = self.saver
        if saver is None:
            return
        while saver.saving:
            yield News()
        if self.stepper.first == self.member and step > saver.newest:
            saver.save(step)
            while saver.saving:
                yield News()

    def _heal(self, action: core.Heal) -> Thread:
        key = ("heal", action.step, action.sources, action.healers, action.since)
        self.world.emit("heal", self.member.group, "{} {}", action.quorum, "receives" if action.receive else "gives")
        state = self.stepper.step, self.state, self.origin
        payload = None if action.receive else (state, self.catch_up.missed(action.since))
        result = yield Collective(action.quorum, key, payload, HEAL_TIME)
        if (payloads := self._ended(action.quorum, result)) is None:
            return
        if action.receive:
            yield Sleep(self.kernel.between(*RESTORE_TIME))  # copies what was received into the live state
            given = [p for r in action.sources if isinstance(p := payloads[r], tuple)]
            if self.checks:  # sources may differ by now, and every one gives a part
                given = [self.kernel.random.choice(given)]
            states = [state for state, _ in given]
            before = self.state
            self.state, self.origin = self.world.checker.healed(self.member, action.step, states)
            self.sums.clear()
            sound = self.catch_up.healed(action, given[0][1], before)
            if not sound or (self.checks and action.checksum not in (0, self.state.whole)):
                self.world.emit("spoilt", self.member.group, "{} at step {}", action.quorum, action.step)
                self._do(self.stepper.spoilt(action.quorum))
                return
        self._do(self.stepper.healed(action.quorum))
        if action.receive and self.checks and self.stepper.settled:
            self.world.witness.counts(self.member, action.quorum, action.step, self.state)
        self.world.emit("healed", self.member.group, "{} at step {}", action.quorum, self.stepper.step)

    def _exchange(self, action: core.Exchange) -> Thread:
        stepper = self.stepper
        mine = action.nodes(self.world.config.shards)[self._ranks[action.quorum]]
        word = stepper.word(self.world.config.shard_seconds / self.speed, checksum=self._checksum(action.step))
        if missing := [str(n) for n in mine if n not in self.sums]:
            self.world.checker.fail(f"{self.member} should hold {missing}, but holds {[str(n) for n in self.sums]}")
        payload = Contribution(word, tuple((n, self.sums[n]) for n in mine), self.state, self.origin)
        key = ("exchange", action.step, action.owned)
        self.world.emit("exchange", self.member.group, "step {} under {}", action.step, action.quorum)
        result = yield Collective(action.quorum, key, payload, EXCHANGE_TIME)
        if (payloads := self._ended(action.quorum, result)) is None:
            return
        given = [p for p in payloads if isinstance(p, Contribution)]
        self.world.emit("exchanged", self.member.group, "step {} under {}", action.step, action.quorum)
        if len({c.word.checksum for c in given}) > 1:
            self.world.witness.differs(self.member)
            self.world.emit("recount", self.member.group, "step {} under {}", action.step, action.quorum)
            stepper.recount()
            return
        stepper.exchanged(action.quorum, [c.word for c in given])
        yield Sleep(self.kernel.between(*APPLY_TIME))  # the user's optimizer, outside the lock
        parts = [part for c in given for part in c.sums]
        total = reduce(parts, self.world.config.shards)
        self._apply(action, total, [n for n, _ in parts], [c.state for c in given])
        self.sums.clear()
        self._do(stepper.applied())
        self.catch_up.committed(total)
        if self.saver is not None:
            self.saver.committed(stepper.step, stepper.first == self.member)
        if self.memory is not None:
            self.memory.committed(self)
        self.world.emit("commit", self.member.group, "step {} under {}", action.step, action.quorum)

    def _apply(self, action: core.Exchange, total: int, nodes: list[Node], states: list[State]) -> None:
        checker, witness, now = self.world.checker, self.world.witness, self.kernel.now
        sound = not self.checks or witness.right(action.step, self.state)
        self.state = self.state.applied(action.step, total)
        if self.checks:
            witness.summed(self.member, action.step, states, checker.is_sum(action.step, total))
        # What a damaged member ends with is its own: the others see it in the next step.
        checker.committed(self.member, action, nodes, self.state.weights if sound else None, now)

    # --- silent corruption -----------------------------------------------------------------------------------

    @property
    def checks(self) -> int:
        return self.world.config.check_every

    def _signed(self, standing: Standing) -> Standing:
        self._called = self.state
        return replace(standing, checksum=self.state.whole) if self.checks and signs(standing) else standing

    def _checksum(self, step: int) -> int:
        if not self.checks:
            return 0
        return self.state.whole if step % self.checks == 0 else self.state.parameters

    def _end_disputed(self) -> None:
        target = self.stepper.target
        assert target is not None
        self.world.emit("disputed", self.member.group, "{} at step {}", target.id, self.stepper.step)
        self.world.witness.ends(self.member, target.members.index(self.member), target.id, self.flips)
        self.exit = "corrupt"
        self.process.die()

    def _ended(self, id: QuorumId, result: Result | None) -> tuple[object, ...] | None:
        """What all ranks put in; or None, after which ``next`` says how to go on."""
        assert result is not None
        if result.payloads is None:
            self.broken(id, result.error)
        return result.payloads

    def _forget_uncounted(self) -> None:
        """Gradients that somebody else's count for, or that belong to a state that is given up."""
        self.sums = {n: g for n, g in self.sums.items() if n.start in self.stepper.have}

    def _keep(self, shard: int, value: int) -> None:
        """Finished siblings merge at once, so that only maximal subtrees are held."""
        merges = merge_plan(self.sums, shard, self.world.config.shards)
        self.sums[Node(shard, shard + 1)] = value
        for merge in merges:
            self.sums[merge.parent] = add(self.sums.pop(merge.left), self.sums.pop(merge.right))

    def _leave(self, why: str) -> None:
        self.exit, self.orderly = why, True
        self.process.die()

    # --- the thread itself -----------------------------------------------------------------------------------

    def _run(self, result: Result | None) -> None:
        """Runs the training thread to its next wait."""
        assert self._thread is not None
        self._waits_for_news = False
        try:
            wait = self._thread.send(result)
        except StopIteration:
            return
        match wait:
            case Sleep(seconds):
                self.process.after(seconds, lambda: self._run(None))
            case News():
                self._waits_for_news = True
            case Collective(quorum, key, payload, seconds):
                self.world.fabric.enter(self, quorum, key, payload, seconds, self._woken)

    def _woken(self, result: Result) -> None:
        """An operation ended. Before the thread gets the lock, the control thread may hear of something else."""
        wake_time = SLOW_WAKE_TIME if self.kernel.chance(0.05) else WAKE_TIME
        self.process.after(self.kernel.between(*wake_time), lambda: self._run(result))

    def notice(self) -> None:
        """Something changed that the training thread may wait for."""
        if self._waits_for_news:
            self._waits_for_news = False
            self.process.after(self.kernel.between(*WAKE_TIME), lambda: self._run(None))
