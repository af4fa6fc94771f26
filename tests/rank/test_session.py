from __future__ import annotations

from dataclasses import replace

import torch

from planaria.core.messages import Quorum, QuorumId, Ready
from planaria.errors import CommunicatorError
from planaria.jax.world import SoleWorld
from planaria.rank.session import ALONE, Session
from planaria.rank.settings import read_settings


class Nothing:
    device = torch.device("cpu")

    def checked(self, whole: bool) -> dict[str, torch.Tensor]:
        return {}


def test_an_urgent_quorum_ends_the_exchange_under_way_while_the_training_thread_is_busy() -> None:
    """It may be waiting for its device, which a kernel keeps busy that waits for the peer that was lost."""
    session = Session(read_settings(None, 0, None, None, {}), SoleWorld(), None, Nothing())
    session.start(lambda address, joins, looks: Ready(session.member, address, (), "start", 1, 10))
    session.bell.wait(lambda: session.communicators.get(ALONE) is not None, lambda: False)
    life = session.communicator(ALONE)
    exchange = life.pending("an exchange")
    planned = Quorum(QuorumId(ALONE.epoch, ALONE.number + 1), (session.member,), ("",), False, "")
    session._hear(planned)
    assert life.error is None, "nobody need do without it yet"
    session._hear(replace(planned, id=QuorumId(ALONE.epoch, ALONE.number + 2), urgent=True))
    assert isinstance(life.error, CommunicatorError) and exchange.done
    session.close()
