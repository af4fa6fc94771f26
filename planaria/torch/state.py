"""The state that peers can give back: what it consists of, and how it is taken and put in place.

A state is a *manifest* (plain data as bytes, no pickle) and a flat list of contiguous tensors. It is rank-local and
taken without collectives or copies, so the tensors are the living ones: they are good until the next optimizer step.
A restore checks everything before it writes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planaria.errors import ProtocolError, UsageError
from planaria.torch import plain
from planaria.torch.low_comm import LowCommunication
from planaria.torch.parts import (
    DictPart,
    ModulePart,
    Part,
    Received,
    StatefulPart,
    TensorSpec,
    feed,
    live,
    make_part,
    spec_of,
    wire_form,
)
from planaria.torch.registered import RegisteredPart
from planaria.torch.sync_part import SyncPart

VERSION = 1
FACTS = "planaria"  # the name of what Planaria itself must know after healing
MAX_PROBLEMS = 5  # that a message lists: the first ones tell which line of the script differs


class ProtectedState:
    """The objects of a job whose state travels with it, by name.

    Takes modules (parameters and buffers, non-persistent ones too, tied ones once), optimizers (their state exactly
    as it is), dictionaries of plain data, anything with ``state_dict`` and ``load_state_dict`` whose state is plain
    data and tensors, and lists, tuples or dictionaries of these. Raises UsageError for anything else.
    """

    def __init__(self, **objects: Any) -> None:
        flat = {name: value for key, given in sorted(objects.items()) for name, value in _flattened(key, given)}
        self._objects = list(flat.values())
        self.registered = next((each for each in flat.values() if isinstance(each, RegisteredPart)), None)
        own = [ModulePart(name, value) for name, value in flat.items() if isinstance(value, nn.Module)]
        syncs = [SyncPart(name, value) for name, value in flat.items() if isinstance(value, LowCommunication)]
        self.sync = syncs[0] if syncs else None
        _check_sync(syncs, flat)
        self._modules: list[ModulePart] = [*own, *(self.registered.modules if self.registered is not None else [])]
        self._modules += self.sync.modules if self.sync is not None else []
        self._watched: list[Tensor] | None = None  # parameters and buffers, looked up at the first mark
        self._versions = 0
        # So that errors and files can name what an optimizer only numbers.
        names = {id(parameter): name for name, parameter in self.parameters()}
        parts: dict[str, Part] = {part.name: part for part in (*own, *syncs)}
        self._parts = {name: parts.get(name) or make_part(name, value, names) for name, value in flat.items()}

    @property
    def modules(self) -> list[nn.Module]:
        """All protected modules, and those whose state is registered."""
        return [part.module for part in self._modules]

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Of all protected modules, by name, tied ones once."""
        named: dict[int, tuple[str, nn.Parameter]] = {}
        for part in self._modules:
            for name, parameter in part.parameters.items():
                named.setdefault(id(parameter), (f"{part.name}.{name}", parameter))
        return list(named.values())

    def buffers(self) -> list[tuple[str, nn.Module, str]]:
        """(name, module, attribute) of the buffers of all protected modules, shared ones once."""
        found = {
            id(getattr(owner, name)): (path, owner, name) for m in self._modules for path, owner, name in m.buffers()
        }
        return list(found.values())

    def checked(self, whole: bool) -> dict[str, Tensor]:
        """What this rank holds of the tensors that must have the same bits on all groups, by name: parameters and
        buffers; ``whole``: what optimizers keep as well. The living ones, in wire form. In the loop's body they are
        what they were when it began, until the script steps its optimizer."""
        found: dict[str, Tensor] = dict(self.parameters())
        found |= {name: getattr(owner, key) for name, owner, key in self.buffers()}
        if whole:
            for part in self._parts.values():
                found |= part.moments()
        return {name: wire_form(tensor) for name, tensor in found.items()}

    def reshard(self) -> None:
        """Free what FSDP2 has gathered of the modules: see ModulePart.reshard."""
        for part in self._modules:
            part.reshard()

    def protects(self, value: object) -> bool:
        """Whether this very object is part of the state."""
        return any(each is value for each in self._objects)

    def mark(self) -> None:
        """A step begins: what ``capture(marked=True)`` gives until the next mark is the state of this moment."""
        for part in self._parts.values():
            part.mark()
        self._versions = self._tensor_versions()

    def mark_only(self, name: str) -> None:
        """Of one object, this moment's state counts."""
        self._parts[name].mark()

    def put_back(self, data: object) -> None:
        """Make the script's own plain data, and what has state_dict, what it was at the last ``mark``; not ``data``,
        which stands where the last commit left it."""
        for (name, part), value in zip(self._parts.items(), self._objects, strict=True):
            if name != FACTS and value is not data and isinstance(part, DictPart | StatefulPart):
                part.put_back()

    def own(self, data: object) -> list[bytes]:
        """What the script's own plain data, and what has state_dict, are now, but for ``data``: to be compared."""
        found = []
        for (name, part), value in zip(self._parts.items(), self._objects, strict=True):
            if name != FACTS and value is not data and isinstance(part, DictPart | StatefulPart):
                tensors: list[Tensor] = []
                hasher = xxhash.xxh3_128(plain.dump(part.pack(tensors)))
                for tensor in tensors:
                    feed(hasher, wire_form(tensor))
                found.append(hasher.digest())
        return found

    def _tensor_versions(self) -> int:
        if self._watched is None:
            self._watched = [tensor for part in self._modules for tensor in part.watched()]
        return sum(tensor._version for tensor in self._watched)

    def capture(self, marked: bool = False) -> tuple[bytes, list[Tensor]]:
        """(manifest, tensors). Deterministic in order; the tensors are contiguous and share memory with the living
        ones wherever those are dense. Raises UsageError if something in a state is no plain data.

        ``marked``: the user's code is in the middle of a step, so the plain data is taken from the last ``mark``;
        UsageError if that code has changed a protected tensor since, which nobody could undo.
        """
        if marked and self._versions != self._tensor_versions():
            raise UsageError(
                "a protected module was changed in the loop's body before step.batches had ended, so its state cannot "
                "be given to a group that comes back; change modules after the batches, where the optimizer steps"
            )
        tensors: list[Tensor] = []
        pack = [(name, part.pack_marked if marked else part.pack) for name, part in self._parts.items()]
        bodies = [[name, self._parts[name].kind, method(tensors)] for name, method in pack]
        return write_manifest(bodies, [spec_of(tensor) for tensor in tensors]), [wire_form(each) for each in tensors]

    def named(self) -> tuple[list[Any], dict[str, Tensor]]:
        """(objects, tensors): the ``objects`` of a manifest, and the living tensors in its order by names that are the
        same in every life of the script."""
        tensors: list[Tensor] = []
        objects = [[name, part.kind, part.pack(tensors)] for name, part in self._parts.items()]
        names = {i: name for key, _, body in objects for i, name in self._parts[key].places(body)}
        named: dict[str, Tensor] = {}
        for index, tensor in enumerate(tensors):
            name = names[index]
            named[name if name not in named else f"{name}#{index}"] = tensor  # a key may hold a dot
        return objects, named

    def models(self, objects: list[Any]) -> dict[int, Tensor]:
        """By index, the living tensor whose layout over the ranks of the group each tensor of these ``objects`` (of a
        manifest) is to take; none for tensors of which nothing here says how they are laid out."""
        fitting = [(self._parts[name], kind, body) for name, kind, body in objects if name in self._parts]
        return {
            i: tensor for part, kind, body in fitting if part.kind == kind for i, tensor in part.models(body).items()
        }

    def restore(self, manifest: bytes, tensors: Sequence[Tensor], whose: str = "the state of the job") -> None:
        """Take over a captured state: in place where a tensor is there, else (an optimizer that has not stepped yet)
        anew. ``tensors`` may be on any device; they are copied from and may be reused afterwards. ``whose`` begins
        the sentence about a misfit.

        Raises UsageError, with nothing written, if the objects here do not fit (names the first paths that differ),
        and ProtocolError if manifest and tensors do not fit each other.
        """
        parsed = _parse(manifest)
        specs = tensor_specs(manifest)
        _check_received(specs, tensors)
        sources = [spec.view(tensor) for spec, tensor in zip(specs, tensors, strict=True)]
        theirs = {name: (kind, body) for name, kind, body in parsed["objects"]}
        problems = _missing(theirs.keys(), self._parts.keys(), "protected object ")
        for name, part in self._parts.items():
            if name in theirs:
                kind, body = theirs[name]
                if kind != part.kind:
                    problems.append(f"{name} is a {part.kind} here but a {kind} there")
                else:
                    problems += part.check(body, sources)
        models = self.models(parsed["objects"]) if any(spec.sharded for spec in specs) else {}
        problems = problems or self._unplaced(theirs, specs, models)
        if problems:
            more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
            raise UsageError(
                f"{whose} does not fit the objects of this group: "
                + "; ".join(problems[:MAX_PROBLEMS])
                + more
                + ". Run the same script with the same arguments"
            )
        self._apply(theirs, Received(sources, specs, models))

    def _unplaced(self, theirs: dict[str, Any], specs: Sequence[TensorSpec], models: Mapping[int, Tensor]) -> list[str]:
        """Sentences about received parts of DTensors of which nothing here says what they are parts of."""
        places = (place for name, (_, body) in theirs.items() for place in self._parts[name].places(body))
        return [
            f"{path} is spread over the ranks of its group there, but nothing is in its place here that says how; "
            "have it there before job.steps"
            for index, path in places
            if specs[index].sharded
            and not (isinstance(m := models.get(index), DTensor) and live(m).shape == specs[index].shape)
        ]

    def _apply(self, theirs: dict[str, Any], received: Received) -> None:
        # Foreign objects first: their load_state_dict is the only thing that can still fail, and is undone then.
        undo: list[Callable[[], None]] = []
        try:
            for name, part in self._parts.items():
                if part.can_fail:
                    undo.append(part.undoing())
                    part.apply(theirs[name][1], received)
        except Exception as error:
            for put_back in undo:
                put_back()
            raise UsageError(
                f"{name} cannot take over the state of the job ({type(error).__name__}: {error}). Nothing was changed"
            ) from error
        for name, part in self._parts.items():
            if not part.can_fail:
                part.apply(theirs[name][1], received)

    def synced_places(self, manifest: bytes) -> dict[int, str]:
        """By index, the names of those tensors of a captured state that syncs alone change: see SyncPart. Raises
        ProtocolError if they are not in their places."""
        sync = self.sync
        assert sync is not None
        bodies = [body for name, kind, body in _parse(manifest)["objects"] if (name, kind) == (sync.name, sync.kind)]
        try:
            return sync.synced_places(*bodies)
        except (KeyError, TypeError, ValueError):
            raise ProtocolError(f"a peer's state of {sync.name} is malformed") from None

    def digest(self) -> str:
        """xxh3_128 in hexadecimal over everything.

        Equal for equal states whatever device they are on. CUDA tensors are copied to the host, one at a time.
        """
        tensors: list[Tensor] = []
        bodies = [[name, part.kind, part.pack_compared(tensors)] for name, part in self._parts.items()]
        specs = [spec_of(tensor) for tensor in tensors]
        hasher = xxhash.xxh3_128(plain.dump([bodies, [[spec.dtype_name, list(spec.shape)] for spec in specs]]))
        for tensor, spec in zip(tensors, specs, strict=True):
            feed(hasher, spec.view(wire_form(tensor)))
        return hasher.hexdigest()

    def describe(self) -> list[str]:
        """One line for every model tensor, "name dtype shape": what two groups must have in common."""
        return [line for part in self._parts.values() for line in part.describe()]

    @property
    def device(self) -> torch.device:
        """Where the first module's first tensor is; the CPU if there is none."""
        for part in self._parts.values():
            for device in part.devices():
                return device
        return torch.device("cpu")


def tensor_specs(manifest: bytes) -> list[TensorSpec]:
    """What the manifest's tensors look like on the wire, for who must make room for them: dtype, shape, device kind.
    Raises ProtocolError."""
    return [TensorSpec.from_list(item) for item in _parse(manifest)["tensors"]]


def write_manifest(objects: list[Any], specs: Sequence[TensorSpec]) -> bytes:
    """``objects``: [name, kind, packed body] of every protected object, whose tensors are ``specs``."""
    return plain.dump({"version": VERSION, "objects": objects, "tensors": [spec.to_list() for spec in specs]})


def _flattened(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The objects in ``value`` by name: lists, tuples and dicts of objects item by item, without what is None. A dict
    of plain data is one object."""
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _flattened(f"{name}[{index}]", item)
    elif isinstance(value, dict) and any(hasattr(item, "state_dict") for item in value.values()):
        for key, item in value.items():
            yield from _flattened(f"{name}.{key}", item)
    elif value is not None:
        yield name, value


def _check_sync(syncs: Sequence[SyncPart], flat: Mapping[str, Any]) -> None:
    """Raises UsageError for what cannot be protected beside low communication."""
    if not syncs:
        return
    if len(syncs) > 1:
        raise UsageError(
            f"job.protect names {syncs[0].name} and {syncs[1].name}; one job has one method of low communication, "
            "which can be given several modules and inner optimizers"
        )
    sync = syncs[0]
    local = {id(each) for _, each in sync.trained}
    for name, value in flat.items():
        if isinstance(value, nn.Module) and any(id(parameter) in local for parameter in value.parameters()):
            raise UsageError(
                f"job.protect names {name}, whose parameters are those of {sync.name}: each group has its own of them; "
                f"protect {sync.name} only"
            )
        if any(value is each for each in sync.sync.inner):
            raise UsageError(
                f"job.protect names {name}, the inner optimizer of {sync.name}: each group has a state of its own; "
                f"protect {sync.name} only"
            )


def _parse(manifest: bytes) -> dict[str, Any]:
    parsed = plain.load(manifest)
    if not isinstance(parsed, dict) or parsed.get("version") != VERSION:
        raise ProtocolError(f"a peer's state is not of version {VERSION}")
    objects, tensors = parsed.get("objects"), parsed.get("tensors")
    if not isinstance(objects, list) or not isinstance(tensors, list):
        raise ProtocolError("a peer's state lacks parts")
    for item in objects:
        if not (isinstance(item, list) and len(item) == 3 and all(isinstance(text, str) for text in item[:2])):
            raise ProtocolError("a peer's state has an object without name, kind and body")
    return parsed


def _check_received(specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> None:
    if len(specs) != len(tensors):
        raise ProtocolError(f"a state of {len(specs)} tensors came with {len(tensors)}")
    for index, (spec, tensor) in enumerate(zip(specs, tensors, strict=True)):
        if tensor.dtype != spec.dtype or tensor.shape != spec.wire_shape or not tensor.is_contiguous():
            raise ProtocolError(
                f"tensor {index} of a state is {tensor.dtype} {tuple(tensor.shape)}, its manifest says "
                f"{spec.dtype} {spec.wire_shape}"
            )


def _missing(theirs: Any, ours: Any, prefix: str) -> list[str]:
    """Names that only one side has, as sentences."""
    return [f"{prefix}{name} is missing here" for name in theirs if name not in ours] + [
        f"{prefix}{name} is only here" for name in ours if name not in theirs
    ]
