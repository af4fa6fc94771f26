"""What moves the buckets of a round: common to hosts and devices."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from planaria.errors import ProtocolError
from planaria.exchange.communicator import Communicator, Transfer, as_bytes, as_tensor
from planaria.exchange.exchange_plan import Piece, Plan, Round, cut
from planaria.exchange.layout import Layout

TAIL = struct.Struct("<?I")  # is my share of the results finite, as far as is known; length of the payload

# Message tags of a round: two for comparing plans, one for the tails; an engine may draw more.
TAIL_TAG, CONTROL_TAGS = 2, 3


class Engine(ABC):
    """The exchanges of one communicator life, as far as they are its thread's work."""

    def __init__(self, communicator: Communicator, layout: Layout, piece_bytes: int, grain: int | None = None) -> None:
        self._communicator = communicator
        self._layout = layout
        self._pieces: list[Piece] = cut(layout, piece_bytes, grain)
        self._agreed: bytes | None = None  # digest of the plan that all members are known to share

    def mark(self) -> torch.cuda.Event | None:
        """The training thread: what it has given to its device so far."""
        return None

    def tag_count(self, plan: Plan) -> int:
        """How many message tags a round takes."""
        return CONTROL_TAGS

    def may_give_up(self, step: Round) -> bool:
        """Whether the life can go on with another round though this one was not finished. Its tags are used up here and
        not at the peers, and messages of NCCL have none: nothing of the next one would meet what it should."""
        return self._communicator.size == 1

    @abstractmethod
    def advance(self, step: Round) -> None:
        """Something was submitted: do what can be done, up to settling the round."""

    def _all_submitted(self, step: Round) -> bool:
        return step.tail is not None and len(step.submitted) == len(self._layout.buckets)

    def _can_launch(self, step: Round) -> bool:
        return step.launched < len(self._pieces) and self._pieces[step.launched].bucket in step.submitted

    def _agree(self, step: Round) -> None:
        """Compare plans when they change: a message of unexpected size would end the process inside gloo."""
        if step.agreed:
            return
        step.agreed = True
        digest = step.plan.digest
        if self._agreed != digest:
            digests = self._communicator.gather_now(digest, step.first_tag)
            if set(digests) != {digest}:
                odd = [str(self._communicator.member(r)) for r, theirs in enumerate(digests) if theirs != digest]
                raise ProtocolError(
                    f"{', '.join(odd)} and {self._communicator.member(self._communicator.rank)} do not agree on what "
                    f"to exchange in quorum {self._communicator.quorum_id}: do they train the same model?"
                )
            self._agreed = digest

    def _send_tails(self, step: Round, finite: bool) -> tuple[list[Tensor], list[Transfer]]:
        """Begin to exchange the tails: where all members' will be, in rank order, once the transfers are done."""
        assert step.tail is not None
        tag, what = step.first_tag + TAIL_TAG, "exchanging control words"
        tail = TAIL.pack(finite, len(step.tail)) + step.tail
        mine = as_tensor(tail.ljust(TAIL.size + step.plan.tail_bytes, b"\0"))
        rank, size, peers = self._communicator.rank, self._communicator.size, self._communicator.peers
        tails = [mine if peer == rank else torch.empty_like(mine) for peer in range(size)]
        transfers = [self._communicator.receive(tails[peer], peer, tag, what) for peer in peers]
        transfers += [self._communicator.send(mine, peer, tag, what) for peer in peers]
        return tails, transfers


def read_tails(tails: list[Tensor]) -> tuple[list[bytes], bool]:
    """All members' payloads, and whether all their shares are finite."""
    finite, payloads = True, []
    for raw in map(as_bytes, tails):
        theirs, length = TAIL.unpack_from(raw)
        finite &= theirs
        payloads.append(raw[TAIL.size : TAIL.size + length])
    return payloads, finite
