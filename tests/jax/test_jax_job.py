"""A job alone: what the loop gives, and what it refuses with one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import planaria.jax as pj
from planaria.engines.local import hold_port
from tests.interruptions import interrupt

HOME = str(Path(__file__).resolve().parents[2])
PATIENCE = 500.0  # seconds: a hang, below the time that a test has


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PLANARIA_")]:
        monkeypatch.delenv(name)


def grad(state: Any, batch: Any, key: jax.Array) -> Any:
    return jax.tree.map(lambda p: p - batch, state["w"]), {"loss": jnp.sum(state["w"])}


def update(state: Any, gradients: Any) -> Any:
    return {"w": state["w"] - 0.5 * gradients, "n": state["n"] + 1}


class WithoutHash:
    """Equal by what it holds, so without a hash."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WithoutHash) and self.factor == other.factor

    def __call__(self, *given: Any) -> Any:
        return grad(*given)


def train(update: Callable[..., Any] = update, grad: Callable[[], Any] = lambda: grad, steps: int = 3) -> Any:
    """``grad`` makes the function that each shard is computed by; None: none is."""
    state = {"w": jnp.zeros(3), "n": 0}
    job, step = pj.init(shards=2, seed=1), None
    for step in job.steps(steps, state, update):
        for shard in step.shards():
            if (function := grad()) is not None:
                step.grad(function, float(shard))
    assert state["n"] == 0
    return job, step


def test_a_loop() -> None:
    job, step = train()
    # The mean of the shards' targets is 1/2: w = 1/2 - 1/2 * 2^-3. The loss is that before the last update.
    assert job.state["w"].tolist() == [0.4375] * 3
    assert (int(job.state["n"]), step.index, step.metrics, step.groups) == (3, 2, {"loss": 1.125}, (0,))


@pytest.mark.parametrize("agreed", [False, True])
def test_an_exchange_that_is_complete_counts_whatever_comes_then(monkeypatch: pytest.MonkeyPatch, agreed: bool) -> None:
    complete = interrupt(monkeypatch, agreed)
    job, _ = train()
    assert job.state["w"].tolist() == [0.4375] * 3
    assert complete[:2] == [True] * 2 and sum(complete) == 3, "none was made twice"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"update": lambda s, g: {**s, "n": s["n"] + 1.5}}, r"the update makes state\['n'\] float32\[\]"),
        ({"update": lambda s, g: {"w": s["w"], "m": 1}}, r"state\['m'\] is new; state\['n'\] is gone"),
        ({"grad": lambda: None}, "must give each shard's gradients"),
        ({"grad": lambda: lambda *given: grad(*given), "steps": 30}, "was given 9 different functions"),
        ({"grad": lambda: lambda *given: grad(*given)[0]}, r"must return \(gradients, metrics\)"),
        ({"grad": lambda: lambda s, *_: ({"n": s["n"]}, None)}, r"the gradient at \['n'\] is int32"),
        (
            {"grad": lambda: lambda s, *_: (s["w"].astype(jnp.float8_e5m2fnuz), None)},
            "the gradient at the root is float8",
        ),
        ({"grad": lambda: WithoutHash(2.0)}, "a WithoutHash, cannot be hashed"),
        ({"grad": lambda: 7}, "step.grad was given an int as its function"),
        ({"update": 7}, "job.steps was given an int as its update"),
        ({"grad": lambda: lambda s, *_: (s["w"], s["w"])}, "metrics are a dict of scalars, not ArrayImpl"),
        ({"grad": lambda: lambda s, *_: (s["w"], {("a", 1): 0})}, r"names of metrics are strings, not \('a', 1\)"),
        (
            {"grad": lambda: lambda s, *_: (s["w"], {"loss": s["w"]})},
            r"step 0, shard 0: the metric loss is no number that can be averaged, but an ArrayImpl of shape \[3\]",
        ),
        ({"grad": lambda: lambda s, *_: (s["w"][:0], None)}, "without a number in it; there is nothing to train"),
        ({"grad": lambda: jax.jit(grad, donate_argnums=0)}, "step.grad donates the state"),
        ({"update": lambda s, g: {**s, "n": "x"}}, r"tried a step: the update makes state\['n'\] a str"),
        ({"update": lambda s, g: {1: s["w"], "n": 0}}, "what the update returns is no pytree"),
        ({"steps": 2.5}, "a whole number of steps, not 2.5"),
        ({"steps": "3"}, "a whole number of steps, not '3'"),
        ({"grad": lambda: lambda s, b, _: (s["w"] * jnp.inf, None)}, "step 0: the gradient is not finite"),
    ],
)
def test_what_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(pj.UsageError, match=said):
        train(**wrong)


def given(*shards: Any, metrics: Any = None) -> Any:
    """A job whose script computes the gradients of its shards itself: those of one after the other."""
    job, gradients = pj.init(shards=2), iter(shards)
    for step in job.steps(2, {"w": jnp.zeros(3)}, lambda state, _: state):
        for _ in step.shards():
            step.add(next(gradients), metrics or {})
    return step


def deleted() -> jax.Array:
    array = jnp.ones(3)
    array.delete()
    return array


FIRST = {"w": jnp.ones(3)}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"w": jnp.ones(4)}, r"at \['w'\] \(float32\[4\], and float32\[3\] before\)"),
        ({"v": jnp.ones(3)}, r"at their structure: PyTreeDef\({'v': \*}\), and PyTreeDef\({'w': \*}\) before"),
        ({"w": np.ones(3)}, r"the gradient at \['w'\] is a ndarray; gradients are arrays of JAX, given"),
        ({"w": jnp.ones(3), 1: jnp.ones(3)}, "what was given as gradients is no pytree"),
    ],
)
def test_one_shard_whose_gradients_are_not_like_the_others(wrong: Any, said: str) -> None:
    with pytest.raises(pj.UsageError, match=f"group 0, step 0, shard 1: .*{said}"):
        given(FIRST, FIRST, wrong)  # shard 0 twice: the first of them is tried


def test_gradients_that_are_donated_before_they_are_given() -> None:
    with pytest.raises(pj.UsageError, match="step 0, shard 0: the shard's gradients were deleted"):
        given({"w": deleted()})


def test_gradients_that_are_donated_too_early() -> None:
    job, donate = pj.init(shards=2), jax.jit(lambda array: array + 1, donate_argnums=0)
    step = next(job.steps(2, {"w": jnp.zeros(3)}, lambda state, _: state))
    with pytest.raises(pj.UsageError, match="step 0, shard 0: the shard's gradients were deleted"):
        for _ in step.shards():
            step.add(FIRST | {"w": (array := jnp.ones(3))})
            donate(array)


def test_gradients_are_given_outside_of_jit() -> None:
    step = next(pj.init(shards=2).steps(2, {"w": jnp.zeros(3)}, lambda state, _: state))
    next(step.shards())
    with pytest.raises(pj.UsageError, match=r"is a DynamicJaxprTracer; gradients are arrays of JAX, given outside"):
        jax.jit(step.add)(FIRST)


@pytest.mark.parametrize("value", ["1.5", None, 10**400, 1j, [1.0]])
def test_what_no_metric_is(value: Any) -> None:
    with pytest.raises(pj.UsageError, match="step 0, shard 0: the metric loss is no number that can be averaged, but "):
        given(*[FIRST] * 5, metrics={"loss": value})


def test_metrics_are_the_scripts_own() -> None:
    step = given(*[FIRST] * 5, metrics={"loss": 1})
    step.metrics["rate"] = jnp.ones(())  # of which no peer could be told
    assert step.metrics == {"loss": 1.0}


def test_what_it_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANARIA_BUDDY", "2")
    with pytest.raises(pj.UsageError, match="--buddy"):
        pj.init()


@pytest.mark.parametrize("seed", [2**63, 2**64, -1, "x", str(2**63)])
def test_a_seed_of_which_no_key_is_made(seed: Any) -> None:
    with pytest.raises(pj.UsageError, match="seed must be"):
        pj.init(seed=seed)


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("jnp.ones(3)", "this process can join no others any more; call pj.init() first"),
        ("jax.distributed.initialize('127.0.0.1:PORT', 1, 0)", "leave it out"),
        ("pass", "MASTER_PORT is not set, where the 2 processes of the group meet"),
    ],
)
def test_a_process_that_cannot_meet_its_group(before: str, said: str) -> None:
    env = os.environ | {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "PYTHONPATH": HOME}
    with hold_port() as held:
        before = before.replace("PORT", str(held.getsockname()[1]))
        text = f"import jax, jax.numpy as jnp; {before}; import planaria.jax as pj; pj.init(device='cpu')"
        done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert said in done.stderr


def test_another_device_than_the_one_that_is_wanted_is_refused() -> None:
    jnp.ones(3)
    with pytest.raises(pj.UsageError, match="JAX runs on cpu already, not on cuda"):
        pj.init(device="cuda")


def test_threads_cannot_be_pinned_too_late() -> None:
    env = {name: value for name, value in os.environ.items() if name != "NPROC"}
    env["PYTHONPATH"] = HOME
    text = "import jax.numpy as jnp; jnp.ones(3); import planaria.jax as pj; pj.init()"
    done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert "call pj.init() first, or set NPROC=1" in done.stderr
