"""NCCL (RCCL has the same functions and numbers): the few calls that an exchange needs, on the library that torch has.

torch's own ProcessGroupNCCL is made for groups that live as long as their process. Each of them starts a watchdog
thread that ends the process or throws into it when a peer is lost, unless variables of the environment say otherwise,
which would change the user's own groups as well; and a group that is being formed cannot be given up. A communicator
that is replaced whenever a peer dies needs the opposite: forming that can be abandoned, an abort that waits for
nothing else, no thread but that of its life. NCCL offers all that in its non-blocking mode, so it is called directly.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from planaria.errors import CommunicatorError, PlanariaError

# Of nccl.h; they are part of its stable interface.
SUCCESS, IN_PROGRESS = 0, 7
UINT8, FLOAT32, SUM = 1, 7, 0
UNIQUE_ID_BYTES = 128
CONFIG_MAGIC, CONFIG_VERSION = 0xCAFEBEEF, 21400

# A call that is in progress is looked at again so often without a pause, for launching takes some ten microseconds;
# then after pauses that double from the first to the last of these seconds: forming takes a few hundred milliseconds.
SPINS, FIRST_PAUSE, LAST_PAUSE = 100, 5e-5, 1e-3

# The library by itself, also as wheels rename it, or what it is linked into.
FILES = re.compile(r"lib(nccl|rccl)(-[0-9a-f]+)?\.so.*|libtorch_(cuda|hip)\.so")


class UniqueId(ctypes.Structure):
    """By value, as ncclCommInitRankConfig wants it."""

    _fields_ = (("raw", ctypes.c_byte * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.14. Newer ones know by ``version`` which fields are missing, and fill them in."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


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
        ("ncclCommInitRankConfig", pointer, number, UniqueId, number, pointer),
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
    code = library().ncclGetUniqueId(ctypes.byref(made))
    if code != SUCCESS:
        raise CommunicatorError(f"NCCL cannot listen for its members: {_sentence(code, None)}")
    return bytes(made)


def _sentence(code: int, handle: ctypes.c_void_p | None) -> str:
    text = library().ncclGetErrorString(code).decode()
    last = library().ncclGetLastError(handle).decode().strip()
    return f"{text} ({last})" if last else text


class Nccl:
    """One NCCL communicator, for one thread, whose current device must be that of the communicator.

    Non-blocking: no call waits for a peer. Those that take time are waited for here, and ``ended`` (why the life is
    over, None while it is not) is asked meanwhile: it is raised. Failures of NCCL raise CommunicatorError. Then only
    ``abort`` may be called.
    """

    def __init__(self, ended: Callable[[], PlanariaError | None]) -> None:
        self._ended = ended
        self._library = library()
        self._handle = ctypes.c_void_p()

    def form(self, unique: bytes, rank: int, size: int) -> None:
        """Connect to the other members, all of which must call this."""
        config = Config(ctypes.sizeof(Config), CONFIG_MAGIC, CONFIG_VERSION, 0)
        identity = UniqueId.from_buffer_copy(unique)
        place = ctypes.byref(self._handle)
        self._finish(self._library.ncclCommInitRankConfig(place, size, identity, rank, ctypes.byref(config)))

    @contextmanager
    def group(self) -> Iterator[None]:
        """All calls inside become one launch, and none of them waits for another."""
        self._check(self._library.ncclGroupStart())
        code = SUCCESS
        try:
            yield
        finally:
            code = self._library.ncclGroupEnd()  # also after an exception: a group that is open belongs to the thread
        self._finish(code)

    # --- inside a group: flat, contiguous tensors of the device ----------------------------------------------

    def send(self, tensor: Tensor, peer: int, stream: torch.cuda.Stream) -> None:
        place, size = tensor.data_ptr(), tensor.nbytes
        self._check(self._library.ncclSend(place, size, UINT8, peer, self._handle, stream.cuda_stream))

    def receive(self, tensor: Tensor, peer: int, stream: torch.cuda.Stream) -> None:
        """``tensor`` has the size of what the peer sends."""
        place, size = tensor.data_ptr(), tensor.nbytes
        self._check(self._library.ncclRecv(place, size, UINT8, peer, self._handle, stream.cuda_stream))

    def all_reduce(self, source: Tensor, result: Tensor, stream: torch.cuda.Stream) -> None:
        """``result`` = the sum of all members' ``source`` (fp32; may be the same tensor)."""
        places, numel = (source.data_ptr(), result.data_ptr()), source.numel()
        self._check(self._library.ncclAllReduce(*places, numel, FLOAT32, SUM, self._handle, stream.cuda_stream))

    # --- at any time ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what has gone wrong since: the end of the life, or a broken connection that NCCL has noticed."""
        self._finish(self._state())

    def abort(self) -> None:
        """End everything that is under way, kernels too, and free the communicator. Blocks, as a rule for 0.5 to 1 s;
        forming may be under way."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            self._library.ncclCommAbort(handle)

    def _state(self) -> int:
        state = ctypes.c_int()
        self._check(self._library.ncclCommGetAsyncError(self._handle, ctypes.byref(state)))
        return state.value

    def _finish(self, code: int) -> None:
        """Wait until the last call, which returned ``code``, is in progress no more."""
        looks, pause = 0, FIRST_PAUSE
        while True:
            if (error := self._ended()) is not None:
                raise error
            self._check(code)
            if code == SUCCESS:
                return
            looks += 1
            time.sleep(pause if looks > SPINS else 0)  # 0: lets other threads of Python have their turn
            if looks > SPINS:
                pause = min(2 * pause, LAST_PAUSE)
            code = self._state()

    def _check(self, code: int) -> None:
        if code not in (SUCCESS, IN_PROGRESS):
            raise CommunicatorError(f"NCCL: {_sentence(code, self._handle)}")
