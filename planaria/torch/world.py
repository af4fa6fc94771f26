"""The ranks of this group: their torch world, its device mesh, and their rounds.

Inside a group everything is ordinary torch.distributed: a default process group, a DeviceMesh, FSDP2, TP, PP as usual.
Other groups are never part of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from planaria.errors import UsageError
from planaria.exchange.waiting import Bell
from planaria.rank.rounds import Note, notes_of, payloads_of
from planaria.torch import ingroup

# A round waits for the slowest rank of the group, which may be parked for hours. It ends with the group at the latest:
# if a rank is lost, the agent ends the others.
_NEVER = timedelta(days=365)
# Ranks along these dimensions of the mesh work on the same samples; along any other, each has its part of a batch.
SAME_SAMPLES = frozenset({"tp", "pp", "cp"})


def choose_device(wanted: str | None, local_rank: int, where: str) -> torch.device:
    """The device of this rank: ``wanted`` ("cpu" or "cuda"), else a GPU if there are any.

    Makes a GPU the current device. Raises UsageError if it is not there.
    """
    if wanted not in (None, "", "cpu", "cuda"):
        raise UsageError(f"{where}: unknown device {wanted!r}; known devices: cpu, cuda")
    if wanted == "cpu" or (not wanted and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UsageError(
            f"{where}: rank {local_rank} of this node has no GPU of its own, there are {count}; start fewer ranks, or "
            "say --device cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


class GroupWorld:
    """``rank`` of ``size`` in this group. ``shape`` names the dimensions of the mesh, in order; None: one, "fsdp".

    ``idle``: this process takes the place of a rank that was lost; its peers are met by the first ``renew``.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        shape: Mapping[str, int] | None,
        where: str,
        idle: bool = False,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.idle = idle
        self.renewable = False  # whether lost ranks can be replaced under the others
        self._links = ingroup.registered()
        self.shape = _complete(shape or {"fsdp": size}, size, where)
        self._mesh: DeviceMesh | None = None
        self._rounds: dist.ProcessGroup | None = None
        if size > 1:
            self._join(where)
            self._rounds = self.side_group(counted=True)

    @property
    def mesh(self) -> DeviceMesh:
        """Made when it is first asked for: a script without parallelism needs no torch world."""
        if self._mesh is None:
            if not dist.is_initialized():
                dist.init_process_group(self._backend(), store=HashStore(), rank=0, world_size=1)
            kind, names = self.device.type, tuple(self.shape)
            self._mesh = init_device_mesh(kind, tuple(self.shape.values()), mesh_dim_names=names)
        return self._mesh

    @property
    def part(self) -> tuple[int, int]:
        """(index, count): which part of every batch this rank takes."""
        return part_of(self.rank, self.shape)

    @property
    def layout(self) -> str:
        """In words, for the fingerprint: the layout inside a group changes bits."""
        return ",".join(f"{name}={length}" for name, length in self.shape.items() if length > 1) or "1"

    def side_group(self, counted: bool = False) -> dist.ProcessGroup | None:
        """The ranks of the group once more, for collectives on another thread; None for one rank. All ranks make it
        together. ``counted``: see ``collectives``; what goes on beside the training says nothing of it."""
        if self.size == 1:
            return None
        kind = ingroup.IDLE if self.idle else ingroup.HOST
        made: dist.ProcessGroup = dist.new_group(backend=f"cpu:{kind}", timeout=_NEVER)
        if not counted:
            self._links.uncounted.append(made)
        return made

    def cut(self) -> None:
        """End all connections to the other ranks of the group, one of which is lost. Any thread, never blocks."""
        self._links.cut()

    def renew(self, port: int, name: str, bell: Bell, cancelled: Callable[[], bool]) -> None:
        """Connect to the ranks of the group again, among which is a new one. See ``InGroup.renew``: collectives on
        devices must wait for ``await_devices``."""
        self._links.renew(port, name, self.device, bell, cancelled)
        self.idle = False

    def await_devices(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Wait for what ``renew`` has left to do. Any thread. Raises Interrupted or CommunicatorError."""
        self._links.await_devices(cancelled)

    def collectives(self) -> int:
        """How many this rank has begun with the others of its group, all of which begin the same ones in the same
        order; 0 if they do not. Any thread."""
        alike = self._rounds is not None and not self.idle and self.shape.get("pp", 1) == 1
        return self._links.collectives() if alike else 0

    def round(self, note: Note) -> list[Note]:
        """Everybody's note, by rank. Raises RuntimeError if a rank of the group is lost."""
        return [note] if self._rounds is None else notes_of(self._gather, note)

    def gather(self, payload: bytes) -> list[bytes]:
        """Everybody's payload, by rank; lengths may differ. Raises RuntimeError if a rank of the group is lost."""
        return [payload] if self._rounds is None else payloads_of(self._gather, payload)

    def _backend(self) -> str:
        # The CPU part is for rounds and whatever is on the host.
        host, device = (ingroup.IDLE, ingroup.IDLE) if self.idle else (ingroup.HOST, "nccl")
        return f"cpu:{host}" + (f",cuda:{device}" if self.device.type == "cuda" else "")

    def _gather(self, payload: bytes, size: int) -> Sequence[bytes]:
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        everybody = [torch.empty(size, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
        dist.all_gather(everybody, mine, group=self._rounds)
        return [_bytes(each) for each in everybody]

    def _join(self, where: str) -> None:
        if not dist.is_initialized():
            # From the environment, as torchrun's scripts have it: MASTER_ADDR and MASTER_PORT.
            store = HashStore() if self.idle else None
            # Or a watchdog of torch's ends this process when a peer is lost. That somebody hangs is seen by the agent.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            dist.init_process_group(self._backend(), store=store, rank=self.rank, world_size=self.size)
            self.renewable = True
        if (dist.get_rank(), dist.get_world_size()) != (self.rank, self.size):
            raise UsageError(
                f"{where}: the script's process group has rank {dist.get_rank()} of {dist.get_world_size()}, but this "
                f"is rank {self.rank} of {self.size} of its group; call init_process_group() without numbers"
            )


def part_of(rank: int, shape: Mapping[str, int]) -> tuple[int, int]:
    """(index, count): which part of every batch ``rank`` takes in a mesh of that shape, the last dimension of which
    runs fastest."""
    index, count, inner = 0, 1, math.prod(shape.values())
    for name, length in shape.items():
        inner //= length
        if name not in SAME_SAMPLES:
            index, count = index * length + rank // inner % length, count * length
    return index, count


def _complete(shape: Mapping[str, int], size: int, where: str) -> dict[str, int]:
    """The shape with its one -1 filled in. Raises UsageError if it does not fit ``size`` ranks."""
    said = ", ".join(f"{name}={length}" for name, length in shape.items())
    open_ends = [name for name, length in shape.items() if length == -1]
    rest = math.prod(length for length in shape.values() if length != -1)
    good = all(isinstance(length, int) and (length > 0 or length == -1) for length in shape.values())
    if good and len(open_ends) == 1 and rest and size % rest == 0:
        return {name: size // rest if length == -1 else length for name, length in shape.items()}
    if not good or open_ends or rest != size:
        raise UsageError(
            f"{where}: the mesh ({said}) does not fit the {size} rank{'s' * (size > 1)} of a group: its lengths must "
            "multiply to that number (one of them may be -1, for what is left); change it, or --nproc-per-group"
        )
    return dict(shape)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def local_rank() -> int:
    """This rank's number on its node, as torchrun and ``planaria run`` say it."""
    return int(os.environ.get("LOCAL_RANK") or 0)
