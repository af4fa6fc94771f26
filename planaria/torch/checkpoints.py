"""What is in a durable checkpoint, and how a job starts from one.

They are for the day when every group is lost; any smaller loss heals from peers. All of the state is saved, so a job
that starts from a checkpoint ends with the bits of one that never stopped, at any number of groups.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from planaria.core.messages import Member, Saved
from planaria.errors import PlanariaError, ProtocolError, UsageError
from planaria.rank.durable import Schedule, step_of
from planaria.rank.saver import Saver, cause
from planaria.rank.settings import Settings
from planaria.torch import plain
from planaria.torch.checkpoint_files import Checkpoint
from planaria.torch.checkpoint_io import CheckpointReader, CheckpointWriter
from planaria.torch.checkpoint_layout import (
    LoadPlanner,
    Piece,
    SavePlanner,
    box_of,
    key_of,
    plain_of,
    wanted,
)
from planaria.torch.parts import TensorSpec, live, spec_of
from planaria.torch.state import ProtectedState, write_manifest
from planaria.torch.world import GroupWorld

# What must be alike anyway, or is compared in more telling words.
_COMPARED = ("model", "seed", "shards", "steps")

# It says so for every save and load of a group of one rank, which is what we mean.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


class Checkpoints(Saver):
    """One per rank, made by all ranks of the group together: see ``Saver``.

    ``beat`` is called while the training thread copies, to show that it lives.
    """

    def __init__(
        self,
        schedule: Schedule,
        settings: Settings,
        world: GroupWorld,
        state: ProtectedState,
        total: int,
        member: Callable[[], Member],
        gather: Callable[[bytes], list[bytes]],
        tell: Callable[[Saved], None],
        beat: Callable[[], None],
    ) -> None:
        super().__init__(schedule, settings, world, total, member, gather, tell)
        self._world = world
        self._state = state
        self._beat = beat
        self._buffers: dict[str, Tensor] = {}  # kept: fresh memory would make every pause twice as long
        self._group = world.side_group()

    # --- saving ----------------------------------------------------------------------------------------------

    def newest(self) -> int:
        """The step of the newest checkpoint in the directory, as rank 0 sees it; 0 for none."""
        found = self._found()
        return step_of(found[0]) if found else 0

    def _take(self, path: Path, step: int) -> Callable[[], None]:
        objects, named = self._state.named()
        keys = {name: key_of(name, tensor, self._world) for name, tensor in named.items()}
        if why := self._any(self._stage(named)):
            raise PlanariaError(why)
        pieces = {key: Piece(self._buffers[name], *box_of(named[name])) for name, key in keys.items()}
        tensors = [[name, keys[name], spec_of(tensor).to_list()] for name, tensor in named.items()]
        data = plain.dump({"objects": objects, "tensors": tensors})
        settings = self._settings
        about = Checkpoint(path, settings.job, step, settings.seed, settings.shards, self._world.size, self.prints)
        writer = CheckpointWriter(about, self._owner(), self._world.rank, data)
        return functools.partial(self._put, writer, pieces)

    def _stage(self, named: Mapping[str, Tensor]) -> str:
        """Copy this rank's part of every tensor to host memory. A sentence if there is too little of it."""
        try:
            for name, tensor in named.items():
                local = live(tensor)
                buffer = self._buffers.get(name)
                if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                    buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
                    self._buffers[name] = buffer
                buffer.copy_(local, non_blocking=True)
                self._beat()
            if self._world.device.type == "cuda":
                torch.cuda.current_stream(self._world.device).synchronize()
        except (RuntimeError, MemoryError) as error:
            self._buffers.clear()
            return str(error).partition("\n")[0] or "out of memory"
        return ""

    def _put(self, writer: CheckpointWriter, pieces: dict[str, Piece]) -> None:
        """On the thread of the save."""
        try:
            save(
                {"pieces": pieces},
                storage_writer=writer,
                planner=SavePlanner(),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except CheckpointException as error:
            raise PlanariaError(_cause(error)) from None
        finally:
            writer.close()

    # --- starting from one -----------------------------------------------------------------------------------

    def resume(self) -> int:
        """Take the state of the newest checkpoint, if there is one; the number of steps committed in it, else 0.

        Raises UsageError, with nothing changed, if it is damaged or of another job.
        """
        while found := self._found():
            path = found[0]
            try:
                if taken := self._taken(path):
                    step, state = taken
                    self._state.restore(*state, f"the checkpoint {path}")
                    self._newest = step
                    return step
            except ProtocolError as error:
                raise UsageError(f"{path} is of no use: {error}") from None
        return 0

    def _taken(self, path: Path) -> tuple[int, tuple[bytes, list[Tensor]]] | None:
        """Step and state of a checkpoint. None if it is gone meanwhile: others hold the state after all, and save it,
        and this one was old."""
        found = None
        try:
            checkpoint = Checkpoint.read(path)
            there = checkpoint.fingerprint
            self._compare(path, checkpoint.step, checkpoint.seed, checkpoint.shards, there, _COMPARED.__contains__)
            self._check(checkpoint)
            found = checkpoint.step, self._read(checkpoint)
        except UsageError:
            if os.path.lexists(path):  # a link that leads nowhere is there, and would be found again
                raise
        return None if self._any("" if found else "gone") else found

    def _check(self, checkpoint: Checkpoint) -> None:
        laid, was_laid = (dict(prints).get("layout") for prints in (self.prints, checkpoint.fingerprint))
        if self._state.registered is not None and laid != was_laid:
            raise UsageError(
                f"the checkpoint {checkpoint.path} was written by groups laid out as {was_laid}, here it is {laid}; "
                "state of a script's own functions (job.register) stays in its layout"
            )

    def _read(self, checkpoint: Checkpoint) -> tuple[bytes, list[Tensor]]:
        """Manifest and tensors of a state, as this rank takes it up."""
        objects, tensors = plain_of(checkpoint, self._world)
        models = self._state.models(objects)
        specs: list[TensorSpec] = []
        wires: list[Tensor] = []
        pieces: dict[str, Piece] = {}
        for index, (name, key, theirs) in enumerate(tensors):
            key, spec, box = wanted(checkpoint, name, key, theirs, models.get(index), self._world)
            wires.append(torch.empty(spec.wire_shape, dtype=spec.dtype, device="cpu"))
            specs.append(spec)
            pieces[key] = Piece(spec.view(wires[-1]), *box)
        try:
            load(pieces, storage_reader=CheckpointReader(checkpoint), planner=LoadPlanner(), no_dist=True)
        except CheckpointException as error:
            raise _first(error)[1] from None
        return write_manifest(objects, specs), wires


def _first(error: CheckpointException) -> tuple[int, BaseException]:
    """The lowest rank that failed, and how."""
    rank = min(error.failures)
    return rank, error.failures[rank][0]


def _cause(error: CheckpointException) -> str:
    rank, first = _first(error)
    return f"rank {rank}: {cause(first)}" if rank else cause(first)
