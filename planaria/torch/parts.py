"""The kinds of objects that a protected state consists of: how each is packed, checked and put in place."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from planaria.errors import ProtocolError, UsageError
from planaria.torch import plain

# --- tensors --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a state: ``shape`` and ``stride`` are those of the living one. On the wire it is contiguous: of
    that shape, or flat in memory order (``stride`` is not None then) if the living one is dense but permuted."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    device: str  # kind only: "cpu", "cuda"; the index is the receiver's business
    sharded: bool = False  # a DTensor's local part

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def wire_shape(self) -> tuple[int, ...]:
        return self.shape if self.stride is None else (math.prod(self.shape),)

    def view(self, wire: Tensor) -> Tensor:
        """The wire form in the living tensor's shape, sharing its memory."""
        return wire if self.stride is None else wire.as_strided(self.shape, self.stride)

    def empty(self, device: torch.device | str) -> Tensor:
        """A new tensor like the living one."""
        if self.stride is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def to_list(self) -> list[Any]:
        return [self.dtype_name, list(self.shape), self.stride and list(self.stride), self.device, self.sharded]

    @staticmethod
    def from_list(item: Any) -> TensorSpec:
        """Raises ProtocolError."""
        try:
            name, shape, stride, device, sharded = item
            dtype = getattr(torch, name)
            sizes = [*shape, *(stride or ())]
            good = isinstance(dtype, torch.dtype) and all(type(size) is int and size >= 0 for size in sizes)
            if not good or type(device) is not str or (stride is not None and len(stride) != len(shape)):
                raise ValueError(item)
            if stride is not None and not is_dense(shape, stride):
                raise ValueError(stride)
        except (TypeError, ValueError, AttributeError):
            raise ProtocolError(f"a peer's state has a malformed tensor {item!r:.80}") from None
        return TensorSpec(dtype, tuple(shape), None if stride is None else tuple(stride), device, bool(sharded))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Do the elements fill one stretch of memory, each its own place, in whatever order of dimensions?"""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def live(tensor: Tensor) -> Tensor:
    """What is read and written for ``tensor``: a DTensor's local part, and expanded dimensions once."""
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    for dim, (step, size) in enumerate(zip(local.stride(), local.shape, strict=True)):
        if step == 0 and size > 1:
            local = local.narrow(dim, 0, 1)
    return local


def wrapped(local: Tensor, like: Tensor) -> Tensor:
    """A rank's part of a tensor as the kind of tensor that ``like`` is: a DTensor laid out alike, or what it is."""
    if not isinstance(like, DTensor):
        return local
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def spec_of(tensor: Tensor) -> TensorSpec:
    local = live(tensor)
    permuted = not local.is_contiguous() and is_dense(local.shape, local.stride())
    stride = local.stride() if permuted else None
    sharded = isinstance(tensor, DTensor)
    return TensorSpec(local.dtype, tuple(local.shape), stride, local.device.type, sharded)


def wire_form(tensor: Tensor) -> Tensor:
    """The tensor as it is sent, see :class:`TensorSpec`; a copy only if the living one has gaps in its memory, or has
    yet to be conjugated or negated."""
    local = live(tensor).resolve_conj().resolve_neg()
    if local.is_contiguous():
        return local
    if is_dense(local.shape, local.stride()):
        return local.as_strided((local.numel(),), (1,))
    return local.contiguous()


def feed(hasher: xxhash.xxh3_128, tensor: Tensor) -> None:
    """Hash a tensor's contents, copied to the host if it is not there."""
    host = tensor.detach().cpu().contiguous()
    size = host.numel() * host.element_size()
    if size:
        # The memory itself, because numpy knows no bfloat16 (and need not be installed).
        hasher.update(memoryview((ctypes.c_char * size).from_address(host.data_ptr())))


def differs(path: str, ours: Tensor, theirs: Tensor) -> list[str]:
    """Sentences about how ``theirs`` (local form) does not fit ``ours`` (living)."""
    mine = live(ours)
    if mine.shape == theirs.shape and mine.dtype == theirs.dtype:
        return []
    return [
        f"{path} is {mine.dtype} of shape {tuple(mine.shape)} here but {theirs.dtype} of shape "
        f"{tuple(theirs.shape)} there"
    ]


def check_strided(path: str, tensor: Tensor) -> Tensor:
    """``tensor``, if it can be sent. Raises UsageError."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        what = "on the meta device" if tensor.device.type == "meta" else f"of layout {tensor.layout}"
        raise UsageError(f"{path} is {what}; only dense tensors with memory can be protected")
    return tensor


# --- parts ----------------------------------------------------------------------------------------------------


class Part:
    """One protected object. ``check`` returns sentences about what does not fit; ``apply`` follows only if all
    parts' checks returned none."""

    can_fail = False  # apply may raise: then what ``undoing`` gave before puts it right

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.kind = kind  # compared between peers

    def pack(self, tensors: list[Tensor]) -> Any:
        raise NotImplementedError

    def mark(self) -> None:
        """Remember the plain data as it is now. Called at every step boundary, so it must be cheap."""

    def pack_marked(self, tensors: list[Tensor]) -> Any:
        """As ``pack``, with the plain data of the last ``mark``."""
        return self.pack(tensors)

    def pack_compared(self, tensors: list[Tensor]) -> Any:
        """As ``pack``, of what has the same bits on all groups."""
        return self.pack(tensors)

    def moments(self) -> dict[str, Tensor]:
        """Tensors that change in an optimizer's step only; optimizers only."""
        return {}

    def check(self, body: Any, sources: Sequence[Tensor]) -> list[str]:
        raise NotImplementedError

    def apply(self, body: Any, received: Received) -> None:
        raise NotImplementedError

    def places(self, body: Any) -> Iterator[tuple[int, str]]:
        """(index, name) of every tensor in a packed body, for people and for files."""
        return plain.places(body, self.name)

    def models(self, body: Any) -> dict[int, Tensor]:
        """By index, the living tensor whose layout over the ranks of the group each tensor of a packed body is to
        take: the one in its place."""
        tensors: list[Tensor] = []
        own = self.pack(tensors)
        living = {name: tensors[index] for index, name in self.places(own)}
        return {index: living[name] for index, name in self.places(body) if name in living}

    def describe(self) -> list[str]:
        return []

    def devices(self) -> Iterator[torch.device]:
        """Where the object's tensors are; modules only."""
        return iter(())

    def undoing(self) -> Callable[[], None]:
        """What puts the object back to how it is now."""
        raise NotImplementedError


def make_part(name: str, value: Any, parameter_names: dict[int, str]) -> Part:
    """The part for an object that is no module. Raises UsageError if it has no state that could be given to peers."""
    if isinstance(value, Part):
        return value
    if isinstance(value, torch.optim.Optimizer):
        from planaria.torch.optimizers import OptimizerPart

        return OptimizerPart(name, value, parameter_names)
    if type(value) is dict:
        return DictPart(name, value)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return StatefulPart(name, value)
    raise UsageError(
        f"{name} is a {type(value).__name__}, which cannot be protected: it must be a module, an optimizer, a dict of "
        "plain data, or have state_dict and load_state_dict"
    )


class ModulePart(Part):
    """All parameters and buffers of a module, non-persistent buffers included, tied ones once.

    The parameters are those of the beginning. FSDP2 puts others in their places while they are gathered, which they
    stay after a forward pass without a backward (an evaluation); but what the optimizer steps are these.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, "module")
        self.module = module
        self._sharded = [each for each in module.modules() if isinstance(each, FSDPModule)]
        self.reshard()
        self.parameters = dict(module.named_parameters())

    def reshard(self) -> None:
        """Free what FSDP2 has gathered: it is a copy, and does not follow its parameters. No collective is needed, but
        all ranks of the group must do so at the same point, or one of them alone would gather again."""
        for module in self._sharded:
            module.reshard()

    def _tensors(self) -> dict[str, Tensor]:
        named = {**self.parameters, **dict(self.module.named_buffers())}
        return {name: check_strided(f"{self.name}.{name}", tensor) for name, tensor in named.items()}

    def watched(self) -> Iterator[Tensor]:
        """Parameters and buffers."""
        return iter(self._tensors().values())

    def buffers(self) -> Iterator[tuple[str, nn.Module, str]]:
        """(name, module, attribute) of every buffer: it may be replaced."""
        for path, owner in self.module.named_modules():
            for name, _ in owner.named_buffers(recurse=False):
                yield ".".join(filter(None, (self.name, path, name))), owner, name

    def pack(self, tensors: list[Tensor]) -> Any:
        body = []
        for name, tensor in self._tensors().items():
            body.append([name, len(tensors)])
            tensors.append(tensor)
        return body

    def places(self, body: Any) -> Iterator[tuple[int, str]]:
        return ((index, f"{self.name}.{name}") for name, index in body)

    def _theirs(self, body: Any, sources: Sequence[Tensor]) -> dict[str, Tensor]:
        try:
            return {str(name): sources[index] for name, index in body}
        except (TypeError, ValueError, IndexError):
            raise ProtocolError(f"a peer's state of module {self.name} is malformed") from None

    def check(self, body: Any, sources: Sequence[Tensor]) -> list[str]:
        theirs, ours = self._theirs(body, sources), self._tensors()
        problems = [f"{self.name}.{name} is missing here" for name in theirs if name not in ours]
        for name, tensor in ours.items():
            if name not in theirs:
                problems.append(f"{self.name}.{name} is only here")
            else:
                problems += differs(f"{self.name}.{name}", tensor, theirs[name])
        return problems

    def apply(self, body: Any, received: Received) -> None:
        theirs = self._theirs(body, received.sources)
        self.reshard()
        for name, tensor in self._tensors().items():
            live(tensor).copy_(theirs[name])

    def describe(self) -> list[str]:
        return [
            f"{self.name}.{name} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            for name, tensor in self._tensors().items()
        ]

    def devices(self) -> Iterator[torch.device]:
        return (tensor.device for tensor in self._tensors().values())


class DictPart(Part):
    """A dictionary of plain data, which stays the same object."""

    def __init__(self, name: str, value: dict[Any, Any]) -> None:
        super().__init__(name, "dict")
        self._value = value
        self._marked: tuple[Any, list[Tensor]] = (None, [])

    def pack(self, tensors: list[Tensor]) -> Any:
        return plain.pack(self._value, tensors, self.name)

    def mark(self) -> None:
        self._marked = _packed(self)

    def pack_marked(self, tensors: list[Tensor]) -> Any:
        return plain.pack(plain.unpack(*self._marked), tensors, self.name)

    def put_back(self) -> None:
        """What it was at the last ``mark``."""
        marked = plain.unpack(*self._marked)
        self._value.clear()
        self._value.update(marked)

    def check(self, body: Any, sources: Sequence[Tensor]) -> list[str]:
        if type(plain.unpack(body, sources)) is not dict:
            raise ProtocolError(f"a peer's state of {self.name} is no dict")
        return []

    def apply(self, body: Any, received: Received) -> None:
        theirs = plain.unpack(body, received)
        self._value.clear()
        self._value.update(theirs)


class StatefulPart(Part):
    """Anything with state_dict and load_state_dict whose state is plain data and tensors."""

    can_fail = True

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(name, type(value).__qualname__)
        self._value = value
        self._marked: tuple[Any, list[Tensor]] = (None, [])

    def pack(self, tensors: list[Tensor]) -> Any:
        return plain.pack(self._value.state_dict(), tensors, self.name)

    def mark(self) -> None:
        self._marked = _packed(self)

    def pack_marked(self, tensors: list[Tensor]) -> Any:
        return plain.pack(plain.unpack(*self._marked), tensors, self.name)

    def put_back(self) -> None:
        """What it was at the last ``mark``."""
        self._value.load_state_dict(plain.unpack(*self._marked))

    def check(self, body: Any, sources: Sequence[Tensor]) -> list[str]:
        plain.unpack(body, sources)
        return []

    def apply(self, body: Any, received: Received) -> None:
        self._value.load_state_dict(plain.unpack(body, received))

    def undoing(self) -> Callable[[], None]:
        tensors: list[Tensor] = []
        body = self.pack(tensors)
        copies = [tensor.detach().clone() for tensor in tensors]
        return lambda: self._value.load_state_dict(plain.unpack(body, copies))


def _packed(part: Part) -> tuple[Any, list[Tensor]]:
    tensors: list[Tensor] = []
    return part.pack(tensors), tensors


class Received(Sequence[Tensor]):
    """Received tensors, each copied when it is taken: objects keep what they are given, receivers reuse theirs.
    ``models`` as of Part.models: what was a DTensor becomes one."""

    def __init__(self, sources: Sequence[Tensor], specs: Sequence[TensorSpec], models: Mapping[int, Tensor]) -> None:
        self.sources = sources
        self.specs = specs
        self._models = models

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: Any) -> Any:
        spec: TensorSpec = self.specs[index]
        made = spec.empty(spec.device).copy_(self.sources[index])
        return wrapped(made, self._models[index]) if spec.sharded else made
