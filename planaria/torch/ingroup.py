"""The connections among the ranks of a group, beneath torch's process groups.

Meshes, FSDP2 and DTensors hold on to torch's ProcessGroup; what moves bytes is a backend inside it, one for each kind
of device. When a rank is lost the others keep their process groups and get new backends. Nothing above notices, and a
healthy collective costs what it always cost, for nothing lies in between.

A process that takes the place of a lost rank builds its process groups *idle*: every collective succeeds and does
nothing, for its peers are not there yet. Then all ranks ``renew`` theirs, in the order in which the script made them.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store

from planaria.errors import CommunicatorError, PlanariaError
from planaria.exchange.rendezvous import NEVER, RendezvousStore, gloo_group, reach
from planaria.exchange.sockets import TABLE, Lines
from planaria.exchange.waiting import Bell, Pending
from planaria.torch.letting_go import let_go

HOST = "planaria"  # torch's names of the backends: gloo, over connections that can be cut
IDLE = "planaria_idle"

# torch keeps the backends of a process group by a number for their kind, and never replaces one that it still has. Its
# own kinds have small numbers, and a number has eight bits: where torch does not let go of them, the group must be
# started as a whole after so many lives.
_FIRST_KIND, _KINDS = 64, 256
_FULL = 0.75  # of the files that a process may have open; scripts need some, too
_LOOK = 0.01  # seconds between looks at a device
_THREADS = 2  # torch's own number for gloo: FSDP2 gathers and reduces at a time


class InGroup:
    """All connections of this process to the other ranks of its group. Thread-safe, but for ``renew``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """There are no process groups."""
        self._lines: list[Lines] = []  # of the present life, one for each process group
        self.uncounted: list[Any] = []  # process groups whose collectives are not the training thread's
        self._device_groups: list[Any] = []  # NCCL's, made here: perhaps not in their place yet
        self._cut = False
        self._timeouts: dict[tuple[tuple[int, ...], int], timedelta] = {}
        self._count: Counter[tuple[int, ...]] = Counter()
        self._kept = 0  # lives whose backends torch still has
        self._device_kept: list[Any] = []  # NCCL's of earlier lives: whether one may end after its abort is not known
        self._store: object | None = None
        self._life = 0
        self._devices: Pending[None] | None = None  # of this life; None: torch has connected them, or will

    # --- torch makes a process group ---------------------------------------------------------------------------

    def create(self, options: Any, _: object) -> Any:
        """torch's hook: a backend for the host."""
        ranks = self._note(options)
        names = [f"rank {rank} of its group" for rank in ranks]
        return self._host_group(options.store, options.group_rank, names, options.timeout)

    def create_idle(self, options: Any, _: object) -> Any:
        self._note(options)
        return c10d.FakeProcessGroup._create_internal(options.group_rank, options.group_size)

    def _note(self, options: Any) -> tuple[int, ...]:
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self._timeouts[ranks, self._count[ranks]] = options.timeout
        self._count[ranks] += 1
        return ranks

    def _host_group(self, store: Store, rank: int, names: list[str], timeout: timedelta) -> Any:
        lines = self._new_lines()
        group = gloo_group(store, rank, names, _host(), timeout, lines, threads=_THREADS)
        group._set_default_timeout(timeout)
        return group

    def _new_lines(self) -> Lines:
        lines = Lines()
        with self._lock:
            self._lines.append(lines)
            over = self._cut
        if over:
            lines.cut()
        return lines

    def collectives(self) -> int:
        """How many this process has begun with its peers since they were connected; 0 if its backends do not count.
        Any thread."""
        with self._lock, suppress(RuntimeError):  # no backend is put in place meanwhile
            counted = [group for group, _, _ in _groups() if not any(group is each for each in self.uncounted)]
            groups = [(group, device) for group in counted for device in group._device_types]
            return sum(int(group._get_backend(device)._get_sequence_number_for_group()) for group, device in groups)
        return 0

    # --- a rank is lost ------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """End all connections: what waits for a peer raises, here and at the peers. Any thread, never blocks."""
        with self._lock:
            already, self._cut = self._cut, True
            lines = list(self._lines)
        for each in lines:
            each.cut()
        if not already and dist.is_initialized():
            # Kernels that wait for a peer end by this alone. It takes up to a second, and nobody waits for it; nor does
            # one abort for another, for kernels of several groups may wait for each other.
            found = [backend for group, _, _ in _groups() for backend in _backends(group, "cuda")]
            for backend in {id(each): each for each in (*found, *self._device_groups)}.values():
                threading.Thread(target=_abort, args=(backend,), name="planaria-abort", daemon=True).start()
            self._device_groups.clear()

    def renew(self, port: int, name: str, device: torch.device, bell: Bell, cancelled: Callable[[], bool]) -> None:
        """Connect this process's groups to those of the other ranks, who do the same under the same ``name``. They meet
        at ``port`` of MASTER_ADDR, which rank 0 serves. What connected them before has ended then. ``device``: of this
        rank. Returns when the hosts are connected; ``await_devices`` tells when the devices are.

        Raises Interrupted as soon as ``cancelled`` (whose change must ring the bell), CommunicatorError if it fails.
        """
        self.cut()
        hosts: Pending[None] = Pending(bell, f"connecting the ranks of {name}")
        devices: Pending[None] = Pending(bell, f"connecting the devices of {name}")
        with self._lock:
            self._lines.clear()
            self._cut = False
            self._life += 1
            life, self._devices = self._life, devices

        def work() -> None:
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)  # every thread has its own
                self._renew(port, name, device, cancelled, life, hosts)
                devices.succeed(None)
            except PlanariaError as error:
                failed(error)
            except Exception as error:  # somebody waits to be told
                failed(CommunicatorError(f"the ranks of {name} could not be connected: {error}"))

        def failed(error: PlanariaError) -> None:
            hosts.fail(error)
            devices.fail(error)

        threading.Thread(target=work, name="planaria-regroup", daemon=True).start()
        try:
            hosts.wait(cancelled)
        except BaseException:
            self.cut()  # ends what the thread waits for
            raise

    def await_devices(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Wait until the devices are connected again; any thread. Raises as ``renew`` does. The wait ends without
        ``cancelled``, too, when the connections are cut."""
        if (devices := self._devices) is not None:
            devices.wait(cancelled)

    def _renew(
        self,
        port: int,
        name: str,
        device: torch.device,
        cancelled: Callable[[], bool],
        life: int,
        hosts: Pending[None],
    ) -> None:
        kind = _FIRST_KIND + 2 * self._let_go()
        # What torch keeps, keeps its files.
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if kind + 2 > _KINDS or len(os.listdir(TABLE)) > most * _FULL:
            raise PlanariaError(f"the ranks of {name} have lost too many of their number; the group is started again")
        rank = dist.get_rank()
        if rank == 0:
            self._store = RendezvousStore(os.environ["MASTER_ADDR"], port)
        store = reach(f"{os.environ['MASTER_ADDR']}:{port}", self._new_lines(), cancelled)
        found = []
        for group, ranks, number in _groups():
            names = [f"rank {each} of {name}" for each in ranks]
            prefix = PrefixStore(f"{name}/{','.join(map(str, ranks))}/{number}", store)
            timeout = self._timeouts.get((ranks, number), NEVER)
            host = self._host_group(prefix, ranks.index(rank), names, timeout)
            self._put(group, torch.device("cpu"), kind, host, life)
            found.append((group, ranks, PrefixStore("cuda", prefix), timeout))
        hosts.succeed(None)  # devices take longer; the group can meet the others of the job meanwhile
        for group, ranks, prefix, timeout in found:
            for kind_of_device in _devices(group, "cuda"):
                nccl = self._device_group(prefix, device, ranks, timeout, group.group_name)
                self._put(group, kind_of_device, kind + 1, nccl, life)

    def _put(self, group: Any, device: torch.device, kind: int, backend: Any, life: int) -> None:
        with self._lock:
            if life != self._life or self._cut:
                raise CommunicatorError("no longer wanted")
            number = c10d.ProcessGroup.BackendType(kind)
            group._register_backend(device, number, backend)
            if device.type == "cpu":
                group._set_default_backend(number)

    def _let_go(self) -> int:
        """Drop what connected the process groups before. The number of lives whose backends torch still has."""
        old: list[Any] = []
        released = True
        with self._lock:
            for group, _, _ in _groups():
                old += _backends(group, "cpu")
                self._device_kept += _backends(group, "cuda")
                released &= let_go(group)
            self._kept += not released
        # Gloo's destructor waits for what is in its hands: nobody waits for it.
        threading.Thread(target=old.clear, name="planaria-let-go", daemon=True).start()
        return self._kept

    def _device_group(
        self, store: Store, device: torch.device, ranks: tuple[int, ...], timeout: timedelta, name: str
    ) -> Any:
        """As torch makes it, but connected at once: here the wait for others can be left behind, in the first
        collective it could not."""
        options: Any = c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.global_ranks_in_group = list(ranks)
        options.group_name = name
        made = c10d.ProcessGroupNCCL(store, ranks.index(dist.get_rank()), len(ranks), options)
        with self._lock:
            self._device_groups.append(made)
            over = self._cut
        if over:
            raise CommunicatorError("no longer wanted")
        made.eager_connect_single_device(device)
        self._greet(made, len(ranks), device)
        return made

    def _greet(self, made: Any, size: int, device: torch.device) -> None:
        """One collective of each kind: NCCL connects the ranks in earnest when it is first used, and then the first
        step, for which other groups wait, took 0.2 s longer (2 H200, NCCL 2.28.9)."""
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            one = torch.zeros(1, device=device)
            each = [torch.zeros_like(one) for _ in range(size)]
            for work in (made.allreduce([one]), made.allgather([each], [one]), made.reduce_scatter([one], [each])):
                work.wait()
            done = stream.record_event()
        while not done.query():  # ends with the abort at the latest
            time.sleep(_LOOK)
        if self._cut:
            raise CommunicatorError("no longer wanted")


def _groups() -> Iterator[tuple[Any, tuple[int, ...], int]]:
    """torch's process groups that this rank is in, in the order in which they were made: (group, its ranks, how many of
    the same ranks were made before)."""
    world, count = dist.distributed_c10d._world, Counter[tuple[int, ...]]()
    for group in list(world.pg_map):
        ranks = tuple(world.pg_group_ranks[group])
        yield group, ranks, count[ranks]
        count[ranks] += 1


def _devices(group: Any, kind: str) -> list[torch.device]:
    return [device for device in group._device_types if device.type == kind]


def _backends(group: Any, kind: str) -> list[Any]:
    """None where they were let go of and a try to replace them has failed."""
    with suppress(RuntimeError):
        return [group._get_backend(device) for device in _devices(group, kind)]
    return []


def _abort(backend: Any) -> None:
    with suppress(RuntimeError, AttributeError):  # an idle one has nothing to abort
        backend.abort()


def _host() -> str:
    return os.environ.get("PLANARIA_HOST") or "127.0.0.1"


def registered() -> InGroup:
    """This process's, made known to torch. There is one, as there is one torch world."""
    global _instance
    if _instance is None:
        _instance = made = InGroup()
        dist.Backend.register_backend(HOST, made.create, extended_api=True, devices=["cpu"])
        dist.Backend.register_backend(IDLE, made.create_idle, extended_api=True, devices=["cpu", "cuda"])
    return _instance


def forget() -> None:
    """This process is another rank from now on, and has no process groups."""
    if _instance is not None:
        _instance.reset()


_instance: InGroup | None = None
