"""A rank's membership: its stepper, its communicators, and the news for both.

Three kinds of threads meet here. The control thread brings orders, helper threads of ``exchange`` report
communicators that stand or failed: both only note what they heard (see ``news``) and ring. The training thread alone
moves the stepper. It takes in what was noted when the ranks of the group have agreed on it (see ``rounds``), so the
steppers of a group's ranks never come to differ.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from planaria.core import actions as core
from planaria.core.catching_up import HISTORY
from planaria.core.corruption import Recheck
from planaria.core.messages import (
    NO_QUORUM,
    Adopted,
    Corrupted,
    Drain,
    Order,
    Phase,
    Present,
    Publish,
    Quorum,
    QuorumId,
    Ready,
    Refuse,
    Regroup,
    Report,
    Resume,
    Standing,
    Stay,
    Stop,
)
from planaria.core.stepper import Stepper
from planaria.errors import CommunicatorError, JobLostError, PlanariaError, UsageError
from planaria.exchange.communicator import Communicator, Communicators
from planaria.exchange.rendezvous import RendezvousStore
from planaria.exchange.waiting import Bell, Interrupted
from planaria.rank.control import Control
from planaria.rank.front import Comparable, Follower, World
from planaria.rank.journal import QuorumJournal
from planaria.rank.news import News
from planaria.rank.records import decode_standing, encode_standing
from planaria.rank.rounds import Note, agreed
from planaria.rank.settings import Settings
from planaria.rank.statechecks import StateChecks
from planaria.rank.stuck import end_if_asleep
from planaria.wire.page import ProgressPage

ALONE = QuorumId(1, 1)
# Orders reach the ranks of a group within less, and a recovery is many times as long.
SKEW_SECONDS = 0.001
# As long as the agent waits for ranks that it has told to end.
LAST_WORD_SECONDS = 5.0
# Moves the state of a healing and returns what puts it in place, once all ranks of the group have theirs, and tells
# whether it is what the sources had: the same on all ranks.
Transfer = Callable[[core.Heal, Communicator], Callable[[], bool]]


# Says what this group is, when all its ranks are there: given the address of its rendezvous store; whether it joins
# a job that others carry on, because one of its ranks is new; and whether it looks for a state to go back to.
Introduce = Callable[[str, bool, bool], Ready]


class Bereaved(RuntimeError):
    """A rank of this group is lost and will be replaced: what the group was doing is void. ``rejoin`` goes on."""


class Session:
    """Made when the script starts its steps. ``state``: of the job; the gradients are where that is."""

    def __init__(self, settings: Settings, world: World, page: ProgressPage | None, state: Comparable) -> None:
        self.settings = settings
        self.member = settings.born  # the next incarnation of it after a rank of the group was replaced
        self.world = world
        self.page = page
        self.bell = Bell()
        self.communicators = Communicators(
            self.member, settings.host, self.bell, self._on_formed, world.rank, state.device, world.await_devices
        )
        self.stepper: Stepper  # set by start
        self.checks = StateChecks(settings.check_state, state, self.gather, settings.directory)
        self.follower: Follower | None = None  # low communication: set before the first step
        self.journal = QuorumJournal(settings.directory)
        self._news = News()
        self._lock = threading.Lock()  # for what follows
        self._stop = False
        self._regroup: Regroup | None = None  # not carried out yet
        self._told = NO_QUORUM  # the newest run of the job for which this rank was told to look for copies
        self._run = NO_QUORUM  # for which all ranks of the group were
        self._looked = NO_QUORUM  # for which they have looked
        self.stays = False  # another rank of the group moves: that the group is left out ends this one not
        self._waits = False  # another is lost, and the agent seeks a process for its place
        self._shard_seconds = 0.0  # what the group needed for a shard lately
        self._phase = Phase.STARTING
        self._introduce: Introduce
        self._failure: Exception | None = None
        self._closed = False
        self._control: Control | None = None
        # One store serves all ranks of the group.
        self._store = RendezvousStore(settings.host) if not self.alone and world.rank == 0 else None

    @property
    def alone(self) -> bool:
        return self.settings.socket is None

    def start(self, introduce: Introduce) -> None:
        """Say that this group is ready. A rank that takes the place of a lost one meets its group first."""
        self._introduce = introduce
        if self.settings.socket is None:
            self._ready(joins=False)
            self._hear(Quorum(ALONE, (self.member,), ("",), True, "", "alone", True))
            return
        if self.world.idle:
            # It listens first, for its group may lose another rank while it waits for this one. What it is told then
            # comes after this.
            self._on_order(Regroup(self.member, int(os.environ["MASTER_PORT"])))
            self._control = self._listen(self.settings.socket)
            self._control.send(Present(self.member, self.world.rank))
            self.rejoin()
            return
        report = self._ready(joins=False)
        self._control = self._listen(self.settings.socket)
        self._control.send(report if self.world.rank == 0 else Present(self.member, self.world.rank))

    def _listen(self, path: Path) -> Control:
        return Control(path, self.page, self._on_order, self.settings.where, self.world.collectives)

    def _ready(self, joins: bool, looks: bool = False) -> Ready:
        address = self.gather(b"" if self._store is None else self._store.address.encode())[0].decode()
        report = replace(self._introduce(address, joins, looks), looked=self._looked)
        recheck = Recheck(self.settings.recheck, self.settings.seed) if self.settings.recheck else None
        self.stepper = Stepper(report, self.settings.policy, self.settings.groups, recheck)
        return report

    # --- news, on the control thread and on helper threads ---------------------------------------------------

    def _on_order(self, order: Order) -> None:
        if self._closed:
            return  # the script is on its way out: what it leaves behind is the others' business
        match order:
            case Publish():
                self._hear(order.quorum)
            case Refuse():
                self._fail(UsageError(f"{self.settings.where}: refused: {order.reason}"))
            case Stop():
                if order.reason:
                    self._fail(JobLostError(order.reason))
                else:
                    self._stop = True
            case Drain():
                self.stays = False  # the planned quorum without this member follows
            case Regroup():
                self._lose_a_rank(order)
            case Resume():
                self._told = order.run
            case Stay():
                self._waits = self._waits or order.lost
                self.stays = order.rank != self.world.rank if not order.lost else self.stays
            case _:
                pass  # for the agent, not for a rank
        self.bell.ring()

    def _hear(self, quorum: Quorum) -> None:
        if not self._news.hear(quorum):
            return
        if quorum.urgent:
            # Now, and not when the training thread takes up the news: it may be waiting for its device, which a kernel
            # keeps busy that waits for a peer, and only the end of that kernel's life ends it.
            self.communicators.drop_before(quorum.id)
        heard = time.time()
        if self.member in quorum.members:
            # Not later, when the stepper asks for it: the training thread may be deep in a shard.
            self._form(quorum)
        self.bell.ring()  # before anything is written: file systems may be slow
        self.journal.note(quorum.id, "heard", heard, urgent=quorum.urgent)

    def _lose_a_rank(self, order: Regroup) -> None:
        """Whatever waits for the group's other ranks, or for other groups, ends now."""
        with self._lock:
            self._regroup = order
            self._told = NO_QUORUM
            self._news.forget_quorums()
        self.communicators.rename(order.member)
        self.world.cut()
        if not self.world.idle:
            where = self.settings.where
            text = f"{where}: a collective that lost a rank of the group with its connections does not end"
            still = functools.partial(self._has_not_seen, order)
            end_if_asleep(threading.main_thread(), still, self._shard_seconds, text, self._waits_for_ranks)

    def _waits_for_ranks(self) -> bool:
        """If it waits: in the other phases user code may wait for anything."""
        return self._phase not in (Phase.APPLYING, Phase.LOADING)

    def _has_not_seen(self, order: Regroup) -> bool:
        return self._regroup is order and not self._closed

    def _on_formed(self, id: QuorumId, error: str | None) -> None:
        if self._closed:
            return
        now = time.time()
        if error is None:
            self._news.formed(id)
        else:
            self._news.broken(id, error)
        self.bell.ring()
        self.journal.note(id, "formed", now) if error is None else self.journal.note(id, "broken", now, why=error)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self.bell.ring()

    def _form(self, quorum: Quorum) -> None:
        try:
            self.communicators.form(quorum)
        except CommunicatorError as error:
            self.broken(quorum.id, str(error))

    # --- rounds: what was heard becomes the stepper's --------------------------------------------------------

    def agree(self, note: Note) -> Note:
        """Have a round and take in what the group agrees on. The same on every rank of the group.

        ``note`` says how the work since the last round went. If it went wrong at one rank the whole group has done
        with the quorum in force.
        """
        with self._lock:
            mine = replace(self._news.told(note, self.stepper.knows), stop=self._stop, run=self._told)
        target = self.stepper.target
        try:
            outcome = agreed(self.world.round(mine))
        except RuntimeError as error:
            self.lost(error)
        self._take_in(outcome)
        self._run = outcome.run
        self._shard_seconds = outcome.seconds or self._shard_seconds
        if not outcome.ok and target is not None:
            self._do(self.stepper.broken(target.id, "what its group did under it failed at one of its ranks"))
        return outcome

    def ready_for(self) -> QuorumId:
        """The newest planned quorum, if this rank could switch to it, else NO_QUORUM. For its control word: that all
        ranks of the group say the same is seen in the round after the exchange."""
        return self._news.ready_for(self.stepper)

    def _take_in(self, outcome: Note) -> None:
        taken, formed, broken = self._news.take(outcome)
        self.stepper.advertised(outcome.named)
        for quorum in taken:
            self._do(self.stepper.hear(quorum))
            self.stepper.advertised(outcome.named)
        for id in formed:
            self._do(self.stepper.formed(id))
        for id, text in broken:
            self._do(self.stepper.broken(id, text))
        if outcome.stop:
            self.stepper.stop()
        self._news.drop_old(outcome.heard, self.stepper.knows)

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload."""
        try:
            return self.world.gather(payload)
        except RuntimeError as error:
            self.lost(error)

    def lost(self, error: Exception) -> NoReturn:
        """Another rank of this group is gone, and the group with it, unless another process takes its place."""
        gone = PlanariaError(
            f"{self.settings.where}: another rank of the group is gone ({error}). If it left the loop by itself: take "
            "such decisions alike on all ranks, from step.metrics"
        )
        if self._control is not None:
            # The agent knows why and ends this rank too, or an order that says why is on its way to it; but nobody ends
            # it if the other one left in order.
            self._await_word()
        if self._failure is None and self.bereaved:
            raise Bereaved from error
        raise self._failure or gone

    @property
    def bereaved(self) -> bool:
        """Whether a rank of the group is lost and is to be replaced."""
        return self._regroup is not None

    def guard(self) -> None:
        """The script keeps what the loss of a rank raises from ending this process."""
        if self.page is not None and self.world.renewable:
            self.page.guarded = True

    def await_regroup(self) -> bool:
        """Whether a rank of the group is lost and is to be replaced. After an error that this would explain: the agent
        hears of a death when the others do, and its order needs a moment."""
        if self._control is None or not self.world.renewable:
            return False
        self._await_word()
        return self.bereaved

    def _await_word(self) -> None:
        """Of the agent, about a rank that is gone."""
        self.bell.wait_for(lambda: self.bereaved or self._failure is not None or self._waits, LAST_WORD_SECONDS)
        self.bell.wait(lambda: self.bereaved or self._failure is not None or not self._waits, lambda: False)

    def await_move(self) -> bool:
        """The group is left out until the rank that moves has left it, and another process is there. False if all of
        it is to leave."""
        self.show(Phase.PARKED)
        self.bell.wait(lambda: self.bereaved or self._failure is not None or not self.stays, lambda: False)
        if self._failure is not None:
            raise self._failure
        return self.bereaved

    def rejoin(self) -> None:
        """Meet the ranks of the group again, one of which is new, and ask to be taken in as its next incarnation. If
        all are there, but nobody has the state any more: look for one to go back to, and ask to begin with that."""
        self.show(Phase.FORMING)
        while True:
            with self._lock:
                order, self._regroup = self._regroup, None
            try:
                if order is not None:
                    self.member, self.stays, self._waits = order.member, False, False
                    self._run = self._looked = NO_QUORUM
                    name = str(order.member)
                    self.world.renew(order.port, name, self.bell, lambda: self.bereaved or bool(self._failure))
                else:
                    self.communicators.rename(self.member)
                    self._looked = self._run
                report = self._ready(joins=True, looks=order is None)
            except Bereaved:
                continue
            except CommunicatorError as error:
                try:
                    self.lost(error)
                except Bereaved:
                    continue
            if self.page is not None:
                self.page.quorum = NO_QUORUM
            if self._control is not None and self.world.rank == 0:
                self._control.send(report)
            return

    def _do(self, effects: Sequence[core.Effect]) -> None:
        for effect in effects:
            match effect:
                case core.Form():
                    if effect.quorum.id >= self._news.urgent:
                        self._form(effect.quorum)  # nothing new, as a rule: see _hear
                case core.Drop():
                    self.communicators.drop(effect.quorum)
                case core.Tell():
                    if self.page is not None and isinstance(effect.report, Adopted):
                        self.page.quorum = effect.report.quorum
                        self.page.resumed(effect.report.step)
                    if self._control is not None and self.world.rank == 0:  # it speaks for the group
                        self._control.send(effect.report)

    # --- the training thread ---------------------------------------------------------------------------------

    def advance(self, transfer: Transfer) -> core.Action:
        """Wait, call the roll and heal until there is work, or the end. ``transfer`` moves the state or raises
        CommunicatorError. Raises what the lighthouse refused or stopped this member for, and Bereaved."""
        while True:
            if self._failure is not None:
                raise self._failure
            if self.bereaved or self._run > self._looked:
                raise Bereaved
            action = self.stepper.next()
            match action:
                case core.Wait():
                    self.show(Phase.PARKED if action.parked else Phase.FORMING)
                    self.bell.wait(self._has_news, lambda: False)
                    if self._failure is None and not self.bereaved:
                        self.agree(Note())
                        if self._has_news():  # which other ranks have not heard yet: do not ask in a busy loop
                            time.sleep(SKEW_SECONDS)
                case core.RollCall():
                    self.show(Phase.FORMING)
                    self._roll(action)
                case core.Heal():
                    self.show(Phase.HEALING)
                    self._heal(action, transfer)
                case _:
                    self._await_devices()
                    return action

    def _await_devices(self) -> None:
        """What comes now are collectives within the group."""
        try:
            self.world.await_devices(lambda: self.bereaved or self._failure is not None)
        except CommunicatorError as error:
            self.lost(error)

    def _has_news(self) -> bool:
        """Whether this rank knows of something that the stepper does not."""
        news = self._news or self._failure or self._regroup
        return bool(news) or self._stop != self.stepper.stopping or self._told > self._looked

    def _roll(self, action: core.RollCall) -> None:
        standings: list[Standing] = []
        mine = self.checks.signed(action.standing)
        history = 0
        if self.follower is not None:
            mine, history = self.follower.told(mine), HISTORY

        def ask(payload: bytes) -> list[bytes]:
            pending = self.communicator(action.quorum).gather(payload)
            return pending.wait(lambda: self.stopped_waiting(action.quorum))

        def roll() -> None:
            entries = ask(encode_standing(mine, self.settings.shards, history))
            standings.extend(decode_standing(entry, self.settings.shards) for entry in entries)
            self.checks.look(standings, ask)

        if self.agree(Note(ok=self.attempt(action.quorum, "roll call", roll))).ok:
            self.checks.conclude(self.stepper.step)
            before = self.stepper.given
            self._do(self.stepper.rolled(action.quorum, standings))
            more = sorted(self.stepper.given - before) if before else []
            self.journal.note(action.quorum, "rolled", step=self.stepper.step, taken_over=more)

    def _heal(self, action: core.Heal, transfer: Transfer) -> None:
        put: list[Callable[[], bool]] = []

        def heal() -> None:
            put.append(transfer(action, self.communicator(action.quorum)))

        if self.agree(Note(ok=self.attempt(action.quorum, "healing", heal))).ok:
            good = put[0]()
            self.agree(Note())  # the group has healed when all its ranks have
            self._do(self.stepper.healed(action.quorum) if good else self.stepper.spoilt(action.quorum))
            self.journal.note(action.quorum, "healed", step=action.step, received=action.receive, good=good)

    def attempt(self, id: QuorumId, what: str, work: Callable[[], None]) -> bool:
        """Do something that needs the communicator of quorum ``id``. False if news or a failure ended it."""
        try:
            work()
        except Interrupted:
            if self._failure is not None:
                raise self._failure from None
            return False
        except CommunicatorError as error:
            self.broken(id, f"{what}: {error}")
            return False
        return True

    def communicator(self, id: QuorumId) -> Communicator:
        """The formed communicator of a quorum. Raises CommunicatorError if it was dropped meanwhile."""
        found = self.communicators.get(id)
        if found is None:
            raise CommunicatorError(f"the communicator of quorum {id} is gone")
        return found

    def stopped_waiting(self, id: QuorumId) -> bool:
        """Whether news has ended what goes on under quorum ``id``. Reads single fields: no lock needed."""
        if self._failure is not None or self.bereaved or self._told > self._looked:
            return True
        return self._news.ends(id, self.stepper.joining)

    def broken(self, id: QuorumId, text: str) -> None:
        """The communicator of ``id`` failed here."""
        self._news.broken(id, text)
        self.bell.ring()

    def tell(self, report: Report) -> None:
        """Have the agent, and through it the lighthouse, know something. On any thread."""
        if self._control is not None:
            self._control.send(report)

    def say_why(self, order: core.Heal, rank: int) -> None:
        """Have it known if this group, ``rank`` of the quorum, heals because its state was found to be damaged."""
        if (found := self.checks.found.pop(rank, None)) is not None and self.world.rank == 0:
            text = f"its state is not that of the others ({found.text})"
            self.tell(Corrupted(self.member, order.step, text, found.rank))

    def change(self, step: Callable[[Stepper], Sequence[core.Effect]]) -> None:
        self._do(step(self.stepper))

    def show(self, phase: Phase, shard: int = -1) -> None:
        self._phase = phase
        if self.page is not None:
            self.page.set_phase(phase, shard)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        before = self._phase
        self.show(phase)
        yield
        self.show(before)

    def close(self) -> None:
        """Give the communicators up. The control thread stays: it ends the process if the agent dies."""
        self._closed = True
        self.communicators.close()
