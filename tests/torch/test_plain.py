"""Plain data travels exactly, and nothing else travels."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.errors import ProtocolError, UsageError
from planaria.torch.plain import MAX_DEPTH, decode, difference, encode, pack

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(width=64),
    st.text(),
    st.binary(max_size=20),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
)
KEYS = st.one_of(st.text(max_size=5), st.integers(), st.booleans())


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(KEYS, children, max_size=4)
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        dicts,
        dicts.map(OrderedDict),
        st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter),
    )


PLAIN = st.recursive(SCALARS, containers, max_leaves=8)


def same(first: Any, second: Any) -> bool:
    """Equal with equal types all the way down, floats bit for bit, dictionaries in order."""
    if type(first) is not type(second):
        return False
    if isinstance(first, float):
        return struct.pack("d", first) == struct.pack("d", second)
    if isinstance(first, dict):
        return same(list(first.items()), list(second.items()))
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


@given(PLAIN)
def test_round_trip(value: Any) -> None:
    assert same(decode(encode(value, [], "x"), []), value)


@given(PLAIN)
def test_deterministic_bytes(value: Any) -> None:
    data = encode(value, [], "x")
    assert encode(decode(data, []), [], "x") == data


@given(PLAIN, PLAIN)
def test_differences(one: Any, other: Any) -> None:
    assert difference(pack(one, [], "x"), pack(one, [], "x"), "x") is None
    assert (difference(pack(one, [], "x"), pack(other, [], "x"), "x") is None) == same(one, other)


@pytest.mark.parametrize(
    ("one", "other", "path"),
    [
        ({"a": [1, (2, {3: 0.0})]}, {"a": [1, (2, {3: -0.0})]}, "x.a[1][1][3]"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "the keys of x (or their order)"),
        ({1: 0}, {True: 0}, "the keys of x (or their order)"),
        ([1], [True], "x[0]"),
        ([torch.ones(1), {}], [torch.zeros(2), Counter()], "x[1]"),
    ],
)
def test_differences_are_named(one: Any, other: Any, path: str) -> None:
    assert difference(pack(one, [], "x"), pack(other, [torch.ones(3)], "x"), "x") == path


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -math.nan, -0.0, 5e-324, 0.1, 1e16, 1.0])
def test_floats_keep_their_bits(value: float) -> None:
    assert same(decode(encode([value], [], "x"), []), [value])


def test_very_long_integers() -> None:
    value = -(7**9000)  # more decimal digits than Python agrees to parse
    assert decode(encode(value, [], "x"), []) == value


def test_keys_keep_type_and_order() -> None:
    value = {"1": 1, 1: 2, "b": 3, "a": 4}
    assert list(decode(encode(value, [], "x"), []).items()) == list(value.items())
    assert [type(key) for key in decode(encode({True: 1, 0: 2}, [], "x"), [])] == [bool, int]


def test_tensors_go_to_the_list() -> None:
    first, second = torch.ones(2), torch.nn.Parameter(torch.zeros(()))
    tensors = [torch.ones(1)]
    data = encode({"a": [first], "b": (second, first)}, tensors, "x")
    assert [tensor is other for tensor, other in zip(tensors[1:], (first, second, first), strict=True)] == [True] * 3
    back = decode(data, tensors)
    assert back["a"][0] is first and back["b"][0] is second


class Custom:
    pass


class Celsius(float):
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"param_groups": [{"foo": lambda: 0}]}, r"optimizer\.param_groups\[0\]\.foo is a lambda"),
        ([Custom()], r"optimizer\[0\] is a test_plain\.Custom|optimizer\[0\] is a .*Custom"),
        ((1, {2, 3}), r"optimizer\[1\] is a set"),
        ({7: object()}, r"optimizer\[7\] is an object"),
        ({"lr": numpy.float64(1.0)}, r"optimizer\.lr is a numpy\.float64"),
        ({"t": Celsius(1.0)}, r"optimizer\.t is a .*Celsius"),
        ({"d": defaultdict(int)}, r"optimizer\.d is a collections\.defaultdict"),
        ({1.5: 0}, r"optimizer has the key 1\.5; keys must be str, int or bool"),
        ({None: 0}, r"optimizer has the key None"),
    ],
)
def test_other_things_are_named(value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        encode(value, [], "optimizer")


def test_data_that_contains_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="contains itself"):
        encode(loop, [], "user")


def test_depth_up_to_the_limit() -> None:
    value: Any = 0
    for _ in range(MAX_DEPTH):
        value = {"k": [value][0]}
    assert decode(encode(value, [], "x"), []) == value


@pytest.mark.parametrize(
    "packed",
    [
        {},
        {"tuple": [], "dict": []},
        {"exec": "print(1)"},
        {"tensor": 3},
        {"tensor": -1},
        {"tensor": True},
        {"tuple": {"tuple": []}},
        {"dict": [["a"]]},
        {"dict": [[[], 1]]},
        {"dict": [["a", 1, 2]]},
        {"dict": "ab"},
        {"float": "00"},
        {"float": 1},
        {"int": "zz"},
        {"bytes": "!"},
        {"size": ["a"]},
        {"dtype": "Tensor"},
        {"dtype": "nope"},
        {"dtype": 3},
    ],
)
def test_malformed_objects_are_protocol_errors(packed: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(json.dumps([packed]).encode(), [torch.ones(1)])


@given(st.binary(max_size=60))
def test_garbage_is_a_protocol_error_or_plain(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode(data, [])


@pytest.mark.parametrize("data", [b"NaN", b"[" * 5000, b"\xff\xff", b""])
def test_what_is_not_json(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode(data, [])
