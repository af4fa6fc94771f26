"""State that goes through the script's own checkpoint functions: what ``job.register`` names.

``save`` either returns the state, nested dictionaries and lists of tensors and plain data, and ``load`` is given the
same; or it writes into the binary file that it is given, and ``load`` reads from one. What is in a file is the
script's business: it travels as one tensor of bytes that nothing here looks into.
"""

from __future__ import annotations

import inspect
import io
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planaria.errors import PlanariaError, ProtocolError, UsageError
from planaria.torch import plain
from planaria.torch import random as seeding
from planaria.torch.parts import ModulePart, Part, Received, check_strided, feed, live, spec_of, wire_form

NAME = "registered"  # in messages, and in the names of tensors in checkpoints
MODEL = "model"
Look = tuple[Any, list[tuple[Any, ...]]]


class RegisteredPart(Part):
    """``model``: the modules that are trained. Their gradients are exchanged; what of them travels is for ``save`` to
    say. ``seed`` is that of all generators while a function of the script runs: what it keeps of them is alike then on
    all groups, and they go on as if it had not run.

    Raises UsageError if these are no functions, or no model.
    """

    def __init__(self, save: Callable[..., Any], load: Callable[[Any], Any], model: Any, seed: int, where: str) -> None:
        self._save, self._load, self._seed, self.where = save, load, seed, where
        self.in_file = _takes_a_file(save)
        _check_load(load)
        super().__init__(NAME, "file" if self.in_file else "state")
        self.modules = [ModulePart(name, module) for name, module in _modules(MODEL, model)]
        self._worked = False  # save did, once

    # --- saving ----------------------------------------------------------------------------------------------

    def pack(self, tensors: list[Tensor]) -> Any:
        """Raises UsageError if what ``save`` gives cannot travel, PlanariaError if it fails although it worked before:
        that can have causes outside of the script."""
        file = _File()
        try:
            with seeding.aside(self._seed):
                state = self._save(file) if self.in_file else self._save()
        except Exception as error:
            self._fail("save", error, PlanariaError if self._worked else UsageError)
        if self.in_file:
            content = file.getbuffer()
            if not len(content):
                raise UsageError(f"{self.where}: save wrote nothing; it must write into the file that it is given")
            packed: Any = [len(tensors), self._digest()]
            tensors.append(torch.frombuffer(content, dtype=torch.uint8))
        elif type(state) not in (dict, OrderedDict, list, tuple):
            raise UsageError(
                f"{self.where}: save returned {'nothing' if state is None else f'a {type(state).__name__}'}; it must "
                "return the state, a dict or a list, or take a file to write it to: save=lambda file: …"
            )
        else:
            content = plain.pack(state, tensors, self.name)
            places = dict(plain.places(content, self.name))
            for index, path in places.items():
                tensors[index] = _whole(check_strided(path, tensors[index]))
            packed = [content, self._likes({index: tensors[index] for index in places})]
        self._worked = True
        return packed

    def _likes(self, tensors: Mapping[int, Tensor]) -> list[list[Any]]:
        """[index, name] of DTensors, and of a parameter that is laid out alike: an optimizer that has not stepped yet
        could not say how what it gets is spread over the ranks of its group."""
        known = {_layout(p): name for name, p in reversed(self._parameters.items()) if isinstance(p, DTensor)}
        spread = {index: _layout(tensor) for index, tensor in tensors.items() if isinstance(tensor, DTensor)}
        return [[index, known[layout]] for index, layout in spread.items() if layout in known]

    @property
    def _parameters(self) -> dict[str, Tensor]:
        return {f"{module.name}.{name}": p for module in self.modules for name, p in module.parameters.items()}

    def pack_compared(self, tensors: list[Tensor]) -> Any:
        # Equal states need not be equal in a file: a pickle depends on which equal strings are one object.
        return [module.pack(tensors) for module in self.modules] if self.in_file else self.pack(tensors)

    def _digest(self) -> str:
        """Of the model, whose weights must be the same after ``load``, whatever the file holds beside them."""
        hasher = xxhash.xxh3_128()
        for tensor in (tensor for module in self.modules for tensor in module.watched()):
            feed(hasher, wire_form(tensor))
        return hasher.hexdigest()

    def look(self) -> Look | None:
        """The state as it is now, to be compared; None for one in a file."""
        if self.in_file:
            return None
        tensors: list[Tensor] = []
        packed = self.pack(tensors)
        return packed, [_print(tensor) for tensor in tensors]

    def check_unchanged(self, before: Look | None) -> None:
        """A step's shards have no part in the state. Raises UsageError naming what differs since ``before``."""
        if before is None or (now := self.look()) is None:
            return
        changed = plain.difference(before[0][0], now[0][0], self.name)
        if changed is None:
            changed = next((path for i, path in self.places(now[0]) if before[1][i] != now[1][i]), None)
        if changed is not None:
            raise UsageError(
                f"{self.where}: {changed}, as save gives it, changed between the end of the step before and the end "
                "of this step's shards. A group that comes back meanwhile would get the wrong state: change it after "
                "the shards, where the optimizer steps; and what is not the same on all groups and at every call (a "
                "time, a sum over the own samples) must be kept out of it"
            )

    # --- loading ---------------------------------------------------------------------------------------------

    def check(self, body: Any, sources: Sequence[Tensor]) -> list[str]:
        try:
            content, more = body
            if self.in_file:
                sources[content]
            else:
                plain.unpack(content, sources)
                {int(index): str(name) for index, name in more}
        except (TypeError, ValueError, IndexError):
            raise ProtocolError("a peer's registered state is malformed") from None
        return []

    def _open(self, body: Any, sources: Sequence[Tensor]) -> io.BytesIO:
        content: Any = sources[body[0]].cpu().numpy()
        return io.BytesIO(memoryview(content))

    def apply(self, body: Any, received: Received) -> None:
        for module in self.modules:
            module.reshard()
        state: Any = self._open(body, received.sources) if self.in_file else plain.unpack(body[0], received)
        try:
            with seeding.aside(self._seed):
                self._load(state)
        except Exception as error:
            self._fail("load", error, UsageError)
        for module in self.modules:
            module.reshard()
            if odd := [name for name, p in module.module.named_parameters() if p is not module.parameters.get(name)]:
                raise UsageError(
                    f"{self.where}: load replaced the parameter {module.name}.{odd[0]} by another object, whose "
                    "gradients nobody would exchange; copy into those that are there (no assign=True)"
                )
        if (lost := self._lost(body, received)) is not None:
            raise UsageError(
                f"{self.where}: after load took over the state of the job, {lost} is not what it was given; load must "
                "restore exactly what save gives"
            )

    def _lost(self, body: Any, received: Received) -> str | None:
        """What of the given state is not there now; of one in a file, only the model is known."""
        if self.in_file:
            return None if self._digest() == body[1] else "the model"
        tensors: list[Tensor] = []
        packed = self.pack(tensors)
        if differ := plain.difference(body[0], packed[0], self.name):
            return differ
        for (theirs, path), (ours, _) in zip(self.places(body), self.places(packed), strict=True):
            if not _same_bits(live(tensors[ours]), received.sources[theirs]):
                return path
        return None

    def _fail(self, what: str, error: Exception, kind: type[PlanariaError]) -> NoReturn:
        traceback.print_exception(error, file=sys.stderr)  # it is about code of the script
        raise kind(f"{self.where}: {what}, registered with job.register, failed: {type(error).__name__}: {error}")

    # --- what it consists of ---------------------------------------------------------------------------------

    def places(self, body: Any) -> Iterator[tuple[int, str]]:
        return iter([(body[0], self.name)]) if self.in_file else plain.places(body[0], self.name)

    def models(self, body: Any) -> dict[int, Tensor]:
        if self.in_file:
            return {}
        parameters = self._parameters
        return {index: parameters[name] for index, name in body[1] if name in parameters} | super().models(body)

    def describe(self) -> list[str]:
        return [line for module in self.modules for line in module.describe()]

    def devices(self) -> Iterator[torch.device]:
        return (device for module in self.modules for device in module.devices())


def _whole(tensor: Tensor) -> Tensor:
    """With a place in memory for each of its elements: ``load`` is given all of them."""
    again = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.contiguous() if again and not isinstance(tensor, DTensor) else tensor


def _layout(tensor: Tensor) -> Any:
    return tensor.shape, getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)


class _File(io.BytesIO):
    def close(self) -> None:
        """What was written is still to be read: a script may close what it writes to."""


def _takes_a_file(save: Any) -> bool:
    required = _required("save", save)
    if len(required) > 1 or any(each.kind is each.KEYWORD_ONLY for each in required):
        raise UsageError(
            f"job.register: save needs the arguments {', '.join(each.name for each in required)}; it is called without "
            "any, to return the state, or with a file to write it to: wrap it, as in save=lambda file: …"
        )
    return len(required) == 1


def _check_load(load: Any) -> None:
    required = _required("load", load)
    try:
        inspect.signature(load).bind(None)
    except TypeError:
        names = ", ".join(each.name for each in required) or "none"
        raise UsageError(
            f"job.register: load is called with one argument, what save gave; it needs {names}: wrap it, as in "
            "load=lambda state: …"
        ) from None


def _required(name: str, function: Any) -> list[inspect.Parameter]:
    """The arguments that a call cannot do without."""
    if not callable(function):
        raise UsageError(f"job.register: {name} must be a function, not a {type(function).__name__}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise UsageError(f"job.register: what {name} takes cannot be seen; wrap it: {name}=lambda …: …") from None
    return [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _modules(name: str, model: Any) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, nn.Module):
        yield name, model
    elif isinstance(model, list | tuple | dict):
        items = model.items() if isinstance(model, dict) else enumerate(model)
        for key, each in items:
            yield from _modules(f"{name}.{key}" if isinstance(model, dict) else f"{name}[{key}]", each)
    else:
        raise UsageError(
            f"job.register: {name} is a {type(model).__name__}; it must be the module that is trained, or a list or a "
            "dict of them"
        )


def _print(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for equal contents of equal form."""
    spec, hasher = spec_of(tensor), xxhash.xxh3_128()
    feed(hasher, wire_form(tensor))
    return (*spec.to_list()[:2], hasher.hexdigest())


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    raw = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other.to(one.device)))
    return torch.equal(*raw)
