"""NCCL (RCCL has the same functions and numbers): the few calls that an exchange needs, on the library that torch has.

torch's own ProcessGroupNCCL is made for groups that live as long as their process. Each of them starts a watchdog
thread that ends the process or throws into it when a peer is lost, unless variables of the environment say otherwise,
which would change the user's own groups as well; and whoever has begun to form a group waits for it. A communicator
that is replaced whenever a peer dies needs the opposite: forming that can be abandoned, an abort that waits for nothing
else, no thread but that of its life. So NCCL is called directly.

Its blocking mode is used. The other one can be aborted while it forms, but starts a thread for every launch: that takes
0.12 ms instead of 0.02 (H200, NCCL 2.28.9), as long as 25 MB take from one GPU to another.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from planaria.errors import CommunicatorError, PlanariaError, afresh
from planaria.exchange.rendezvous import reason

# Of nccl.h; they are part of its stable interface.
SUCCESS, IN_PROGRESS = 0, 7
UINT8, FLOAT32, SUM, MEAN = 1, 7, 0, 4
UNIQUE_ID_BYTES = 128

PAUSE = 1e-3  # seconds between two looks at what has been heard while a communicator forms, which takes 40 of them

# The library by itself, also as wheels rename it, or what it is linked into.
FILES = re.compile(r"lib(nccl|rccl)(-[0-9a-f]+)?\.so.*|libtorch_(cuda|hip)\.so")


class UniqueId(ctypes.Structure):
    """By value, as ncclCommInitRank wants it."""

    _fields_ = (("raw", ctypes.c_byte * UNIQUE_ID_BYTES),)


@functools.cache
def library() -> ctypes.CDLL:
    """The NCCL or RCCL with which torch was loaded. Raises CommunicatorError if there is none."""
    with open("/proc/self/maps") as maps:
        mapped = {Path(line.split(" ", 5)[-1].strip()) for line in maps if ".so" in line}
    for path in sorted(path for path in mapped if FILES.fullmatch(path.name)):
        with contextlib.suppress(OSError, AttributeError):
            found = ctypes.CDLL(str(path))
            _declare(found)
            return found
    raise CommunicatorError(f"torch {torch.__version__} comes without NCCL or RCCL, which GPUs exchange through")


def _declare(found: ctypes.CDLL) -> None:
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name, *arguments in (
        ("ncclGetVersion", pointer),
        ("ncclGetUniqueId", pointer),
        ("ncclCommInitRank", pointer, number, UniqueId, number),
        ("ncclCommGetAsyncError", pointer, pointer),
        ("ncclCommAbort", pointer),
        ("ncclGroupStart",),
        ("ncclGroupEnd",),
        ("ncclSend", pointer, size, number, number, pointer, pointer),
        ("ncclRecv", pointer, size, number, number, pointer, pointer),
        ("ncclAllReduce", pointer, pointer, size, number, number, pointer, pointer),
    ):
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, number
    found.ncclGetErrorString.argtypes, found.ncclGetErrorString.restype = (number,), ctypes.c_char_p
    found.ncclGetLastError.argtypes, found.ncclGetLastError.restype = (pointer,), ctypes.c_char_p


def version() -> str:
    """Of the library: "2.28.9"."""
    found = ctypes.c_int()
    library().ncclGetVersion(ctypes.byref(found))
    return f"{found.value // 10000}.{found.value // 100 % 100}.{found.value % 100}"


def unique_id() -> bytes:
    """What the first member makes and all members need in order to form."""
    made = UniqueId()
    _check(library().ncclGetUniqueId(ctypes.byref(made)))
    return bytes(made)


def _check(code: int) -> None:
    if code not in (SUCCESS, IN_PROGRESS):
        text = library().ncclGetErrorString(code).decode()
        last = library().ncclGetLastError(None).decode().strip()
        raise CommunicatorError(f"NCCL: {text} ({last})" if last else f"NCCL: {text}")


class Nccl:
    """One NCCL communicator, for one thread, whose current device must be that of the communicator.

    No call waits for a peer, but for the first use of a connection. ``ended`` says why the life is over, None while it
    is not. Failures of NCCL raise CommunicatorError; then only ``abort`` may be called.
    """

    def __init__(
        self, device: torch.device, ended: Callable[[], PlanariaError | None], handle: ctypes.c_void_p | None = None
    ) -> None:
        self._device = device
        self._ended = ended
        self._library = library()
        self._handle = handle or ctypes.c_void_p()

    def form(self, unique: bytes, rank: int, size: int, first: Callable[[Nccl], None]) -> None:
        """Connect to the other members, all of which must call this. Raises the end of the life if that comes first.

        ``first`` makes the first use of the connections, when they are really made. It gets a communicator that lasts
        as long as it runs, and runs in another thread.
        """
        formation = _Formation(self._device, unique, rank, size, first)
        while not formation.over.wait(PAUSE):
            if (error := self._ended()) is not None:
                formation.abandon()
                raise error
        self._handle = formation.taken()

    @contextmanager
    def group(self) -> Iterator[None]:
        """All calls inside become one launch, and none of them waits for another."""
        _check(self._library.ncclGroupStart())
        code = SUCCESS
        try:
            yield
        finally:
            code = self._library.ncclGroupEnd()  # also after an exception: a group that is open belongs to the thread
        _check(code)

    # --- inside a group: flat, contiguous tensors of the device ----------------------------------------------

    def send(self, tensor: Tensor, peer: int, stream: torch.cuda.Stream) -> None:
        place, size = tensor.data_ptr(), tensor.nbytes
        _check(self._library.ncclSend(place, size, UINT8, peer, self._handle, stream.cuda_stream))

    def receive(self, tensor: Tensor, peer: int, stream: torch.cuda.Stream) -> None:
        """``tensor`` has the size of what the peer sends."""
        place, size = tensor.data_ptr(), tensor.nbytes
        _check(self._library.ncclRecv(place, size, UINT8, peer, self._handle, stream.cuda_stream))

    def all_reduce(self, source: Tensor, result: Tensor, stream: torch.cuda.Stream, mean: bool = False) -> None:
        """``result`` = the sum, or the mean, of all members' ``source`` (fp32; may be the same tensor)."""
        places, numel, how = (source.data_ptr(), result.data_ptr()), source.numel(), MEAN if mean else SUM
        _check(self._library.ncclAllReduce(*places, numel, FLOAT32, how, self._handle, stream.cuda_stream))

    # --- at any time ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what has gone wrong since: the end of the life, or a broken connection that NCCL has noticed."""
        if (error := self._ended()) is not None:
            raise error
        if self._handle:  # there is none before it is formed, and none without peers
            state = ctypes.c_int()
            _check(self._library.ncclCommGetAsyncError(self._handle, ctypes.byref(state)))
            _check(state.value)

    def abort(self) -> None:
        """End everything that is under way, kernels too, and free the communicator. Blocks, as a rule for 0.5 s."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            self._library.ncclCommAbort(handle)


class _Formation:
    """A communicator being formed in a thread of its own, because nothing can end these calls but the other members.

    They end as soon as one of them is lost with which it has connected: the connection closes, it gives up and closes
    its own, and so on. One that vanishes within the first milliseconds, or with its machine, may keep it waiting for
    ever. Then nobody waits with it, and the thread goes when the process does.
    """

    def __init__(
        self, device: torch.device, unique: bytes, rank: int, size: int, first: Callable[[Nccl], None]
    ) -> None:
        self.over = threading.Event()
        self._device = device
        self._handle = ctypes.c_void_p()
        self._error: PlanariaError | None = None
        self._lock = threading.Lock()
        self._abandoned = False
        arguments = unique, rank, size, first
        threading.Thread(target=self._run, args=arguments, name="planaria-nccl", daemon=True).start()

    def taken(self) -> ctypes.c_void_p:
        """Once it is over: the communicator. Raises what was the matter if there is none."""
        if self._error is not None:
            raise afresh(self._error)
        return self._handle

    def abandon(self) -> None:
        """Nobody will take it."""
        with self._lock:
            self._abandoned = True
            over = self.over.is_set()
        if over:
            self._free()

    def _run(self, unique: bytes, rank: int, size: int, first: Callable[[Nccl], None]) -> None:
        try:
            torch.cuda.set_device(self._device)
            identity = UniqueId.from_buffer_copy(unique)
            _check(library().ncclCommInitRank(ctypes.byref(self._handle), size, identity, rank))
            first(Nccl(self._device, lambda: None, self._handle))
        except PlanariaError as error:
            self._error = afresh(error)
        except Exception as error:  # of CUDA: whoever waits for this must hear of it
            self._error = CommunicatorError(f"forming a communicator of {size} members failed: {reason(error)}")
        with self._lock:
            self.over.set()
            free = self._abandoned or self._error is not None
        if free:
            self._free()

    def _free(self) -> None:
        if self._handle:
            library().ncclCommAbort(self._handle)
