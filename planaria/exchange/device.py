"""The device half of a life: NCCL for bulk data, two streams, and memory that outlives lives.

The gloo half carries what is small and decides when a life is over: its sockets end at once, everywhere. This half is
never waited for by anybody but the life's own thread. That thread waits by asking, so that it hears of the end of the
life, and takes NCCL down itself as its last act, while the next life forms in a thread of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from planaria.errors import CommunicatorError, PlanariaError
from planaria.exchange.checksum import LANE, ROW, Checksum
from planaria.exchange.codes import BLOCK, CODECS, Coded, Coder, coded_bytes
from planaria.exchange.folding import Divisor, fold_on_device
from planaria.exchange.nccl import UNIQUE_ID_BYTES, Nccl, unique_id

CPU = torch.device("cpu")

# Between two looks at an event: leaves the interpreter to others. If it is a matter of a millisecond, so many looks
# come first without a pause (a look too lets others in). NCCL is asked for broken connections once in so many looks.
PAUSE, SPINS, LOOKS = 5e-5, 2000, 64
LAST_PAUSE = 1e-3  # seconds; nobody waits for the end of a life


class DeviceLink:
    """Of one life, for its thread, which makes it. ``ended`` says why the life is over, None while it is not.

    ``wire`` is the stream of all NCCL operations, which must be in the same order on all members. ``work`` is for
    kernels on what has arrived, and the current stream of the thread. Nobody else's stream may ever wait for these
    two: a kernel of NCCL that is aborted ends as if it had finished, with anything in its results.
    """

    def __init__(
        self, device: torch.device, rank: int, peers: list[int], ended: Callable[[], PlanariaError | None]
    ) -> None:
        self.device = device
        self.rank, self.size = rank, len(peers) + 1
        self._peers = peers
        # When blocks of a kernel have finished, those of NCCL are first in turn, for peers wait for them; then these
        # kernels, for peers will; then those of the caller. Were the first two equal, NCCL would wait for each of them.
        self.wire = torch.cuda.Stream(device, priority=-3)  # type: ignore[no-untyped-call]
        self.work = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self.work)
        self.nccl = Nccl(device, ended)
        self._ended = ended

    def form(self, gather: Callable[[bytes], list[bytes]], assemble: Callable[[], object]) -> None:
        """Connect to all peers. ``gather`` hands all members' bytes to all. ``assemble`` is called when the peers' NCCL
        has been met, and returns when all have called it."""
        mine = unique_id() if self.rank == 0 else bytes(UNIQUE_ID_BYTES)
        unique = gather(mine)[0]
        words = torch.zeros(self.size + 1, dtype=torch.float32, device=self.device)  # for all and from each
        self.wait(self.work.record_event())

        def greet(nccl: Nccl) -> None:
            assemble()
            with nccl.group():
                for peer in self._peers or [self.rank]:
                    nccl.send(words[-1], peer, self.wire)
                    nccl.receive(words[peer], peer, self.wire)

        self.nccl.form(unique, self.rank, self.size, greet)
        self.wait(self.wire.record_event())

    def wait(self, event: torch.cuda.Event, beside: bool = False, soon: bool = False) -> None:
        """Until everything before ``event`` is known to be done, and was not aborted. Raises the end of the life.

        ``beside``: in another thread than the life's, which must not talk to NCCL. ``soon``: it is a matter of a
        millisecond, and somebody waits."""
        looks = 0
        while not event.query():  # type: ignore[no-untyped-call]
            looks += 1
            if looks % LOOKS == 0 and not beside:
                self.nccl.check()
            elif (error := self._ended()) is not None:
                raise error
            if not soon or looks > SPINS:
                time.sleep(PAUSE)
        # An abort follows the end of the life. So what is done before that is seen was done by the members.
        if (error := self._ended()) is not None:
            raise error

    def end(self) -> None:
        """Abort. Returns when no kernel of this life runs any more, so that its memory can be used for others."""
        self.nccl.abort()
        while not (self.wire.query() and self.work.query()):
            time.sleep(LAST_PAUSE)


_loaded: set[torch.device] = set()
_warmed: set[torch.device] = set()
_loading = threading.Lock()


def load_kernels(device: torch.device) -> None:
    """Have this process load the kernels that exchanging and healing use, once: a kernel that is loaded when it is
    first used may wait for what the device does, which may wait for a peer."""
    with _loading:
        if device in _loaded:
            return
        sizes = ((3, 999), (999,), (2,))
        some, out, probes = (torch.zeros(size, dtype=torch.float32, device=device) for size in sizes)
        for number in (2, 3):
            divisor = Divisor(number, device)
            fold_on_device(list(some), ((1, 2), (0, 1)), divisor, out, (), lambda _: torch.empty_like(out), probes[0])
        out.add_(some[0]).zero_().copy_(some[1])
        probes[1] = probes.isfinite().all()
        probes.tolist()
        for codec in CODECS:
            numel = 5 * BLOCK // 2
            coder, source = Coder(codec, device, chunk=BLOCK), torch.zeros(numel, dtype=torch.float32, device=device)
            wire = torch.empty(coded_bytes(numel), dtype=torch.uint8, device=device)
            coder.encode(source, Coded.within(wire, numel, codec), 0, 0)
            coder.decode(Coded.within(wire, numel, codec), source)
            torch.sub(source, source, out=source)
        sums = torch.zeros(2, dtype=torch.int64, device=device)
        block = torch.zeros((ROW + 1) * LANE, dtype=torch.uint8, device=device)
        sums[0] = Checksum(block.numel(), device).of(block)
        torch.equal(sums[:1], sums[1:])
        _loaded.add(device)


def warm_up(device: torch.device) -> None:
    """Have this process load what NCCL loads for its first communicator, which takes longer than forming one: by
    making one without peers, beside whatever the caller does meanwhile. It lasts about a second and then ends; a
    process that ends earlier waits for it, for a driver that is unloaded under a thread takes the process with it."""
    with _loading:
        known = device in _warmed
        _warmed.add(device)
    if device.type != "cpu" and not known:
        threading.Thread(target=_warm_up, args=(device,), name="planaria-warm-up", daemon=False).start()


def _warm_up(device: torch.device) -> None:
    torch.cuda.set_device(device)
    with contextlib.suppress(CommunicatorError):  # the first life will fail by it too, and tell
        link = DeviceLink(device, 0, [], lambda: None)
        try:
            load_kernels(device)
            link.form(lambda mine: [mine], lambda: None)
        finally:
            link.end()


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
