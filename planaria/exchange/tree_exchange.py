"""The gradient exchange: sums of subtrees in, the same mean with the same bits out on every member.

Every member owns an equal share of each bucket. It receives from each peer that peer's subtree sums of the
share, adds them up with the brackets of the job's tree, divides, and sends the result to all. That is a
reduce-scatter and an all-gather, as in a ring all-reduce, with the same traffic, but with an order of
additions that does not depend on who computed what.

``fast`` adds a member's own nodes up first and then the members' sums: one message per peer and piece however many
nodes there are, on a device the vendor's all-reduce. Same samples, but the brackets depend on who computed what.

``int8`` and ``fp8`` are ``tree`` with parts and results that travel in eight bits a number (codes.py). The parts are
those of single shards, for sums of decoded parts would not fit into eight bits and codes of sums would depend on who
computed what. So the bits are the same whoever did, as they are with ``tree``; and a member of many shards sends more.

All work is done by the communicator's thread: see host_engine and device_engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from planaria.core.messages import CODED
from planaria.core.tree import Node
from planaria.errors import CommunicatorError, ProtocolError
from planaria.exchange.coded_device_engine import CodedDeviceEngine
from planaria.exchange.coded_host_engine import CodedHostEngine
from planaria.exchange.codes import Coded, Coder, coded_bytes
from planaria.exchange.communicator import Communicator
from planaria.exchange.device_engine import DEVICE_PIECE_BYTES, DeviceEngine
from planaria.exchange.engine import Engine
from planaria.exchange.exchange_plan import Announcement, ExchangeResult, Plan, Round, make_plan
from planaria.exchange.host_engine import HostEngine
from planaria.exchange.layout import Layout

__all__ = ["Announcement", "ExchangeResult", "TreeExchange", "decoded"]

# Large pieces cost the fewest messages, each of which wakes threads on both sides: on two loaded cores pieces of 4, 8,
# 16 and 25 MB took 1.27, 1.18, 1.14 and 1.12 times as long as a plain all-reduce of 120 MB (bench/exchange.py).
PIECE_BYTES = 25 << 20
WINDOW = 2  # pieces under way at a time: one travels while one is folded; more take more memory and no less time


def decoded(outcome: Tensor, numel: int, reduction: str) -> Tensor:
    """The result of a bucket of ``numel`` numbers, the same bits (fp32), from what ``TreeExchange.outcome`` gave.
    Raises ProtocolError if that is of another form."""
    dtype, length = (torch.uint8, coded_bytes(numel)) if reduction in CODED else (torch.float32, numel)
    if outcome.dtype != dtype or outcome.shape != (length,):
        raise ProtocolError(f"a result of {numel} numbers is {outcome.dtype} {tuple(outcome.shape)}")
    if reduction not in CODED:
        return outcome
    out = torch.empty(numel, dtype=torch.float32, device="cpu")
    Coder(reduction, out.device).decode(Coded.within(outcome, numel, reduction), out)
    return out


class TreeExchange:
    """The exchanges of one communicator life, one step after the other, on the communicator's device.

    Methods are for one thread. Raises ValueError where the caller breaks the order begin, submit..., submit_tail,
    [announced,] finish; failures of the communicator are raised by the last two only. ``window`` is for the host's
    memory.
    """

    def __init__(
        self, communicator: Communicator, layout: Layout, piece_bytes: int | None = None, window: int = WINDOW
    ) -> None:
        self._communicator = communicator
        self._layout = layout
        self._round: Round | None = None
        self._terms: object = None  # the arguments of ``begin`` of which ``_plan`` was made
        self._plan: Plan | None = None
        self._window = window
        self._piece_bytes = piece_bytes or (PIECE_BYTES if communicator.link is None else DEVICE_PIECE_BYTES)
        self._coding: str | None = None  # the codec of the engine
        self._engine = self._make_engine()

    @property
    def rank(self) -> int:
        """Of this member in the communicator."""
        return self._communicator.rank

    def begin(
        self,
        nodes_by_rank: Sequence[Sequence[Node]],
        shards: int,
        divisor: int,
        reduction: str = "tree",
        tail_bytes: int = 1024,
        noise: int = 0,
    ) -> None:
        """Start a step's exchange. All arguments must be equal on all members; they are compared when they
        change, but for ``noise``.

        ``nodes_by_rank``: the subtrees whose sums each rank will submit, ascending; for a coded reduction single
        shards. ``tail_bytes``: the most that any member will submit as its tail. ``noise``: of a coded reduction, a key
        that no other exchange of the job has, as ``noise.key_of(seed, step)``; the same exchange that is done once more
        has the same.
        """
        given_up, self._round = self._round, None  # of an earlier step
        if given_up is not None and not self._engine.may_give_up(given_up):
            self._communicator.fail(CommunicatorError("an exchange was given up that the others may have begun"))
        terms = (tuple(map(tuple, nodes_by_rank)), shards, divisor, reduction, tail_bytes)
        if self._terms != terms:
            if len(nodes_by_rank) != self._communicator.size:
                raise ValueError(f"nodes of {len(nodes_by_rank)} members in a group of {self._communicator.size}")
            self._plan = make_plan(self._communicator.rank, self._layout.buckets, self._piece_bytes, *terms)
            self._terms = terms
        plan = self._plan
        assert plan is not None
        coding = reduction if reduction in CODED else None
        if coding != self._coding:
            self._coding = coding
            self._engine = self._make_engine()
        first_tag = self._communicator.tags(self._engine.tag_count(plan))
        announced, pending = (self._communicator.pending("exchanging gradients") for _ in range(2))
        self._round = Round(plan, first_tag, announced, pending, self._engine.mark(), noise)

    def check(self, nodes: Sequence[Node]) -> None:
        """Raises ProtocolError if the sums of ``nodes`` are not those that this member is to submit in the round that
        was begun. Those of other shards would travel just as well, and nothing would show it."""
        agreed = self._current().plan.own_nodes
        if tuple(nodes) != agreed:
            here = f"{self._communicator.member(self._communicator.rank)}, quorum {self._communicator.quorum_id}"
            raise ProtocolError(f"{here}: it has the sums of {[*nodes]}, but the members agreed on {[*agreed]}")

    def submit(self, bucket: int, parts: Sequence[Tensor]) -> None:
        """This member's sums of one bucket: one flat fp32 tensor per node, in the order of ``nodes_by_rank``.

        On a device they need not be computed yet: they are what the current stream will have made of them. They are
        read until ``finish`` returns, or until the life has ended, and never written. Never blocks.
        Buckets start to travel in the order of their index.
        """
        step = self._current()
        if not 0 <= bucket < len(self._layout.buckets) or bucket in step.submitted:
            raise ValueError(f"bucket {bucket} does not exist or was submitted before")
        if len(parts) != len(step.plan.own_nodes):
            nodes = len(step.plan.own_nodes)
            raise ValueError(f"bucket {bucket} has {len(parts)} sums, but this member has {nodes} nodes")
        numel, device = self._layout.buckets[bucket], self._communicator.device
        for part in parts:
            if part.dtype != torch.float32 or part.shape != (numel,) or not part.is_contiguous():
                raise ValueError(f"a sum of bucket {bucket} is not a flat, contiguous fp32 tensor of {numel} elements")
            if part.device != device:
                raise ValueError(f"a sum of bucket {bucket} is on {part.device}, but {device} exchanges")
        step.ready[bucket] = self._engine.mark()
        step.submitted[bucket] = tuple(part.detach() for part in parts)
        self._post(step)

    def submit_tail(self, payload: bytes) -> None:
        """This member's words to all others, delivered after all buckets. Never blocks."""
        step = self._current()
        if step.tail is not None:
            raise ValueError("the tail of this step was submitted before")
        if len(payload) > step.plan.tail_bytes:
            raise ValueError(f"the tail has {len(payload)} bytes, more than the {step.plan.tail_bytes} agreed on")
        step.tail = payload
        self._post(step)

    def announced(self, interrupted: Callable[[], bool] = lambda: False) -> Announcement:
        """Wait for what all members said. On a device that is well before the result, which may still fail to come.
        Raises as ``finish`` does.
        """
        return self._all_submitted("announced").announced.wait(interrupted)

    def finish(self, interrupted: Callable[[], bool] = lambda: False) -> ExchangeResult:
        """Wait for the result, on a device too: it is there, and no stream need wait for it. Raises Interrupted or
        CommunicatorError; then the life must be dropped, and what was submitted is as it was.
        """
        result = self._all_submitted("finish").pending.wait(interrupted)
        self._round = None
        return result

    def outcome(self) -> list[Tensor]:
        """What ``decoded`` makes the newest result of, one flat tensor for each bucket: copies. In main memory only;
        after ``finish`` and before the next ``begin``."""
        assert isinstance(self._engine, HostEngine)
        return self._engine.outcome()

    def _post(self, step: Round) -> None:
        engine = self._engine
        self._communicator.post(lambda: engine.advance(step))

    def _make_engine(self) -> Engine:
        terms = self._communicator, self._layout, self._piece_bytes
        if self._communicator.link is None:
            if self._coding is None:
                return HostEngine(*terms, self._window)
            return CodedHostEngine(*terms, self._window, self._coding)
        return DeviceEngine(*terms) if self._coding is None else CodedDeviceEngine(*terms, self._coding)

    def _all_submitted(self, what: str) -> Round:
        step = self._current()
        if step.tail is None or len(step.submitted) < len(self._layout.buckets):
            raise ValueError(f"{what} needs all buckets and the tail to be submitted")
        return step

    def _current(self) -> Round:
        if self._round is None:
            raise ValueError("no exchange has begun")
        return self._round
