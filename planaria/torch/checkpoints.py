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
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from planaria.core.fingerprint import SOFT
from planaria.core.messages import Saved
from planaria.errors import ProtocolError, UsageError
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
from planaria.torch.settings import Settings
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

    ``prints`` is the fingerprint; ``gather`` gives every rank's payload; ``tell`` hears, on another thread, of every
    save of this group, at rank 0; ``beat`` is called while the training thread copies, to show that it lives.
    """

    def __init__(
        self,
        schedule: Schedule,
        settings: Settings,
        world: GroupWorld,
        state: ProtectedState,
        total: int,
        prints: tuple[tuple[str, str], ...],
        gather: Callable[[bytes], list[bytes]],
        tell: Callable[[Saved], None],
        beat: Callable[[], None],
    ) -> None:
        self.schedule = schedule
        self._settings = settings
        self._world = world
        self._state = state
        self._total = total
        self._prints = prints
        self._gather = gather
        self._tell = tell
        self._beat = beat
        self._newest = 0  # step of the newest save here, or of the one that this life began with
        self._buffers: dict[str, Tensor] = {}  # kept: fresh memory would make every pause twice as long
        self._thread: threading.Thread | None = None
        prepare_directory(schedule.directory)
        # Saves have collectives among the ranks of the group, on another thread than the training's.
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None

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
        """Until the save under way, if there is one, is complete."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _save(self, step: int) -> None:
        if self._busy():
            self._warn(
                f"the checkpoint of step {step} is left out, that of step {self._newest} is still being written; save "
                "less often"
            )
            return
        began = time.monotonic()
        self._newest = step
        objects, named = self._state.named()
        keys = {name: key_of(name, tensor, self._world) for name, tensor in named.items()}
        pieces = {keys[name]: self._staged(name, tensor) for name, tensor in named.items()}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()
        tensors = [[name, keys[name], spec_of(tensor).to_list()] for name, tensor in named.items()]
        data = plain.dump({"objects": objects, "tensors": tensors})
        settings, path = self._settings, step_directory(self.schedule.directory, step)
        about = Checkpoint(path, settings.job, step, settings.seed, settings.shards, self._world.size, self._prints)
        owner = f"rg{settings.member.group}i{settings.member.incarnation}"
        writer = CheckpointWriter(about, owner, self._world.rank, data)
        self._thread = threading.Thread(
            target=self._write, args=(writer, pieces, path, step, began), name="planaria-checkpoint", daemon=True
        )
        self._thread.start()

    def _busy(self) -> bool:
        """Whether an earlier save is under way at any rank of the group: all must take part in the next."""
        busy = self._thread is not None and self._thread.is_alive()
        return any(each == b"1" for each in self._gather(b"1" if busy else b"0"))

    def _staged(self, name: str, tensor: Tensor) -> Piece:
        """The rank's part of a tensor, copied to host memory."""
        local = live(tensor)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
            self._buffers[name] = buffer
        buffer.copy_(local, non_blocking=True)
        self._beat()
        return Piece(buffer, *box_of(tensor))

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
            if self._world.rank == 0:
                prune(self.schedule.directory, self.schedule.keep)
        except (CheckpointException, Exception) as error:
            trouble = f"the checkpoint {path} could not be written: {_cause(error)}"
        finally:
            writer.close()
        if trouble and self._world.rank == 0:
            self._warn(f"{trouble}. Training goes on; the next one is due at step {step + self.schedule.every}")
        if self._world.rank == 0:
            self._tell(Saved(self._settings.member, step, time.monotonic() - began, trouble))

    def _warn(self, sentence: str) -> None:
        sys.stderr.write(f"{self._settings.where}: {sentence}\n")
        sys.stderr.flush()

    # --- starting from one -----------------------------------------------------------------------------------

    def resume(self) -> int:
        """Take the state of the newest checkpoint, if there is one; the number of steps committed in it, else 0.

        Raises UsageError, with nothing changed, if it is damaged or of another job.
        """
        directory = self.schedule.directory
        found = checkpoints_in(directory)
        # All ranks of the group must start from the same, whatever else happens in the directory meanwhile.
        chosen = self._gather(found[0].name.encode() if found else b"")[0].decode()
        if not chosen:
            return 0
        checkpoint = Checkpoint.read(directory / chosen)
        self._compare(checkpoint)
        try:
            self._load(checkpoint)
        except ProtocolError as error:
            raise UsageError(f"{checkpoint.path} is of no use: {error}") from None
        self._newest = checkpoint.step
        return checkpoint.step

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
        hard = {key: value for key, value in self._prints if not key.startswith(SOFT) and key not in _COMPARED}
        differ = [f"{k} ({theirs.get(k, 'absent')} there, {v} here)" for k, v in hard.items() if theirs.get(k) != v]
        if self._world.rank == 0 and differ:
            self._warn(
                f"the checkpoint {checkpoint.path} was written under other conditions, so the bits may come to differ "
                f"from those of a run that never stopped: {', '.join(differ)}"
            )

    def _load(self, checkpoint: Checkpoint) -> None:
        objects, tensors = plain_of(checkpoint, self._world)
        living = self._state.named()[1]
        specs: list[TensorSpec] = []
        wires: list[Tensor] = []
        pieces: dict[str, Piece] = {}
        for name, key, theirs in tensors:
            key, spec, box = wanted(checkpoint, name, key, theirs, living, self._world)
            wires.append(torch.empty(spec.wire_shape, dtype=spec.dtype))
            specs.append(spec)
            pieces[key] = Piece(spec.view(wires[-1]), *box)
        try:
            load(pieces, storage_reader=CheckpointReader(checkpoint), planner=LoadPlanner(), no_dist=True)
        except CheckpointException as error:
            raise _first(error)[1] from None
        self._state.restore(write_manifest(objects, specs), wires, f"the checkpoint {checkpoint.path}")


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
