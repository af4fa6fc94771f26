"""The device half of a life: NCCL for bulk data, two streams, and memory that outlives lives.

The gloo half carries what is small and decides when a life is over: its sockets end at once, everywhere. This half is
never waited for by anybody but the life's own thread. That thread waits by asking, so that it hears of the end of the
life, and takes NCCL down itself as its last act, while the next life forms in a thread of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from planaria.errors import PlanariaError
from planaria.exchange.nccl import UNIQUE_ID_BYTES, Nccl, unique_id

CPU = torch.device("cpu")

# Between two looks at an event: short beside a step, and long enough to leave the interpreter to the training thread.
# NCCL is asked for broken connections once in so many looks.
PAUSE, LOOKS = 5e-5, 64
LAST_PAUSE = 1e-3  # seconds; nobody waits for the end of a life


class DeviceLink:
    """Of one life, for its thread. ``ended`` says why the life is over, None while it is not.

    ``wire`` is the stream of all NCCL operations, which must be in the same order on all members. ``work`` is for
    kernels on what has arrived. Nobody else's stream may ever wait for these two: a kernel of NCCL that is aborted ends
    as if it had finished, with anything in its results.
    """

    def __init__(
        self, device: torch.device, rank: int, peers: list[int], ended: Callable[[], PlanariaError | None]
    ) -> None:
        self.device = device
        self.rank, self.size = rank, len(peers) + 1
        self._peers = peers
        # First of all when blocks of a kernel of the caller have finished: peers wait for what these streams do.
        self.wire = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.work = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.nccl = Nccl(ended)
        self._ended = ended

    def form(self, gather: Callable[[bytes], list[bytes]]) -> None:
        """Connect to all peers. ``gather`` hands all members' bytes to all."""
        mine = unique_id() if self.rank == 0 else bytes(UNIQUE_ID_BYTES)
        self.nccl.form(gather(mine)[0], self.rank, self.size)
        # Connections are made when they are first used. That is now, when nobody waits for it yet.
        with torch.cuda.stream(self.wire):
            sent, received = torch.zeros(1, device=self.device), torch.empty(self.size, device=self.device)
        with self.nccl.group():
            for peer in self._peers:
                self.nccl.send(sent, peer, self.wire)
                self.nccl.receive(received[peer], peer, self.wire)
        self.wait(self.wire.record_event())

    def wait(self, event: torch.cuda.Event) -> None:
        """Until everything before ``event`` is known to be done, and was not aborted. Raises the end of the life."""
        looks = 0
        while not event.query():
            looks += 1
            if looks % LOOKS == 0:
                self.nccl.check()
            elif (error := self._ended()) is not None:
                raise error
            time.sleep(PAUSE)
        # An abort follows the end of the life. So what is done before that is seen was done by the members.
        if (error := self._ended()) is not None:
            raise error

    def end(self) -> None:
        """Abort. Returns when no kernel of this life runs any more, so that its memory can be used for others."""
        self.nccl.abort()
        while not (self.wire.query() and self.work.query()):
            time.sleep(LAST_PAUSE)


class Shelf:
    """Device memory of a rank, for all its lives.

    Only what no kernel uses any more may be freed or put back: then whoever gets it next, for whichever stream, need
    not wait for anything. The caching allocator knows nothing of that, so it is asked in the name of a stream of which
    nobody else has memory, and on which nothing ever runs. Any thread.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._results: list[Tensor] | None = None

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        with torch.cuda.stream(self._stream):
            return torch.empty(numel, dtype=dtype, device=self.device)

    def take_results(self, numels: tuple[int, ...]) -> list[Tensor]:
        """Flat fp32 tensors, one of each size; their contents are arbitrary. The same as last time if possible.

        Lives hand them on to each other, so that a rank holds one set of them: they are taken for a round and put back
        when it is over, or when a life that failed runs no kernel any more, which is before the next one is formed.
        """
        with self._lock:
            results, self._results = self._results, None
        if results is not None and tuple(each.numel() for each in results) == numels:
            return results
        return [self.empty(numel) for numel in numels]

    def put_results(self, results: list[Tensor]) -> None:
        with self._lock:
            self._results = results
