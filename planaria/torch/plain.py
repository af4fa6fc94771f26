"""Plain data as bytes: the typed JSON in which everything but the tensors of a state travels.

Exact both ways: ``decode(encode(x)) == x`` with the same types, floats bit for bit, dictionaries with their keys'
types and their order. Tensors are taken out into a flat list and leave their index behind. Never pickle: decoding
can make nothing but the types named here, and runs nothing.

JSON's own null, booleans, strings, integers, finite floats and arrays stand for themselves; everything else is an
object with exactly one key, its tag: ``{"tuple": [...]}``, ``{"dict": [[key, value], ...]}``, ``{"float": hex}``…
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from planaria.errors import ProtocolError, UsageError

# Deeper data is a loop in all likelihood; the JSON parser itself would stop at Python's recursion limit of 1000.
MAX_DEPTH = 100
# Integers beyond 64 bits go as hexadecimal digits: Python refuses to parse very long decimal ones.
_SMALL = 1 << 63
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}


def encode(value: Any, tensors: list[Tensor], path: str) -> bytes:
    """``value`` as bytes; its tensors are appended to ``tensors`` (the very objects, no copies).

    ``path`` names the value in errors. Raises UsageError that names the first part which is not plain data.
    """
    return dump(pack(value, tensors, path))


def decode(data: bytes, tensors: Sequence[Tensor]) -> Any:
    """Inverse of :func:`encode`. Raises ProtocolError for anything that it did not make."""
    return unpack(load(data), tensors)


def dump(packed: Any) -> bytes:
    """JSON bytes of a packed value."""
    return json.dumps(packed, separators=(",", ":"), allow_nan=False).encode("ascii")


def load(data: bytes) -> Any:
    """Packed value of JSON bytes. Raises ProtocolError."""
    try:
        return json.loads(data, parse_constant=_no_constants)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"plain data of a peer cannot be read: {error}") from None


def pack(value: Any, tensors: list[Tensor], path: str, depth: int = 0) -> Any:
    """``value`` in JSON's own types. Raises UsageError like :func:`encode`."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_SMALL <= value < _SMALL else {"int": f"{value:x}"}
    if kind is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if depth >= MAX_DEPTH:
        raise UsageError(f"{path[:200]}… is nested deeper than {MAX_DEPTH} levels, or contains itself")
    if kind is list or kind is tuple:
        items = [pack(item, tensors, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind in _DICTS:
        return {_DICTS[kind]: _pack_items(value, tensors, path, depth)}
    return _pack_rare(value, tensors, path)


def _pack_items(value: dict[Any, Any], tensors: list[Tensor], path: str, depth: int) -> list[list[Any]]:
    items = []
    for key, item in value.items():
        if type(key) not in (str, int, bool):
            raise UsageError(f"{path} has the key {key!r:.80}; keys must be str, int or bool to be given to peers")
        inner = f"{path}.{key}" if type(key) is str else f"{path}[{key!r}]"
        items.append([pack(key, tensors, inner, depth), pack(item, tensors, inner, depth + 1)])
    return items


def _pack_rare(value: Any, tensors: list[Tensor], path: str) -> Any:
    kind = type(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if kind is torch.Size:
        return {"size": list(value)}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    raise UsageError(
        f"{path} is {_describe(value)}; only None, bool, int, float, str, bytes, list, tuple, dict, tensors, "
        "torch.dtype and torch.Size can be given to peers. Convert it, or keep it out of the protected state"
    )


def _describe(value: Any) -> str:
    kind = type(value)
    if getattr(value, "__name__", "") == "<lambda>":
        return "a lambda"
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def unpack(packed: Any, tensors: Sequence[Tensor]) -> Any:
    """Inverse of :func:`pack`. Raises ProtocolError."""
    try:
        return _unpack(packed, tensors)
    except RecursionError:
        raise ProtocolError(
            f"plain data of a peer is nested deeper than the {MAX_DEPTH} levels that are sent"
        ) from None


def _unpack(packed: Any, tensors: Sequence[Tensor]) -> Any:
    if packed is None or isinstance(packed, bool | int | float | str):
        return packed
    if isinstance(packed, list):
        return [_unpack(item, tensors) for item in packed]
    if not isinstance(packed, dict) or len(packed) != 1:
        raise ProtocolError("plain data of a peer has an object without exactly one tag")
    ((tag, body),) = packed.items()
    if tag == "tensor":
        return _tensor(body, tensors)
    if tag in ("dict", "ordered", "counter"):
        return _unpack_dict(tag, body, tensors)
    if tag == "tuple":
        return tuple(_unpack(item, tensors) for item in _expect(body, list))
    try:
        return _SCALARS[tag](body)
    except (KeyError, TypeError, ValueError, AttributeError, struct.error, binascii.Error):
        raise ProtocolError(f"plain data of a peer has a malformed {tag!r:.40}") from None


def places(packed: Any, path: str) -> Iterator[tuple[int, str]]:
    """(index, path) of every tensor in a packed value; ``path`` names the value, and paths read as those of errors."""
    if isinstance(packed, list):
        for index, item in enumerate(packed):
            yield from places(item, f"{path}[{index}]")
    elif isinstance(packed, dict):
        ((tag, body),) = packed.items()
        if tag == "tensor":
            yield body, path
        elif tag == "tuple":
            yield from places(body, path)
        elif tag in _DICTS.values():
            for key, item in body:
                yield from places(item, _inner(path, key))


def difference(one: Any, other: Any, path: str) -> str | None:
    """The first path at which two packed values differ, but for their tensors; None if they do not."""
    if type(one) is not type(other):
        return path
    if isinstance(one, list):
        if len(one) != len(other):
            return path
        pairs = [(a, b, f"{path}[{index}]") for index, (a, b) in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, dict) and one.keys() == other.keys():
        ((tag, body),) = one.items()
        if tag in _DICTS.values():
            if repr([key for key, _ in body]) != repr([key for key, _ in other[tag]]):
                return f"the keys of {path} (or their order)"
            pairs = [(a, b, _inner(path, key)) for (key, a), (_, b) in zip(body, other[tag], strict=True)]
        elif tag == "tuple":
            pairs = [(body, other[tag], path)]
        elif tag == "tensor":
            return None  # its place in a list of tensors
        else:
            return None if body == other[tag] else path
    else:
        return None if repr(one) == repr(other) else path  # 0.0 is not -0.0
    return next(filter(None, (difference(*pair) for pair in pairs)), None)


def _inner(path: str, key: Any) -> str:
    return f"{path}.{key}" if type(key) is str else f"{path}[{unpack(key, ())!r}]"


def _tensor(body: Any, tensors: Sequence[Tensor]) -> Tensor:
    if type(body) is not int or not 0 <= body < len(tensors):
        raise ProtocolError(f"plain data of a peer names tensor {body!r:.40} of {len(tensors)}")
    return tensors[body]


def _unpack_dict(tag: str, body: Any, tensors: Sequence[Tensor]) -> dict[Any, Any]:
    result: dict[Any, Any] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}[tag]()
    for pair in _expect(body, list):
        if len(_expect(pair, list)) != 2:
            raise ProtocolError("plain data of a peer has a dictionary item that is no pair")
        key = _unpack(pair[0], tensors)
        if type(key) not in (str, int, bool):
            raise ProtocolError(f"plain data of a peer has a dictionary key of type {type(key).__name__}")
        result[key] = _unpack(pair[1], tensors)
    return result


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ProtocolError(f"plain data of a peer has a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _float(body: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(body))[0]
    return value


def _dtype(body: str) -> torch.dtype:
    value = getattr(torch, body)
    if not isinstance(value, torch.dtype):
        raise TypeError(body)
    return value


def _no_constants(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": lambda body: int(body, 16),
    "float": _float,
    "bytes": lambda body: base64.b64decode(body, validate=True),
    "size": lambda body: torch.Size(body),
    "dtype": _dtype,
}
