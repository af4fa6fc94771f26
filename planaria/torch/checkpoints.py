"""Durable checkpoints: when one is due, who writes it, and how a job starts from one.

They are for the day when every group is lost; any smaller loss heals from peers. At a due commit the first member of
the quorum in force copies its state to host memory, which is the only pause, and writes it from a thread of its own.
No other group takes part. All of the state is saved, so a job that starts from a checkpoint ends with the bits of one
that never stopped, at any number of groups.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from planaria.core.fingerprint import SOFT
from planaria.core.messages import Member, Saved
from planaria.errors import ProtocolError, UsageError
from planaria.rank.settings import Settings
from planaria.torch import plain
from planaria.torch.checkpoint_files import Checkpoint, checkpoints_in, prepare_directory, prune, step_directory
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

EVERY = 100
KEEP = 3
# What must be alike anyway, or is compared in more telling words.
_COMPARED = ("model", "seed", "shards", "steps")

# It says so for every save and load of a group of one rank, which is what we mean.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Save after every ``every`` steps, and after the last one; keep the ``keep`` newest."""

    directory: Path
    every: int
    keep: int


def read_schedule(
    directory: str | os.PathLike[str] | None,
    every: int | None,
    keep: int | None,
    environ: Mapping[str, str] = os.environ,
) -> Schedule | None:
    """The script's arguments and those of ``planaria run``: the command line's directory wins, the script's numbers do.
    None if there is no directory. Raises UsageError naming the setting."""
    where = environ.get("PLANARIA_CHECKPOINT") or directory
    numbers = {
        "every": _number("every", every, environ.get("PLANARIA_CHECKPOINT_EVERY"), EVERY),
        "keep": _number("keep", keep, environ.get("PLANARIA_CHECKPOINT_KEEP"), KEEP),
    }
    return Schedule(Path(where).absolute(), **numbers) if where else None


def _number(name: str, given: int | None, text: str | None, default: int) -> int:
    value: object = given if given is not None else text or default
    try:
        number = -1 if isinstance(value, bool | float) else int(str(value))
    except ValueError:
        number = -1
    if number < 1:
        raise UsageError(f"checkpoints: {name} must be a whole number of at least 1, not {value!r}")
    return number


class Checkpoints:
    """One per rank, made by all ranks of the group together. Raises UsageError if the directory cannot be one for
    checkpoints.

    ``member``: the life that the group is at now; ``gather`` gives every rank's payload; ``tell`` hears, on another
    thread, of every save of this group, at rank 0; ``beat`` is called while the training thread copies, to show that it
    lives.
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
        self.schedule = schedule
        self._settings = settings
        self._world = world
        self._state = state
        self._total = total
        self._member = member
        self.prints: tuple[tuple[str, str], ...] = ()  # the group's fingerprint, once it is known
        self._gather = gather
        self._tell = tell
        self._beat = beat
        self._newest = 0  # step of the newest complete save here, or of the one that this life began with
        self._saving = 0  # step of the newest save
        self._buffers: dict[str, Tensor] = {}  # kept: fresh memory would make every pause twice as long
        self._thread: threading.Thread | None = None
        prepare_directory(schedule.directory)
        self._group = world.side_group()

    # --- saving ----------------------------------------------------------------------------------------------

    def committed(self, step: int, first: bool) -> None:
        """``step`` steps are committed; ``first``: this group was the first member of their quorum."""
        if first and step < self._total and step % self.schedule.every == 0:
            self._save(step)

    def end(self, step: int, first: bool) -> None:
        """The job ends in order after ``step`` steps, its last or not: nothing of them shall be lost."""
        self.wait()
        if first and step > self._newest:
            self._save(step)
            self.wait()

    def wait(self) -> None:
        """Until the save under way, if there is one, is complete. Also before connections are renewed that were cut, or
        else it would go on with the new ones."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def newest(self) -> int:
        """The step of the newest checkpoint in the directory, as rank 0 sees it; 0 for none."""
        path = self._chosen()
        return int(path.name.rpartition("-")[2]) if path is not None else 0

    def joined(self) -> None:
        """The group has a new rank, which knows of no save: all of them count from what all know."""
        self._newest = min(int(each) for each in self._gather(b"%d" % self._newest))

    def _save(self, step: int) -> None:
        if why := self._any(self._busy()):
            self._warn(f"the checkpoint of step {step} is left out: {why}")
            return
        began = time.monotonic()
        objects, named = self._state.named()
        keys = {name: key_of(name, tensor, self._world) for name, tensor in named.items()}
        if why := self._any(self._stage(named)):
            self._failed(step, began, f"the checkpoint of step {step} could not be taken: {why}")
            return
        pieces = {key: Piece(self._buffers[name], *box_of(named[name])) for name, key in keys.items()}
        tensors = [[name, keys[name], spec_of(tensor).to_list()] for name, tensor in named.items()]
        data = plain.dump({"objects": objects, "tensors": tensors})
        self._saving = step
        settings, path = self._settings, step_directory(self.schedule.directory, step)
        about = Checkpoint(path, settings.job, step, settings.seed, settings.shards, self._world.size, self.prints)
        member = self._member()
        owner = f"rg{member.group}i{member.incarnation}"
        writer = CheckpointWriter(about, owner, self._world.rank, data)
        self._thread = threading.Thread(
            target=self._write, args=(writer, pieces, path, step, began), name="planaria-checkpoint", daemon=True
        )
        self._thread.start()

    def _any(self, why: str) -> str:
        """The first rank's reason, if any has one, not to go on: all ranks of the group must do the same."""
        return next(filter(None, (each.decode() for each in self._gather(why.encode()))), "")

    def _busy(self) -> str:
        if self._thread is not None and self._thread.is_alive():
            return f"that of step {self._saving} is still being written; save less often"
        return ""

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

    def _write(self, writer: CheckpointWriter, pieces: dict[str, Piece], path: Path, step: int, began: float) -> None:
        """On the thread of the save."""
        trouble = ""
        try:
            save(
                {"pieces": pieces},
                storage_writer=writer,
                planner=SavePlanner(),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except (CheckpointException, Exception) as error:
            trouble = f"the checkpoint {path} could not be written: {_cause(error)}"
        finally:
            writer.close()
        if trouble:
            self._failed(step, began, trouble)
            return
        self._newest = step
        if self._world.rank == 0:
            try:
                prune(self.schedule.directory, self.schedule.keep)
            except OSError as error:
                self._warn(f"old checkpoints in {self.schedule.directory} cannot be removed: {_cause(error)}")
            self._tell(Saved(self._member(), step, time.monotonic() - began))

    def _failed(self, step: int, began: float, trouble: str) -> None:
        self._warn(f"{trouble}. Training goes on; the next one is due at step {step + self.schedule.every}")
        if self._world.rank == 0:
            self._tell(Saved(self._member(), step, time.monotonic() - began, trouble))

    def _warn(self, sentence: str) -> None:
        """Once for a group."""
        if self._world.rank == 0:
            sys.stderr.write(f"{self._settings.where}: {sentence}\n")
            sys.stderr.flush()

    # --- starting from one -----------------------------------------------------------------------------------

    def resume(self) -> int:
        """Take the state of the newest checkpoint, if there is one; the number of steps committed in it, else 0.

        Raises UsageError, with nothing changed, if it is damaged or of another job.
        """
        while path := self._chosen():
            try:
                if found := self._taken(path):
                    step, state = found
                    self._state.restore(*state, f"the checkpoint {path}")
                    self._newest = step
                    return step
            except ProtocolError as error:
                raise UsageError(f"{path} is of no use: {error}") from None
        return 0

    def _chosen(self) -> Path | None:
        """The newest checkpoint, the same for all ranks of the group."""
        found = checkpoints_in(self.schedule.directory)
        name = self._gather(found[0].name.encode() if found else b"")[0].decode()
        return self.schedule.directory / name if name else None

    def _taken(self, path: Path) -> tuple[int, tuple[bytes, list[Tensor]]] | None:
        """Step and state of a checkpoint. None if it is gone meanwhile: others hold the state after all, and save it,
        and this one was old."""
        found = None
        try:
            checkpoint = Checkpoint.read(path)
            self._compare(checkpoint)
            found = checkpoint.step, self._read(checkpoint)
        except UsageError:
            if path.exists():
                raise
        return None if self._any("" if found else "gone") else found

    def _compare(self, checkpoint: Checkpoint) -> None:
        ours = self._settings
        for name, here, there in (
            ("seed", ours.seed, checkpoint.seed),
            ("number of shards", ours.shards, checkpoint.shards),
        ):
            if here != there:
                raise UsageError(
                    f"the checkpoint {checkpoint.path} is of another job: its {name} is {there}, here it is {here}; "
                    "make them alike, or give another directory"
                )
        theirs = {key.removeprefix(SOFT): value for key, value in checkpoint.fingerprint}
        laid, was_laid = dict(self.prints).get("layout"), theirs.get("layout")
        if self._state.registered is not None and laid != was_laid:
            raise UsageError(
                f"the checkpoint {checkpoint.path} was written by groups laid out as {was_laid}, here it is {laid}; "
                "state of a script's own functions (job.register) stays in its layout"
            )
        hard = {key: value for key, value in self.prints if not key.startswith(SOFT) and key not in _COMPARED}
        differ = [f"{k} ({theirs.get(k, 'absent')} there, {v} here)" for k, v in hard.items() if theirs.get(k) != v]
        if differ:
            self._warn(
                f"the checkpoint {checkpoint.path} was written under other conditions, so the bits may come to differ "
                f"from those of a run that never stopped: {', '.join(differ)}"
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


def _cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        rank, first = _first(error)
        return f"rank {rank}: {_cause(first)}" if rank else _cause(first)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"
