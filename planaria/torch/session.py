"""A rank's membership: its stepper, its communicators, and the news for both.

Three kinds of threads meet here. The control thread brings orders, helper threads of ``exchange`` report
communicators that stand or failed, and the training thread asks what to do. One lock guards the stepper; one bell
wakes the training thread. Whoever holds the lock never waits for anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from planaria.core import stepper as core
from planaria.core.messages import (
    Adopted,
    Drain,
    Order,
    Phase,
    Publish,
    Quorum,
    QuorumId,
    Ready,
    Refuse,
    Standing,
    Stop,
)
from planaria.core.stepper import Stepper
from planaria.errors import CommunicatorError, JobLostError, UsageError
from planaria.exchange.communicator import Communicator, Communicators
from planaria.exchange.rendezvous import RendezvousStore
from planaria.exchange.waiting import Bell, Interrupted
from planaria.torch.control import Control
from planaria.torch.records import decode_standing, encode_standing
from planaria.torch.settings import Settings
from planaria.wire.page import ProgressPage

ALONE = QuorumId(1, 1)


class Session:
    """Made when the script starts its steps. ``transfer`` moves the protected state (see Worker)."""

    def __init__(self, settings: Settings, page: ProgressPage | None) -> None:
        self.settings = settings
        self.page = page
        self.bell = Bell()
        self.communicators = Communicators(settings.member, settings.host, self.bell, self._on_formed)
        self.stepper: Stepper  # set by start
        self.lock = threading.Lock()
        self._news = 0  # rises with everything that may end a wait
        self._failure: Exception | None = None
        self._closed = False
        self._control: Control | None = None
        self._store = None if self.alone else RendezvousStore(settings.host)

    @property
    def alone(self) -> bool:
        return self.settings.socket is None

    def start(self, ready: Callable[[str], Ready]) -> None:
        """Say that this member is ready; ``ready`` is given the address of its rendezvous store."""
        report = ready("" if self._store is None else self._store.address)
        self.stepper = Stepper(report, self.settings.policy, self.settings.groups)
        if self.settings.socket is None:
            member = self.settings.member
            self._told(lambda: self.stepper.hear(Quorum(ALONE, (member,), ("",), True, "", "alone", True)))
            return
        self._control = Control(self.settings.socket, self.page, self._on_order, self.settings.where)
        self._control.send(report)

    # --- news, on the control thread and on helper threads ---------------------------------------------------

    def _on_order(self, order: Order) -> None:
        if self._closed:
            return  # the script is on its way out: what it leaves behind is the others' business
        match order:
            case Publish():
                self._told(lambda: self.stepper.hear(order.quorum))
            case Refuse():
                self._fail(UsageError(f"{self.settings.where}: refused: {order.reason}"))
            case Stop():
                if order.reason:
                    self._fail(JobLostError(order.reason))
                else:
                    self.stepper.stop()
                    self._ring()
            case Drain():
                pass  # the planned quorum without this member follows
            case _:
                pass  # for the agent, not for a rank

    def _on_formed(self, id: QuorumId, error: str | None) -> None:
        if self._closed:
            return
        if error is None:
            self._told(lambda: self.stepper.formed(id))
        else:
            self._told(lambda: self.stepper.broken(id, error))

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._ring()

    def _told(self, change: Callable[[], Sequence[core.Effect]]) -> None:
        """Change the stepper's state and carry out what follows, in order, under the lock."""
        with self.lock:
            for effect in change():
                self._carry_out(effect)
        self._ring()

    def _carry_out(self, effect: core.Effect) -> None:
        match effect:
            case core.Form():
                self._form(effect.quorum)
            case core.Drop():
                self.communicators.drop(effect.quorum)
            case core.Tell():
                if self.page is not None and isinstance(effect.report, Adopted):
                    self.page.quorum = effect.report.quorum
                    self.page.resumed(effect.report.step)
                if self._control is not None:
                    self._control.send(effect.report)

    def _form(self, quorum: Quorum) -> None:
        try:
            self.communicators.form(quorum)
        except CommunicatorError as error:
            for effect in self.stepper.broken(quorum.id, str(error)):
                self._carry_out(effect)

    def _ring(self) -> None:
        self._news += 1
        self.bell.ring()

    # --- the training thread ---------------------------------------------------------------------------------

    def advance(self, heal: Callable[[core.Heal, Communicator], None]) -> core.Action:
        """Wait, call the roll and heal until there is work, or the end. ``heal`` moves the state or raises
        CommunicatorError. Raises what the lighthouse refused or stopped this member for."""
        while True:
            seen = self._news
            if self._failure is not None:
                raise self._failure
            with self.lock:
                action = self.stepper.next()
            match action:
                case core.Wait():
                    self.show(Phase.PARKED if action.parked else Phase.FORMING)
                    self.bell.wait(lambda seen=seen: self._news != seen, lambda: False)  # type: ignore[misc]
                case core.RollCall():
                    self.show(Phase.FORMING)
                    self._roll(action)
                case core.Heal():
                    self.show(Phase.HEALING)
                    self._heal(action, heal)
                case _:
                    return action

    def _roll(self, action: core.RollCall) -> None:
        try:
            communicator = self.communicator(action.quorum)
            pending = communicator.gather(encode_standing(action.standing, self.settings.shards))
            entries = pending.wait(lambda: self.stopped_waiting(action.quorum))
        except Interrupted:
            return
        except CommunicatorError as error:
            self.broken(action.quorum, f"roll call: {error}")
            return
        standings: list[Standing] = [decode_standing(entry, self.settings.shards)[0] for entry in entries]
        self._told(lambda: self.stepper.rolled(action.quorum, standings))

    def _heal(self, action: core.Heal, heal: Callable[[core.Heal, Communicator], None]) -> None:
        try:
            heal(action, self.communicator(action.quorum))
        except Interrupted:
            return
        except CommunicatorError as error:
            self.broken(action.quorum, f"healing: {error}")
            return
        self._told(lambda: self.stepper.healed(action.quorum))

    def communicator(self, id: QuorumId) -> Communicator:
        """The formed communicator of a quorum. Raises CommunicatorError if it was dropped meanwhile."""
        found = self.communicators.get(id)
        if found is None:
            raise CommunicatorError(f"the communicator of quorum {id} is gone")
        return found

    def stopped_waiting(self, id: QuorumId) -> bool:
        """Whether news has ended what goes on under quorum ``id``. Reads single fields: no lock needed."""
        return self._failure is not None or self.stepper.interrupted(id)

    def broken(self, id: QuorumId, text: str) -> None:
        self._told(lambda: self.stepper.broken(id, text))

    def shard_done(self, shard: int) -> None:
        with self.lock:
            self.stepper.shard_done(shard)

    def work(self) -> core.Exchange:
        with self.lock:
            return self.stepper.work()

    def change(self, step: Callable[[Stepper], Sequence[core.Effect]]) -> None:
        self._told(lambda: step(self.stepper))

    def show(self, phase: Phase, shard: int = -1) -> None:
        if self.page is not None:
            self.page.set_phase(phase, shard)

    def close(self) -> None:
        """Give the communicators up. The control thread stays: it ends the process if the agent dies."""
        with self.lock:
            self._closed = True
        self.communicators.close()
