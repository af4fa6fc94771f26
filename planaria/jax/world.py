"""The processes of a group: the JAX world that they are, and their rounds.

A group of several processes is an ordinary JAX world (``jax.distributed``): a mesh over the devices of all of them, and
programs that all of them enter, in the same order, or none. Such a program waits for every process of the group and
nothing can end it but the death of one, so whatever decides what is done next is agreed on between two programs, in a
*round* (see ``planaria.rank.rounds``), and a shard that was begun is computed to its end by all:

- An interrupt (another group is lost, a newer quorum) only ever ends waits outside of XLA: those for the exchange, for
  a roll call, for a healing. Whoever waits there has left the last program behind, as its siblings have, or will.
- What a process then knows and its siblings may not, it keeps to itself until the next round. There the group agrees on
  whether the exchange counts, which quorum is in force, and which shards are held. The stepper moves by what was agreed
  on, and by nothing else; so between two rounds all processes ask for the same shards, and run the same programs.
- The end of a process is the group's. A JAX world cannot outlive a member: the agent ends the others at once (it is the
  parent, so it knows first), and starts the group again, as another world at other ports. JAX's own watch over the
  processes is for those without an agent: its clocks are set so that they end nobody.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import torch
from jax._src import distributed  # nothing public waits for others with a limit, or keeps words for all
from jax._src.api import clean_up

from planaria.errors import UsageError
from planaria.exchange.rendezvous import NEVER, RendezvousStore, gloo_group, reach, split_address
from planaria.exchange.sockets import Lines
from planaria.exchange.waiting import Bell
from planaria.rank.rounds import Note, notes_of, payloads_of
from planaria.rank.session import LAST_WORD_SECONDS
from planaria.rank.settings import Settings

# For JAX, which wants a number of seconds: who hangs or is slow is judged by the agent, which sees its progress.
_NEVER = int(NEVER.total_seconds())


class SoleWorld:
    """The one process of a group, which may have several devices: those are XLA's business. Nothing to agree on, nobody
    to lose."""

    rank = 0
    size = 1
    idle = False
    renewable = False
    shape: Mapping[str, int] = MappingProxyType({})
    part = (0, 1)

    def round(self, note: Note) -> list[Note]:
        return [note]

    def gather(self, payload: bytes) -> list[bytes]:
        return [payload]

    def agree(self, key: str, trouble: str) -> str:
        """On any thread, beside rounds: what went wrong at one of the processes, if anything did; ``trouble`` is this
        one's own. All of them ask, with the same ``key``, and none twice with one."""
        return trouble

    def cut(self) -> None:
        """There are no connections to others."""

    def renew(self, port: int, name: str, bell: Bell, cancelled: Callable[[], bool]) -> None:
        raise RuntimeError("the processes of a JAX world cannot be replaced one by one")

    def await_devices(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Nothing is left to do."""

    def collectives(self) -> int:
        return 0

    def end(self) -> None:
        """The job has ended in order, for all processes of the group."""


class GroupWorld(SoleWorld):
    """One of several. Made before JAX makes an array: it joins the JAX world of the group. All processes of the group
    must come; the store where they meet is served by rank 0 at MASTER_PORT, which the agent has chosen for this life of
    the group and holds. ``gpu``: the number of this process's; None: it has the CPU.

    Raises UsageError if the process is in another JAX world, CommunicatorError if the others cannot be met.
    """

    def __init__(self, settings: Settings, gpu: int | None) -> None:
        if jax.distributed.is_initialized():
            raise UsageError(
                f"{settings.where}: jax.distributed.initialize() was called before pj.init(), which makes the JAX "
                "world of the group itself; leave it out"
            )
        self.rank, self.size = settings.rank, settings.world_size
        self._lines = Lines()
        master, port = split_address(f"{_setting('MASTER_ADDR', settings)}:{_setting('MASTER_PORT', settings)}")
        self._store = RendezvousStore(master, port) if self.rank == 0 else None
        store = reach(f"[{master}]:{port}" if ":" in master else f"{master}:{port}", self._lines)
        names = [f"rank {rank} of {settings.born}" for rank in range(self.size)]
        self._group = gloo_group(store, self.rank, names, settings.host, NEVER, self._lines)
        self._held = _hold_port(master) if self.rank == 0 else None
        mine = b"" if self._held is None else str(self._held.getsockname()[1]).encode()
        host = f"[{master}]" if ":" in master else master
        self._join(f"{host}:{self.gather(mine)[0].decode()}", gpu)
        self._over = False
        atexit.register(self._part)  # before what JAX does at the end

    def _join(self, address: str, gpu: int | None) -> None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            address,
            self.size,
            self.rank,
            local_device_ids=None if gpu is None else [gpu],
            cluster_detection_method="deactivate",  # the agent says who is who, whatever else runs here
            coordinator_bind_address=address,  # not on all of the machine's addresses
            heartbeat_timeout_seconds=_NEVER,
            shutdown_timeout_seconds=_NEVER,  # one may write the result while another is through
        )

    def round(self, note: Note) -> list[Note]:
        """Everybody's note, by rank. Raises RuntimeError if a process of the group is lost."""
        return notes_of(self._all_gather, note)

    def gather(self, payload: bytes) -> list[bytes]:
        """Everybody's payload, by rank; lengths may differ. Raises RuntimeError if a process of the group is lost."""
        return payloads_of(self._all_gather, payload)

    def agree(self, key: str, trouble: str) -> str:
        client: Any = distributed.global_state.client
        client.key_value_set(f"planaria/{key}/{self.rank}", f"!{trouble}")  # it takes nothing that is empty
        patience = 1000 * _NEVER  # the death of one ends the others
        said = [client.blocking_key_value_get(f"planaria/{key}/{rank}", patience)[1:] for rank in range(self.size)]
        # Who waited in vain for another knows least.
        return min(filter(None, said), key=lambda each: "DEADLINE_EXCEEDED" in each, default="")

    def cut(self) -> None:
        self._lines.cut()

    def end(self) -> None:
        self._over = True

    def _part(self) -> None:
        """At the end of the process. JAX waits then for that of all others: for ever, if this one has left the loop by
        itself, for they wait for it in a program. So it waits only if they come as well."""
        client: Any = distributed.global_state.client
        if self._over or client is None:
            return
        try:
            client.wait_at_barrier("the loop was left", round(1000 * LAST_WORD_SECONDS))
        except RuntimeError:
            atexit.unregister(clean_up)

    def _all_gather(self, payload: bytes, size: int) -> Sequence[bytes]:
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        everybody = [torch.empty(size, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
        self._group.allgather([everybody], [mine]).wait()
        return [each.numpy().tobytes() for each in everybody]


def _setting(name: str, settings: Settings) -> str:
    if not (value := os.environ.get(name)):
        raise UsageError(
            f"{settings.where}: {name} is not set, where the {settings.world_size} processes of the group meet; start "
            "them with `planaria run --nproc-per-group`"
        )
    return value


def _hold_port(host: str) -> socket.socket:
    """A free port for JAX's coordinator, held while this process lives: the socket never listens, and lets grpc, which
    asks for that, bind there. Whoever asks the kernel for any port cannot be given this one meanwhile."""
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


class Sameness:
    """What the processes of a group must have in common before they wait for each other in a program. ``gather`` gives
    every process what all of them say."""

    def __init__(self, settings: Settings, gather: Callable[[bytes], list[bytes]]) -> None:
        self._where = settings.where
        self._gather = gather

    def programs(self, name: str, digest: str) -> None:
        """They are about to run this one. Raises UsageError if they are not the same."""
        found = [each.decode() for each in self._gather(f"{name} {digest}".encode())]
        if len(set(found)) > 1:
            raise UsageError(
                f"the processes of the group are about to run different programs ({', '.join(found)}): "
                "they must trace the same functions with the same shapes and constants, in the same order"
            )

    def states(self, shared: Mapping[str, str]) -> None:
        """``shared``: digests of what several of them hold, by name. Raises UsageError naming what differs."""
        ranks = [json.loads(each) for each in self._gather(json.dumps(dict(shared)).encode())]
        for name in sorted(set().union(*ranks)):  # whoever holds none of it goes on no more either
            holders = {rank: told[name] for rank, told in enumerate(ranks) if name in told}
            if len(set(holders.values())) > 1:
                raise UsageError(
                    f"{self._where}: {name} differs between the processes of the group (ranks "
                    f"{', '.join(map(str, holders))}): all must build the state alike, from the same seed"
                )
