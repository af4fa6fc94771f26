"""The training state: a pytree of arrays, in a form that no change of members can make XLA compile for again.

Its leaves travel by key path: a JSON header says what they are, then come the raw bytes of what each device holds. A
treedef never travels (it holds functions, and would have to be pickled): every group builds its own state, and what
comes is matched with it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import xxhash
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.tree_util import keystr, tree_flatten_with_path
from torch import Tensor

from planaria.errors import ProtocolError, UsageError
from planaria.jax.views import Place, from_bytes, in_memory, pieces, place_of, put, shape_of, view

VERSION = 1
MAX_PROBLEMS = 5  # that a message lists
MOST_ENTRIES = 150  # of a fingerprint, for the state: it may have 256 in all
LONGEST = 200  # characters of the name of one: it may have 256
KINDS = (Array, np.ndarray, np.generic, bool, int, float, complex)


@dataclass(frozen=True, slots=True)
class Leaf:
    """What a leaf is, the same in every life of the script. A typed PRNG key is the numbers that it is made of."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    random: str  # the kind of generator, of a key; else empty
    places: tuple[Place, ...]  # of the pieces that this process's devices hold, replicas once

    def to_list(self) -> list[Any]:
        return [self.path, self.dtype, list(self.shape), self.random, [list(map(list, each)) for each in self.places]]

    @staticmethod
    def from_list(parts: Any) -> Leaf:
        """Raises ValueError or TypeError for anything that ``to_list`` did not make."""
        path, dtype, shape, random, places = parts
        stretches = tuple(tuple((a, b) for a, b in each) for each in places)
        return Leaf(str(path), str(dtype), tuple(shape), str(random), stretches)

    @property
    def form(self) -> str:
        return self.in_pieces(len(self.places))

    def in_pieces(self, count: int) -> str:
        """In words, if the group has it in so many pieces."""
        spread = f" in {count} pieces" if count > 1 else ""
        return f"{self.dtype}{list(self.shape)}{' key ' + self.random if self.random else ''}{spread}"


class State:
    """The living state of a group, or this process's part in it. ``leaves`` are replaced by every step; what they are
    like never changes.

    Every leaf of ``tree`` is copied (steps donate their memory), made strong in type and committed to where it lies:
    weak types, and arrays that lie nowhere in particular, would each be another program. Python's numbers become
    arrays. If the group has several ``processes``, what is not spread over all their devices must be the same on each
    of them. Raises UsageError naming the path of anything else.
    """

    def __init__(self, tree: Any, device: jax.Device, processes: int = 1) -> None:
        self.treedef: Any
        found, self.treedef = flattened(tree, "the state")
        if not found:
            raise UsageError("job.steps needs a state with arrays in it; this one has none")
        self.keys = [path for path, _ in found]
        self.paths = [f"state{keystr(path)}" for path in self.keys]
        self._everywhere = _everywhere([leaf for _, leaf in found], device, processes)
        self.leaves = [self._settled(path, leaf) for path, (_, leaf) in zip(self.paths, found, strict=True)]
        self.shardings: list[Sharding] = [leaf.sharding for leaf in self.leaves]
        self.kinds = [_kind(path, leaf) for path, leaf in zip(self.paths, self.leaves, strict=True)]

    def _settled(self, path: str, leaf: Any) -> Array:
        if not isinstance(leaf, KINDS):
            raise UsageError(
                f"{path} is {said(leaf)}; a state can hold arrays and numbers only. Keep the rest out of "
                "it (equinox.partition(model, equinox.is_array), flax.nnx.split(model), a TrainState's params and "
                "opt_state)"
            )
        if isinstance(leaf, Array) and leaf.is_deleted():
            raise UsageError(
                f"{path} was deleted: its memory went to what it was donated to; give a state that is whole"
            )
        array = leaf if isinstance(leaf, Array) else _array_of(path, leaf)
        if _is_key(array):  # its numbers have a dimension more; put as a healing puts them
            return _keys_of(jnp.copy(_numbers(array)), str(jax.random.key_impl(array)), self._everywhere)
        where = array.sharding
        if not isinstance(where, NamedSharding):
            where = in_memory(where.memory_kind, self._everywhere)
        return put(jnp.copy(jax.lax.convert_element_type(array, array.dtype)), where)

    @property
    def tree(self) -> Any:
        return self.treedef.unflatten(self.leaves)

    @property
    def everywhere(self) -> Sharding:
        """Where what all devices of the group need lies."""
        return self._everywhere

    @property
    def layout(self) -> str:
        """In words, for the fingerprint: how the state is spread changes bits."""
        if not isinstance(self._everywhere, NamedSharding):
            return "1"
        mesh = ",".join(f"{name}={length}" for name, length in self._everywhere.mesh.shape.items())
        both = zip(self.paths, self.shardings, strict=True)
        spread = [f"{path}:{s.spec}" for path, s in both if isinstance(s, NamedSharding)]
        return f"{mesh} {xxhash.xxh3_64_hexdigest(' '.join(spread).encode())}"

    @property
    def device(self) -> torch.device:
        """Where gradients are exchanged."""
        # Not of a leaf: some are in host memory, and some have types that only the host can read.
        first = next(iter(self._everywhere.addressable_devices_indices_map(())))
        return view(jax.device_put(np.zeros(1, np.float32), first)).device

    def describe(self) -> dict[str, str]:
        """What the leaves are, by path, for the fingerprint: two groups that differ are told where. Of large trees the
        paths are cut, all as short as it needs, and digests stand for what is below."""
        below: dict[str, list[tuple[str, str]]] = {}
        forms = [kind.in_pieces(len(each)) for kind, each in zip(self.kinds, self._holders(), strict=True)]
        for depth in range(max(map(len, self.keys)), -1, -1):
            below = {}
            for keys, path, form in zip(self.keys, self.paths, forms, strict=True):
                below.setdefault(f"state{keystr(keys[:depth])}", []).append((path, form))
            if len(below) <= MOST_ENTRIES and max(map(len, below)) <= LONGEST:
                break
        return {name: _summed(name, leaves) for name, leaves in below.items()}

    def _holders(self) -> list[dict[Place, set[int]]]:
        """Of each leaf: the processes that have a piece of it, by its place."""
        found = []
        for leaf in map(_numbers, self.leaves):
            holders: dict[Place, set[int]] = {}
            for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
                holders.setdefault(place_of(index or (), leaf.shape), set()).add(_process_of(device))
            found.append(holders)
        return found

    def shared(self) -> dict[str, str]:
        """Of every piece that other processes of the group have as well: a digest of its bytes, by the piece's name."""
        both = zip(self.paths, self.leaves, self._holders(), strict=True)
        return {
            path if len(holders) == 1 else f"{path}{list(place)}": xxhash.xxh3_64_hexdigest(_bytes_of(data))
            for path, leaf, holders in both
            for place, data in pieces(_numbers(leaf))
            if len(holders[place]) > 1
        }

    # --- for checkpoints -------------------------------------------------------------------------------------

    @property
    def arrays(self) -> list[Array]:
        """The leaves, of keys the numbers that they are made of. The next step takes their memory."""
        return [_numbers(leaf) for leaf in self.leaves]

    @property
    def spread(self) -> list[Sharding]:
        """How each of ``arrays`` lies on the devices."""
        both = zip(self.kinds, self.shardings, strict=True)
        return [self._everywhere if kind.random else sharding for kind, sharding in both]

    def take(self, arrays: Sequence[Array]) -> None:
        """Take over others, in the form and the place of ``arrays``."""
        made = [
            _keys_of(array, kind.random, self._everywhere) if kind.random else array
            for kind, array in zip(self.kinds, arrays, strict=True)
        ]
        jax.block_until_ready(made)
        self.leaves = made

    # --- for peers -------------------------------------------------------------------------------------------

    def checked(self, whole: bool) -> dict[str, Tensor]:
        """Every piece of the state, by name: views. An optimizer's part of it cannot be told from the rest."""
        return {
            f"{path}{list(place)}" if place else path: view(data)
            for path, leaf in zip(self.paths, self.leaves, strict=True)
            for place, data in pieces(_numbers(leaf))
        }

    def capture(self, facts: Any) -> tuple[bytes, list[Tensor]]:
        """(header, tensors): views, good until the next step. ``facts``: plain data that goes with it."""
        header = {"version": VERSION, "leaves": [kind.to_list() for kind in self.kinds], "facts": facts}
        tensors = [view(data) for leaf in self.leaves for _, data in pieces(_numbers(leaf))]
        return json.dumps(header).encode(), tensors

    def restore(self, header: bytes, tensors: Sequence[Tensor]) -> Any:
        """Take over what ``capture`` gave elsewhere; ``tensors`` hold its bytes (uint8). Returns the facts.

        Raises UsageError naming the paths that differ, and ProtocolError; then nothing is changed.
        """
        theirs, facts = _parse(header)
        if theirs != self.kinds:
            raise UsageError(misfit(theirs, self.kinds, "of the job"))
        rest = list(tensors)
        if len(rest) != sum(len(kind.places) for kind in self.kinds):
            raise ProtocolError(f"a state of {len(self.kinds)} leaves came with {len(rest)} pieces")
        made = []
        for kind, sharding in zip(self.kinds, self.shardings, strict=True):
            mine, rest = rest[: len(kind.places)], rest[len(kind.places) :]
            made.append(_rebuilt(kind, sharding, self._everywhere, dict(zip(kind.places, mine, strict=True))))
        jax.block_until_ready(made)
        self.leaves = made
        return facts

    def digest(self) -> str:
        """xxh3_128 in hexadecimal over everything that this process has: equal for equal states, wherever they are."""
        hasher = xxhash.xxh3_128(json.dumps([kind.to_list() for kind in self.kinds]).encode())
        for leaf in self.leaves:
            for _, data in pieces(_numbers(leaf)):
                hasher.update(_bytes_of(data))
        return hasher.hexdigest()


def _summed(name: str, leaves: Sequence[tuple[str, str]]) -> str:
    if [path for path, _ in leaves] == [name]:
        return leaves[0][1]
    return xxhash.xxh3_64_hexdigest("\n".join(map(" ".join, leaves)).encode())


def _process_of(device: Any) -> int:
    return int(device.process_index)


def _bytes_of(data: Array) -> memoryview:
    return view(data).cpu().reshape(-1).view(torch.uint8).numpy().data


def _everywhere(leaves: Sequence[Any], device: jax.Device, processes: int) -> Sharding:
    placed = [leaf.sharding for leaf in leaves if isinstance(leaf, Array)]
    meshes = {each.mesh for each in placed if isinstance(each, NamedSharding)}
    if len(meshes) > 1:
        raise UsageError(f"the arrays of the state are on {len(meshes)} different meshes; put all of them on one")
    mesh = meshes.pop() if meshes else None
    if processes > 1 and (mesh is None or {*mesh.devices.flat} != {*jax.devices()}):
        raise UsageError(
            f"no array of the state is on a mesh of all {len(jax.devices())} devices of this group, which has "
            f"{processes} processes: put the arrays on one (jax.make_mesh, NamedSharding); those that are on "
            "none are taken to be whole on each device"
        )
    return SingleDeviceSharding(device) if mesh is None else NamedSharding(mesh, PartitionSpec())


def flattened(tree: Any, what: str) -> tuple[list[tuple[Any, Any]], Any]:
    """The leaves with their key paths, and the structure. Raises UsageError if JAX has no order for them."""
    try:
        return tree_flatten_with_path(tree)
    except (TypeError, ValueError) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        raise UsageError(
            f"{what} is no pytree ({why}); the keys of a dict must be of one type, that has an order"
        ) from None


def _array_of(path: str, leaf: Any) -> Array:
    try:
        array = jnp.asarray(leaf)
    except (TypeError, ValueError, OverflowError):
        array = None
    # Integers that come from numpy are cut to fit, without a word.
    if isinstance(array, Array) and (array.dtype.kind not in "iu" or np.array_equal(array, leaf)):
        return array
    what = f"{leaf.dtype} array" if isinstance(leaf, np.ndarray) else f"number {leaf}"
    raise UsageError(f"{path} is the {what}, of which JAX makes no array (integers have 32 bits in it)")


def _is_key(leaf: Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _numbers(leaf: Array) -> Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _keys_of(numbers: Array, kind: str, everywhere: Sharding) -> Array:
    """Keys, whole on each device of the group."""
    return jax.random.wrap_key_data(put(numbers, everywhere), impl=kind)


def _kind(path: str, leaf: Array) -> Leaf:
    raw = _numbers(leaf)
    random = str(jax.random.key_impl(leaf)) if raw is not leaf else ""
    places = tuple(place for place, _ in pieces(raw))
    return Leaf(path, raw.dtype.name, tuple(raw.shape), random, places)


def _rebuilt(kind: Leaf, sharding: Sharding, everywhere: Sharding, parts: dict[Place, Tensor]) -> Array:
    dtype = jnp.dtype(kind.dtype)
    if kind.random:
        (data,) = parts.values()
        first = SingleDeviceSharding(next(iter(sharding.addressable_devices)))
        numbers = from_bytes(data, dtype, kind.shape, first)
        return _keys_of(numbers, kind.random, everywhere)
    arrays = []
    for device, index in sharding.addressable_devices_indices_map(kind.shape).items():
        place = place_of(index or (), kind.shape)
        there = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        arrays.append(from_bytes(parts[place], dtype, shape_of(place), there))
    return jax.make_array_from_single_device_arrays(kind.shape, sharding, arrays)


def _parse(header: bytes) -> tuple[list[Leaf], Any]:
    try:
        parsed = json.loads(header)
        if parsed["version"] != VERSION:
            raise ProtocolError(f"a peer's state is not of version {VERSION}")
        return [Leaf.from_list(each) for each in parsed["leaves"]], parsed["facts"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ProtocolError(f"a peer's state cannot be read: {error}") from None


def misfit(there: Sequence[Leaf], here: Sequence[Leaf], whose: str) -> str:
    theirs, ours = ({leaf.path: leaf for leaf in each} for each in (there, here))
    problems = [f"{path} is missing here" for path in theirs if path not in ours]
    problems += [f"{path} is only here" for path in ours if path not in theirs]
    both = [path for path in ours if path in theirs and ours[path] != theirs[path]]
    problems += [f"{path} is {theirs[path].form} there but {ours[path].form} here" for path in both]
    if not problems:  # an OrderedDict that was filled in the order of a set, say
        moved = next(ours for theirs, ours in zip(there, here, strict=True) if theirs != ours)
        problems = [f"its leaves are in another order there, from {moved.path} on"]
    more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
    return (
        f"the state {whose} does not fit that of this group: {'; '.join(problems[:MAX_PROBLEMS])}{more}. Run the "
        "same script with the same arguments"
    )


def said(leaf: Any) -> str:
    """Of what type it is, in words."""
    name = type(leaf).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
