"""A protected optimizer: its state exactly as it is.

``Optimizer.load_state_dict`` is not used because it casts state to the parameter's dtype and replaces every tensor;
here state keeps its dtypes, and tensors that are there are written in place (captured graphs hold their addresses).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from planaria.errors import ProtocolError, UsageError
from planaria.torch import plain
from planaria.torch.parts import Part, Received, TensorSpec, differs, live, wrapped

# Of every optimizer, or of its scheduler: nothing that is state of its steps.
_NO_STATE = frozenset({"defaults", "param_groups", "state", "_opt_called", *vars(torch.optim.SGD([torch.zeros(1)]))})


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of the plain data and tensors that a kind of optimizer keeps beside ``state``, as a count of its steps."""
    found = {}
    for key, value in vars(optimizer).items():
        if key in _NO_STATE:
            continue
        tensors: list[Tensor] = []
        with suppress(UsageError):
            packed = plain.pack(value, tensors, key)
            found[key] = plain.unpack(packed, [tensor.detach().clone() for tensor in tensors])
    return found


class OptimizerPart(Part):
    def __init__(self, name: str, optimizer: torch.optim.Optimizer, parameter_names: dict[int, str]) -> None:
        super().__init__(name, type(optimizer).__qualname__)
        self._optimizer = optimizer
        self._parameter_names = parameter_names
        self._marked: list[dict[str, Any]] = []

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _groups(self) -> list[dict[str, Any]]:
        """Param groups with the number of parameters in place of the parameters."""
        return [{**group, "params": len(group["params"])} for group in self._optimizer.param_groups]

    def _path(self, index: int) -> str:
        parameters = self._parameters()  # a peer's, or a checkpoint's, may be more
        name = self._parameter_names.get(id(parameters[index]), index) if index < len(parameters) else index
        return f"{self.name}.state[{name}]"

    def moments(self) -> dict[str, Tensor]:
        """The tensors that the optimizer keeps for its parameters, by name."""
        return {
            f"{self._path(index)}.{key}": value
            for index, parameter in enumerate(self._parameters())
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def mark(self) -> None:
        self._marked = self._groups()  # the state itself changes in optimizer.step only

    def pack(self, tensors: list[Tensor]) -> Any:
        return self._pack(self._groups(), tensors)

    def pack_marked(self, tensors: list[Tensor]) -> Any:
        return self._pack(self._marked, tensors)

    def _pack(self, hyperparameters: list[dict[str, Any]], tensors: list[Tensor]) -> Any:
        groups = [
            plain.pack(group, tensors, f"{self.name}.param_groups[{index}]")
            for index, group in enumerate(hyperparameters)
        ]
        state = [
            [index, plain.pack(self._optimizer.state[parameter], tensors, self._path(index))]
            for index, parameter in enumerate(self._parameters())
            if parameter in self._optimizer.state
        ]
        return {"groups": groups, "state": state}

    def places(self, body: Any) -> Iterator[tuple[int, str]]:
        for index, group in enumerate(body["groups"]):
            yield from plain.places(group, f"{self.name}.param_groups[{index}]")
        yield from self.state_places(body)

    def state_places(self, body: Any) -> Iterator[tuple[int, str]]:
        """Of what is not options."""
        for index, item in body["state"]:
            yield from plain.places(item, self._path(index))

    def models(self, body: Any) -> dict[int, Tensor]:
        """Of a parameter's state that is not there yet, the parameter is the model."""
        parameters = self._parameters()
        found = {
            place: parameters[index]
            for index, item in body["state"]
            if index < len(parameters)
            for place, _ in plain.places(item, "")
        }
        return found | super().models(body)

    def _unpack(self, body: Any, sources: Sequence[Tensor]) -> tuple[list[dict[str, Any]], dict[int, Any]]:
        try:
            groups = [plain.unpack(group, sources) for group in body["groups"]]
            state = {index: plain.unpack(item, sources) for index, item in body["state"]}
            sizes = [int(group["params"]) for group in groups]
            if not all(type(index) is int and 0 <= index < sum(sizes) for index in state):
                raise ValueError("state of a parameter that is not there")
            if not all(isinstance(item, dict) for item in state.values()):
                raise ValueError("state that is no dict")
        except (TypeError, ValueError, KeyError) as error:
            raise ProtocolError(f"a peer's state of optimizer {self.name} is malformed: {error}") from None
        return groups, state

    def check(self, body: Any, sources: Sequence[Tensor]) -> list[str]:
        theirs, state = self._unpack(body, sources)
        ours = self._groups()
        if len(theirs) != len(ours):
            return [f"{self.name} has {len(ours)} param_groups here but {len(theirs)} there"]
        problems = []
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            path = f"{self.name}.param_groups[{index}]"
            if mine["params"] != other["params"]:
                problems.append(f"{path} has {mine['params']} parameters here but {other['params']} there")
            problems += [f"{path}.{key} is missing here" for key in other if key not in mine]
            problems += [f"{path}.{key} is only here" for key in mine if key not in other]
            problems += _compare(path, mine, other)
        if problems:
            return problems  # parameters may be shifted: comparing their state would only confuse
        for index, item in state.items():
            existing = self._optimizer.state.get(self._parameters()[index], {})
            problems += _compare(self._path(index), existing, item)
        return problems

    def apply(self, body: Any, received: Received) -> None:
        groups, state = self._unpack(body, received.sources)
        by_id = {id(source): spec for source, spec in zip(received.sources, received.specs, strict=True)}
        for group, theirs in zip(self._optimizer.param_groups, groups, strict=True):
            del theirs["params"]
            for key in theirs:
                group[key] = _adopt(theirs[key], group[key], group["params"][0] if group["params"] else None, by_id)
        for index, parameter in enumerate(self._parameters()):
            existing = self._optimizer.state.get(parameter, {})
            if index in state:
                self._optimizer.state[parameter] = _adopt(state[index], existing, parameter, by_id)
            else:
                self._optimizer.state.pop(parameter, None)


def _compare(path: str, ours: Any, theirs: Any) -> list[str]:
    """Sentences about tensors that are on both sides but are not alike."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return differs(path, ours, theirs)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [line for key in theirs if key in ours for line in _compare(f"{path}.{key}", ours[key], theirs[key])]
    return []


def _adopt(theirs: Any, ours: Any, parameter: Tensor | None, specs: dict[int, TensorSpec]) -> Any:
    """``theirs`` with its tensors in place of, or written into, those of ``ours`` at the same place."""
    if isinstance(theirs, Tensor):
        spec = specs[id(theirs)]
        if isinstance(ours, Tensor) and ours.device.type == spec.device and live(ours).shape == theirs.shape:
            live(ours).copy_(theirs)
            return ours
        return _create(theirs, spec, parameter)
    if isinstance(theirs, dict):
        known = ours if isinstance(ours, dict) else {}
        items = {key: _adopt(item, known.get(key), parameter, specs) for key, item in theirs.items()}
        return type(theirs)(items)
    if isinstance(theirs, list | tuple) and not isinstance(theirs, torch.Size):
        return type(theirs)(_adopt(item, None, parameter, specs) for item in theirs)
    return theirs


def _create(theirs: Tensor, spec: TensorSpec, parameter: Tensor | None) -> Tensor:
    """A new tensor like the peer's: on the host if it was there, else on the parameter's device."""
    on_host = spec.device == "cpu" or parameter is None
    made = spec.empty("cpu" if on_host or parameter is None else parameter.device).copy_(theirs)
    return wrapped(made, parameter) if spec.sharded and parameter is not None else made
