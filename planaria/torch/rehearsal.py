"""A standby tries the script before it is needed: everything up to the first step, and the body of that once.

Its group's other ranks are not there (see ``ingroup``), nor are other groups, so nothing that it computes means
anything, and nothing of it is kept: what it has afterwards are warm caches, allocators and devices. When it takes a
lost rank's place, the state comes from peers as in every healing.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from planaria.core.exits import EXIT_FAILED
from planaria.core.messages import Cast, Order, Present
from planaria.errors import Recast, UsageError
from planaria.exchange.layout import Layout
from planaria.exchange.waiting import Bell
from planaria.rank.control import Control
from planaria.rank.settings import Settings
from planaria.torch import ingroup
from planaria.torch import random as seeding
from planaria.torch.buckets import local_numel
from planaria.torch.data import ShardedSource
from planaria.torch.gradients import GradientStore
from planaria.torch.scalars import recorded
from planaria.torch.state import ProtectedState
from planaria.torch.unwinding import Pipelines, unwind
from planaria.torch.world import GroupWorld
from planaria.wire.stacks import answer_in

# Of a process that has done nothing yet: the fork server imports this before it forks any.
_FRESH = (torch.get_default_dtype(), torch.get_float32_matmul_precision())
_FRESH_GENERATORS = (torch.get_rng_state(), torch.initial_seed())


class Rehearsal:
    """In a ``Step``, takes the place of a Worker: shard 0 of step 0, whose own gradient is the result."""

    step = 0
    groups: tuple[int, ...] = ()  # so nobody writes what is to be written once

    def __init__(self, settings: Settings, world: GroupWorld, state: ProtectedState, overlap: bool) -> None:
        self.metrics: dict[str, float] = {}
        self.guarded = False
        self._pipelines: Pipelines | None = None
        self._settings = settings
        self._world = world
        self._modules = state.modules
        named = [(name, p) for name, p in state.parameters() if p.requires_grad]
        self._layout = Layout([local_numel(p) for _, p in named])
        self._store = GradientStore(named, settings.shards, self._layout, overlap=overlap)

    def batches(self, data: ShardedSource) -> Iterator[Any]:
        settings, store = self._settings, self._store
        data.bind(settings.shards, settings.seed, self._world.part)
        seeding.seed_shard(settings.seed, 0, 0, self._world.part[0])
        store.begin_step()
        store.begin_shard(0, None, micro_batches=data.micro_batches)
        for batch in data.batches(0, 0):
            yield batch
            store.micro_batch_done()
        store.end_shard()
        sums = [store.parts(bucket)[0] for bucket in range(len(self._layout.buckets))]
        store.assign(sums, [True] * len(store.names))
        seeding.seed_apply(settings.seed, 0)

    def record(self, values: Mapping[str, Any]) -> None:
        self.metrics |= {name: float(recorded(value)) for name, value in values.items()}

    def guard(self) -> None:
        self.guarded = True
        self._pipelines = self._pipelines or Pipelines()

    def void(self, error: Exception) -> bool:
        """Whatever the body did not like about numbers without a meaning, it is as warm as it gets."""
        traceback.print_exception(error)
        unwind(self._modules)
        sys.stderr.write(f"planaria: {self._settings.born} could not try a whole step; it waits all the same\n")
        return True

    def abandon(self, frame: FrameType | None) -> NoReturn:
        """The script has left its loop, in ``frame``. What follows that would take what was tried for the result, and
        may write it where the result belongs: this process ends. Whether an error is the reason cannot be seen here."""
        while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:  # tqdm's, say
            frame = frame.f_back
        where = f" at {frame.f_code.co_filename}, line {frame.f_lineno}" if frame is not None else ""
        text = f"the one step that a standby tries was left{where}: by break, return or an error"
        sys.stderr.write(f"{self._settings.where}: {text}\n")
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        if self._settings.directory is not None:
            with suppress(OSError):
                said = json.dumps({"message": text, "exit_code": EXIT_FAILED})
                (self._settings.directory / "error.json").write_text(said)
        os._exit(EXIT_FAILED)

    def end(self) -> None:
        self._store.release()
        if self._pipelines is not None:
            self._pipelines.rewind()
        if not self.guarded and self._world.size > 1:
            raise UsageError(
                "standbys take the place of single ranks, for which the script must put the body of its loop under "
                "`with step.guard():`"
            )


def await_part(settings: Settings, prints: tuple[tuple[str, str], ...]) -> Cast:
    """Wait until the agent has a part for this standby. Nothing but that, or the end of the process, ends it.
    ``prints``: its fingerprint, by which the agent sees whether it can have a part at all."""
    assert settings.socket is not None
    bell, heard = Bell(), list[Cast]()

    def on_order(order: Order) -> None:
        if isinstance(order, Cast):
            heard.append(order)
            bell.ring()

    control = Control(settings.socket, None, on_order, settings.where)
    control.send(Present(settings.born, 0, prints))
    bell.wait(lambda: bool(heard), lambda: False)
    control.close()
    return heard[0]


def take(cast: Cast, settings: Settings, world: GroupWorld) -> Settings:
    """Become what the agent says: the settings from now on. Raises Recast if it is another rank than was tried, for
    which the script must be run again."""
    os.environ.update(cast.environ)
    directory = Path(os.environ["PLANARIA_DIR"])
    for stream, name in ((sys.stdout, "stdout.log"), (sys.stderr, "stderr.log")):
        with suppress(OSError, ValueError):
            stream.flush()
        opened = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, 1 if stream is sys.stdout else 2)
        os.close(opened)
    answer_in(directory)
    if cast.rank != settings.rank or world.size == 1:  # a group of one has no ranks to meet: it starts as any other
        _forget()
        raise Recast
    return replace(settings, born=cast.member, directory=directory, standby=None)


def _forget() -> None:
    """Have torch know nothing of the ranks of the group any more."""
    # DTensors' caches keep meshes, which say what this rank was in them, and take equal ones for the same. What the
    # fork server froze is not looked through: it had no meshes.
    for found in gc.get_objects():
        if type(found) is DeviceMesh:  # isinstance would ask objects of all kinds what they are
            found._thread_id = -1 - threading.get_ident()  # equal to none that is made from now on
    if dist.is_initialized():
        dist.destroy_process_group()
    ingroup.forget()
    # A script that begins again must draw and make what one draws and makes that begins.
    dtype, precision = _FRESH
    state, seed = _FRESH_GENERATORS
    torch.set_rng_state(state)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    torch.set_default_dtype(dtype)
    torch.set_default_device(None)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)
