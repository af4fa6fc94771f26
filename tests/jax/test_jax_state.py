"""A state by key paths: taken, sent as bytes, put in place, with nothing that a jit would compile for again."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from planaria.errors import ProtocolError, UsageError
from planaria.jax.state import MOST_ENTRIES, State


class Moments(NamedTuple):
    first: Any
    second: Any


def made(scale: float = 1.0, **more: Any) -> State:
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    spread = NamedSharding(mesh, PartitionSpec("b"))
    tree = {
        "spread": jax.device_put(scale * jnp.arange(24.0).reshape(8, 3), spread),
        "moments": Moments(scale * jnp.ones(3, jnp.bfloat16), [jnp.full((2, 2), scale, jnp.float8_e4m3fn), None]),
        "small": jnp.asarray([1, -3, int(scale)], jnp.int4),
        "key": jax.random.key(int(scale)),
        "keys": jax.random.split(jax.random.key(int(scale), impl="rbg"), 3),
        "flag": scale > 1,
        "count": int(scale),
        "rate": 0.5 * scale,
        "host": np.float64(scale),
        "nothing": jnp.zeros((0, 4)),
        **more,
    }
    return State(tree, jax.devices()[0])


def sent(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """As a healing brings them: raw bytes in memory that is used for something else afterwards."""
    return [each.contiguous().reshape(-1).view(torch.uint8).clone() for each in tensors]


def test_there_and_back() -> None:
    theirs, ours = made(3.0), made(1.0)
    header, tensors = theirs.capture({"loss": 0.5})
    received = sent(tensors)
    assert ours.digest() != theirs.digest()
    assert ours.restore(header, received) == {"loss": 0.5}
    for each in received:
        each.zero_()  # nothing looks at it any more
    assert ours.digest() == theirs.digest()
    assert jax.tree.structure(ours.tree) == jax.tree.structure(theirs.tree)
    assert [leaf.sharding for leaf in ours.leaves] == [leaf.sharding for leaf in theirs.leaves]
    assert jax.random.uniform(ours.tree["key"]) == jax.random.uniform(theirs.tree["key"])


def test_what_lies_in_host_memory_stays_there() -> None:
    mesh = jax.make_mesh((2,), ("a",), devices=jax.devices()[:2])

    def offloaded(value: float) -> State:
        spread = NamedSharding(mesh, PartitionSpec("a"), memory_kind="pinned_host")
        return State({"m": jax.device_put(jnp.full(4, value), spread), "w": jnp.full(2, value)}, jax.devices()[0])

    def alone(value: float) -> State:
        host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        return State({"m": jax.device_put(jnp.full(4, value), host), "w": jnp.full(2, value)}, jax.devices()[0])

    for make in (offloaded, alone):
        theirs, ours = make(3.0), make(1.0)
        header, tensors = theirs.capture(None)
        ours.restore(header, sent(tensors))
        assert ours.digest() == theirs.digest()
        assert [leaf.sharding for leaf in ours.leaves] == ours.shardings == theirs.shardings
        assert [each.memory_kind for each in ours.shardings] == ["pinned_host", "device"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [jnp.int4, jnp.float8_e4m3, jnp.float32])
@pytest.mark.parametrize("memory", ["pinned_host", "device"])
def test_gradients_are_exchanged_on_the_device_whatever_is_first(dtype: Any, memory: str) -> None:
    device = jax.devices("cuda")[0]
    first = jax.device_put(jnp.ones(3, dtype), SingleDeviceSharding(device, memory_kind=memory))
    theirs, ours = (State({"a": first * scale, "w": jnp.ones(2)}, device) for scale in (jnp.asarray(1, dtype), 0))
    assert ours.device.type == "cuda"
    ours.restore(*(lambda header, tensors: (header, sent(tensors)))(*theirs.capture(None)))
    assert ours.digest() == theirs.digest()


def test_neither_a_healing_nor_a_step_compiles_anything() -> None:
    compiled: list[str] = []

    def note(event: str, seconds: float, **facts: Any) -> None:
        if "backend_compile" in event:
            compiled.append(str(facts.get("fun_name")))

    def body(leaves: list[Any]) -> list[Any]:
        numbers = (jnp.issubdtype(leaf.dtype, jnp.number) for leaf in leaves)
        return [leaf + 0 if number else leaf for leaf, number in zip(leaves, numbers, strict=True)]

    state = made(2.0)
    program = jax.jit(body, donate_argnums=0, out_shardings=state.shardings)
    header, tensors = made(3.0).capture(None)
    jax.monitoring.register_event_duration_secs_listener(note)
    program([jax.device_put(jnp.copy(leaf), leaf.sharding) for leaf in state.leaves])  # the dry step
    state.leaves = program(program(state.leaves))
    state.restore(header, sent(tensors))
    program(state.leaves)
    assert compiled.count("jit(body)") == 1


def test_the_script_keeps_its_own_arrays() -> None:
    mine = jnp.arange(4.0)
    state = State({"w": mine}, jax.devices()[0])
    jax.jit(lambda x: x + 1, donate_argnums=0)(state.leaves[0])
    assert mine.tolist() == [0, 1, 2, 3]


def test_paths_that_differ_are_named() -> None:
    header, tensors = made(extra=jnp.ones(2)).capture(None)
    ours = made(other=jnp.ones(2), count=jnp.ones(2))
    before = ours.digest()
    with pytest.raises(UsageError) as caught:
        ours.restore(header, tensors)
    for said in (
        "state['extra'] is missing here",
        "state['other'] is only here",
        "state['count'] is int32[] there but float32[2] here",
    ):
        assert said in str(caught.value)
    assert ours.digest() == before
    assert made().describe()["state['key']"] == "uint32[2] key threefry2x32"


def test_leaves_in_another_order_are_not_taken_for_each_other() -> None:
    ours, theirs = (State(OrderedDict.fromkeys(names, jnp.ones(2)), jax.devices()[0]) for names in ("ab", "ba"))
    with pytest.raises(UsageError, match=r"in another order there, from state\['a'\] on"):
        ours.restore(*theirs.capture(None))


def test_a_large_state_is_described_in_few_entries() -> None:
    layers: list[Any] = [{"w": np.ones(2), "b": np.ones(1)} for _ in range(MOST_ENTRIES // 2 + 10)]
    state = State({"layers": layers, "count": 0}, jax.devices()[0])
    told = state.describe()
    assert len(told) <= MOST_ENTRIES
    layers[5]["b"] = np.ones(3)
    other = State({"layers": layers, "count": 0}, jax.devices()[0]).describe()
    assert [name for name in told if told[name] != other[name]] == ["state['layers'][5]"]


def deleted() -> jax.Array:
    array = jnp.ones(3)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"f": [jax.nn.relu]}, r"state\['f'\]\[0\] is "),
        ({"name": "resnet"}, r"state\['name'\] is a str"),
        ({}, "a state with arrays in it"),
        ({"n": 2**40}, r"state\['n'\] is the number 1099511627776, of which JAX makes no array"),
        ({"n": np.array(["a"])}, r"state\['n'\] is the <U1 array"),
        ({"n": np.int64(2**40)}, r"state\['n'\] is the number 1099511627776, of which JAX makes no array"),
        ({"n": np.array([2**32 + 1, 0])}, r"state\['n'\] is the int64 array, of which JAX makes no array"),
        ({"n": np.uint64(2**63)}, r"state\['n'\] is the number 9223372036854775808, of which"),
        ({"n": np.zeros(2, jax.dtypes.float0)}, r"state\['n'\] is the .*float0.* array, of which"),
        ({"n": deleted()}, r"state\['n'\] was deleted"),
        ({1: np.ones(2), "n": np.ones(2)}, "the state is no pytree"),
    ],
)
def test_what_no_state_is(tree: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        State(tree, jax.devices()[0])


@pytest.mark.parametrize("header", [b"", b"[]", b'{"version": 7}', b'{"version": 1, "leaves": [[1]], "facts": 0}'])
def test_what_is_no_state_is_refused(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        made().restore(header, [])


def test_nothing_of_a_header_is_code() -> None:
    header, _ = made().capture(None)
    assert set(json.loads(header)) == {"version", "leaves", "facts"}
