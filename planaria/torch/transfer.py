"""The state of a group, on its way to members that heal: taken where it is, and put in place where it is not."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from planaria.core.actions import Heal
from planaria.core.messages import Phase
from planaria.exchange import healing
from planaria.exchange.communicator import Communicator
from planaria.rank.journal import Journal
from planaria.rank.session import Session
from planaria.torch.catching_up import CatchUp
from planaria.torch.state import ProtectedState, tensor_specs


class Transfer:
    """One per rank. ``journal``: of its commits."""

    def __init__(self, session: Session, state: ProtectedState, journal: Journal) -> None:
        self._journal = journal
        self.inside = False  # user code is in the loop's body
        self.healed: tuple[bytes, list[Tensor]] | None = None  # healed inside a body, which is void from then on
        self.phase = Phase.HEALING if state.registered is None else Phase.LOADING  # while state is taken or put
        self._session = session
        self._state = state
        self.catch_up: CatchUp | None = None  # low communication
        self.taken = 0  # states, from peers

    def __call__(self, order: Heal, communicator: Communicator) -> Callable[[], bool]:
        """Give the state to members that need it, or take it; returns what puts it in place, and tells whether it is
        what it was when the roll was called."""
        registered, sources = self._state.registered is not None, order.sources
        if registered:  # what a script's own functions make of equal states need not be equal byte for byte
            sources = sources[:1]
        catch_up = self.catch_up
        if not order.receive:
            self._journal.flush()  # who heals cannot write these lines, should this group be lost next
            if communicator.rank not in sources:
                return lambda: True
            with self._session.during(self.phase):
                if catch_up is not None and order.since is not None:
                    manifest, tensors = catch_up.lead(order.since, self.inside)
                else:
                    manifest, tensors = self._state.capture(marked=self.inside)
            healing.serve(communicator, tensors, manifest, sources, order.healers)
            return lambda: True
        self._session.say_why(order, communicator.rank)
        pending = healing.receive(communicator, sources, order.healers)
        healed = pending.wait(lambda: self._session.stopped_waiting(order.quorum))
        raw = zip(tensor_specs(healed.manifest), healed.tensors, strict=True)
        tensors = [data.view(spec.dtype).reshape(spec.wire_shape) for spec, data in raw]

        def put() -> bool:
            manifest, given = healed.manifest, tensors
            if catch_up is not None and order.since is not None:
                with self._session.during(self.phase):
                    found = catch_up.follow(order, manifest, given)
                if found is None:
                    return False
                manifest, given = found
            elif catch_up is not None:
                catch_up.lose()
            here = not (self.inside and registered)  # not beneath code of the script that will not go on anyway
            if here:
                with self._session.during(self.phase):
                    self._state.restore(manifest, given)
            if self.inside:
                self.healed = (manifest, given)
            self.taken += 1
            if catch_up is not None:
                catch_up.has(order)
                if order.since is None:
                    catch_up.took_all(order, given)
            return not here or self._session.checks.bears_out(order.checksum)

        return put
