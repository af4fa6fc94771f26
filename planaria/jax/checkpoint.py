"""Durable checkpoints of a pytree, written and read by Orbax.

::

    step-00000120/
        state/             the state as Orbax saves pytrees: any program that has Orbax can read it
        checkpoint.json    the manifest: what job, step and leaves these are; sizes and checksums of all files

At a due step the state is copied to host memory by XLA, beside the next step: donation waits for that copy, so nothing
else has to. Orbax writes it on a thread of its own, and checks no bytes when it reads. So what it wrote is read once
more and summed up, before the directory gets the name under which it counts.

Of the processes of a group each writes and reads its own pieces, and rank 0 all the rest. They wait for each other at
barriers of JAX's service, never in a program on the devices: training runs those meanwhile, in its own order.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import xxhash
from jax import Array

from planaria.core.messages import Member, Saved
from planaria.errors import PlanariaError, UsageError
from planaria.files import sync_directory
from planaria.jax.on_host import from_host, on_host, stored_as
from planaria.jax.state import Leaf, State, misfit
from planaria.jax.world import SoleWorld
from planaria.rank.durable import MANIFEST, Schedule, make_held, remove, step_of, sweep, unreadable
from planaria.rank.saver import Saver, cause
from planaria.rank.settings import Settings

# Not a number: checkpoints of planaria.torch have their own.
VERSION = "jax 1"
STATE = "state"
_SLICE = 1 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a manifest says. ``files``: size and xxh3_128 of each, by its path below the directory."""

    path: Path
    job: str
    step: int
    seed: int
    shards: int
    fingerprint: tuple[tuple[str, str], ...]
    leaves: tuple[Leaf, ...]
    metrics: Mapping[str, float]
    files: Mapping[str, tuple[int, str]]

    def encode(self) -> bytes:
        body = {
            "version": VERSION,
            "job": self.job,
            "step": self.step,
            "seed": self.seed,
            "shards": self.shards,
            "fingerprint": dict(self.fingerprint),
            "leaves": [leaf.to_list() for leaf in self.leaves],
            "metrics": dict(self.metrics),
            "files": {name: list(each) for name, each in self.files.items()},
        }
        return _dump({"checksum": xxhash.xxh3_128_hexdigest(_dump(body)), "checkpoint": body})

    @staticmethod
    def read(path: Path) -> Checkpoint:
        """The checkpoint in the directory ``path``, with all its files whole. Raises Damaged, or UsageError if it is
        not one of this front, or not for this user to read."""
        try:
            found = _decode(path, (path / MANIFEST).read_bytes())
            there = {file.relative_to(path).as_posix(): file for file in _files(path)}
            for name, expected in found.files.items():
                if name not in there:
                    raise Damaged(f"{path / name} is missing")
                if (seen := _summed(there[name])) != expected:
                    what = f"has {seen[0]} bytes, not {expected[0]}" if seen[0] != expected[0] else "has other bytes"
                    raise Damaged(f"{path / name} {what}")
        except FileNotFoundError:
            raise Damaged(f"{path} has no {MANIFEST}") from None
        except PermissionError as error:
            raise unreadable(Path(error.filename or path), error) from None
        except OSError as error:
            raise Damaged(f"{error.filename or path} cannot be read: {error.strerror}") from None
        return found


class Damaged(PlanariaError):
    """A checkpoint is not what it was when it was complete."""


def _whole(path: Path) -> bool:
    """Whether there is a checkpoint. A damaged one makes way."""
    if not os.path.lexists(path):
        return False
    try:
        Checkpoint.read(path)
    except Damaged:
        remove(path)
        return False
    return True


def _decode(path: Path, data: bytes) -> Checkpoint:
    try:
        outer = json.loads(data)
        body = outer["checkpoint"]
        if outer["checksum"] != xxhash.xxh3_128_hexdigest(_dump(body)):
            raise ValueError("checksum")
        if body["version"] != VERSION:
            raise UsageError(
                f"{path / MANIFEST} is of version {body['version']}, planaria.jax reads {VERSION!r}; give a directory "
                "of its own to each script"
            )
        return Checkpoint(
            path,
            str(body["job"]),
            int(body["step"]),
            int(body["seed"]),
            int(body["shards"]),
            tuple(sorted((str(key), str(value)) for key, value in body["fingerprint"].items())),
            tuple(Leaf.from_list(each) for each in body["leaves"]),
            {str(name): float(value) for name, value in body["metrics"].items()},
            {str(name): (int(size), str(checksum)) for name, (size, checksum) in body["files"].items()},
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        raise Damaged(f"{path / MANIFEST} does not hold what a manifest holds") from None


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")  # metrics may be NaN


def _files(path: Path) -> Iterator[Path]:
    return (each for each in sorted(path.rglob("*")) if each.is_file() and each != path / MANIFEST)


def _summed(path: Path, sync: bool = False) -> tuple[int, str]:
    """Size and checksum of a file, which is on the disk then if ``sync``."""
    hasher, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        while part := file.read(_SLICE):
            hasher.update(part)
            size += len(part)
        if sync:
            os.fsync(file.fileno())
    return size, hasher.hexdigest()


class Checkpoints(Saver):
    """Of one job: see ``Saver``. ``metrics``: those of the newest step, which go with the state."""

    def __init__(
        self,
        schedule: Schedule,
        settings: Settings,
        world: SoleWorld,
        state: State,
        total: int,
        member: Callable[[], Member],
        gather: Callable[[bytes], list[bytes]],
        tell: Callable[[Saved], None],
        metrics: Callable[[], Mapping[str, float]],
    ) -> None:
        self._orbax = _orbax(settings.where)
        self._world = world
        self._state = state
        self._metrics = metrics
        self.damaged = 0  # step of the newest that was passed over
        self._forms = [stored_as(kind) for kind in state.kinds]
        _refuse_twins(state)
        super().__init__(schedule, settings, world, total, member, gather, tell)

    # --- saving ----------------------------------------------------------------------------------------------

    def _take(self, path: Path, step: int) -> Callable[[], None]:
        copies: list[Array | None] = []
        try:
            copies += [on_host(array, form) for array, form in zip(self._state.arrays, self._forms, strict=True)]
            why = ""
        except (RuntimeError, MemoryError) as error:
            why = str(error).partition("\n")[0] or "out of memory"
        if why := self._any(why):
            raise PlanariaError(why)
        ours = self._settings
        kinds, metrics = tuple(self._state.kinds), dict(self._metrics())
        about = Checkpoint(path, ours.job, step, ours.seed, ours.shards, self.prints, kinds, metrics, {})
        return functools.partial(self._put, about, copies)

    def _put(self, about: Checkpoint, copies: list[Array | None]) -> None:
        """On the thread of the save. Raises PlanariaError on all ranks if one of them fails."""
        partial = about.path.with_name(f"{about.path.name}.partial-{self._owner()}")
        first = self._rank == 0
        with ExitStack() as at_end:
            if first:
                at_end.callback(shutil.rmtree, partial, ignore_errors=True)
            with self._together(f"{partial.name} begins"):
                if first:
                    sweep(partial.parent)
                    at_end.callback(os.close, make_held(partial))
            with self._together(f"{partial.name} is written"):
                self._save_tree(partial, self._state.treedef.unflatten(copies))
            copies.clear()
            with self._together(f"{partial.name} counts"):
                if first:
                    _complete(partial, about)

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """All ranks have done it, or all fail: then with the sentence of the one that did."""
        try:
            yield
        except Exception as error:
            raise PlanariaError(self._world.agree(what, cause(error))) from error
        if why := self._world.agree(what, ""):
            raise PlanariaError(why)

    def _save_tree(self, partial: Path, tree: Any) -> None:
        with self._checkpointer(partial.name) as orbax:
            orbax.save(partial / STATE, args=self._orbax.args.PyTreeSave(tree))

    def _checkpointer(self, name: str) -> Any:
        """``name``: of barriers that no other save or restore has, for one that fails leaves some of them behind."""
        ranks = set(range(self._world.size)) if self._world.size > 1 else None
        shared = self._orbax.options.MultiprocessingOptions(active_processes=ranks, barrier_sync_key_prefix=name)
        # Weights hardly get smaller (8 %), and compressing them takes twice the processor time of all the rest.
        handler = self._orbax.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=shared)
        return self._orbax.Checkpointer(handler, multiprocessing_options=shared)

    # --- starting from one -----------------------------------------------------------------------------------

    def resume(self) -> tuple[int, Mapping[str, float]]:
        """Take the state of the newest checkpoint that is whole; the number of steps committed in it, and their
        metrics; (0, {}) if there is none. Those that are damaged are told of and passed over.

        Raises UsageError, with nothing changed, if it is of another job, or if all that are there are damaged.
        """
        while found := self._found():
            for path in found:
                try:
                    checkpoint = self._checked(path)
                    self._accept(checkpoint)
                except Damaged as error:
                    self.damaged = max(self.damaged, step_of(path))
                    self._warn(f"the checkpoint {path} is passed over, for it is damaged: {error}")
                    continue
                except FileNotFoundError:
                    break  # others hold the state after all, and save it, and this one was old: look again
                self._newest = checkpoint.step
                return checkpoint.step, checkpoint.metrics
            else:
                raise UsageError(
                    f"{self._settings.where}: no checkpoint in {self.schedule.directory} is whole; give another "
                    "directory to begin at the beginning"
                )
        return 0, {}

    def _checked(self, path: Path) -> Checkpoint:
        """What is there, as rank 0 finds it. Raises Damaged, or FileNotFoundError if it is gone meanwhile."""
        said = b""
        if self._rank == 0:
            try:
                said = b"whole " + Checkpoint.read(path).encode()
            except Damaged as error:
                said = b"damaged " + str(error).encode() if os.path.lexists(path) else b"gone "
        word, _, what = self._gather(said)[0].partition(b" ")
        if word == b"gone":
            raise FileNotFoundError(path)
        if word == b"damaged":
            raise Damaged(what.decode())
        return _decode(path, what)

    def _accept(self, checkpoint: Checkpoint) -> None:
        """Raises FileNotFoundError if it is gone meanwhile."""
        path, ours = checkpoint.path, self._state.kinds
        # The layout inside the group may be another: then these are the bits of the new one from here on.
        theirs, mine = ([replace(kind, places=()) for kind in kinds] for kinds in (checkpoint.leaves, ours))
        if theirs != mine:
            raise UsageError(f"{self._settings.where}: {misfit(theirs, mine, f'in the checkpoint {path}')}")
        self._compare(path, checkpoint.step, checkpoint.seed, checkpoint.shards, checkpoint.fingerprint, _compared)
        found, why = [], ""
        try:
            found = self._read(path)
        except Exception as error:  # its files are what was written, so it is not damaged
            why = cause(error) if os.path.lexists(path) else "gone"
        told = [each.decode() for each in self._gather(why.encode())]
        if "gone" in told:
            raise FileNotFoundError(path)
        if why := next(filter(None, told), ""):
            raise UsageError(f"{self._settings.where}: Orbax cannot read the checkpoint {path}: {why}")
        self._state.take(found)

    def _read(self, path: Path) -> list[Array]:
        like = [
            None if form is None else jax.ShapeDtypeStruct(kind.shape, form, sharding=sharding)
            for kind, form, sharding in zip(self._state.kinds, self._forms, self._state.spread, strict=True)
        ]
        tree = self._state.treedef.unflatten(like)
        args = jax.tree.map(
            lambda leaf: self._orbax.ArrayRestoreArgs(
                sharding=leaf.sharding, dtype=leaf.dtype, global_shape=leaf.shape
            ),
            tree,
        )
        restore = self._orbax.args.PyTreeRestore(item=tree, restore_args=args)
        with self._checkpointer(f"{path.name} is read") as orbax:
            made = iter(jax.tree.leaves(orbax.restore(path / STATE, args=restore)))
        return [
            from_host(kind, None if form is None else next(made), sharding)
            for kind, form, sharding in zip(self._state.kinds, self._forms, self._state.spread, strict=True)
        ]


def _complete(partial: Path, about: Checkpoint) -> None:
    """Give it its manifest, and its name, once all of it is on the disk."""
    files = {each.relative_to(partial).as_posix(): _summed(each, sync=True) for each in _files(partial)}
    with (partial / MANIFEST).open("xb") as file:
        file.write(replace(about, files=files).encode())
        file.flush()
        os.fsync(file.fileno())
    for directory in sorted((each for each in partial.rglob("*") if each.is_dir()), reverse=True):
        sync_directory(directory)
    sync_directory(partial)
    if not _whole(about.path):  # else two groups were first in the quorum at the same step
        partial.rename(about.path)
        sync_directory(about.path.parent)


def _compared(entry: str) -> bool:
    """Of the fingerprint: what must be alike anyway, is compared in more telling words, or changes no bits."""
    return entry in ("metrics", "seed", "shards", "steps") or entry.startswith("state")


def _orbax(where: str) -> Any:
    try:
        import orbax.checkpoint as orbax
    except ImportError as error:
        raise UsageError(
            f"{where}: checkpoints of planaria.jax are written by Orbax, which cannot be imported ({error}): pip "
            "install 'planaria[jax-checkpoint]'"
        ) from None
    return orbax


def _refuse_twins(state: State) -> None:
    """Orbax names arrays by the keys on their path, with dots between them, and writes two of one name as one."""
    names: dict[str, str] = {}
    for path, keys in zip(state.paths, state.keys, strict=True):
        name = ".".join(jax.tree_util.keystr((key,), simple=True) for key in keys)
        if name in names:
            raise UsageError(
                f"{names[name]} and {path} would have one name ({name}) in a checkpoint; rename one, without a dot"
            )
        names[name] = path
