"""The same loop with Flax: linen with a TrainState, or nnx (--api nnx). Optax does the updates.

planaria run --groups 3 --shards 6 examples/jax_flax.py --api nnx
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState

import planaria.jax as pj

Functions = tuple[Any, Callable[..., Any], Callable[..., Any]]  # a state, its gradient, its update


def loss_of(out: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()


def with_linen(seed: int, optimizer: optax.GradientTransformation) -> Functions:
    """A TrainState is a pytree: its functions are no leaves of it, so it goes as it is."""

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = linen.Dropout(0.1, deterministic=False)(linen.relu(linen.Dense(64)(x)))
            return linen.Dense(10)(x)

    model, root = Model(), jax.random.key(seed)
    variables = model.init({"params": root, "dropout": root}, np.zeros((1, 32), np.float32))
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optimizer)

    def grad(state, batch, key):
        def loss(params):
            x, y = batch
            return loss_of(state.apply_fn({"params": params}, x, rngs={"dropout": key}), y)

        value, gradients = jax.value_and_grad(loss)(state.params)
        return gradients, {"loss": value}

    return state, grad, lambda state, gradients: state.apply_gradients(grads=gradients)


def with_nnx(seed: int, optimizer: optax.GradientTransformation) -> Functions:
    """A module is split into its structure, which stays in the functions, and its arrays, which are the state."""

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first, self.last = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.last(nnx.relu(self.first(x)))

    graph, params = nnx.split(Model(nnx.Rngs(seed)), nnx.Param)

    def grad(state, batch, key):
        def loss(params):
            x, y = batch
            return loss_of(nnx.merge(graph, params)(x), y)

        value, gradients = jax.value_and_grad(loss)(state["params"])
        return gradients, {"loss": value}

    def update(state, gradients):
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    return {"params": params, "opt": optimizer.init(params)}, grad, update


def main() -> None:
    parser = argparse.ArgumentParser(description="train a small network with Flax")
    parser.add_argument("--api", choices=("linen", "nnx"), default="linen")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    job = pj.init(shards=6, seed=args.seed)
    make = with_linen if args.api == "linen" else with_nnx
    state, grad, update = make(args.seed, optax.adamw(1e-3))
    centres = np.random.default_rng(1).normal(size=(10, 32)).astype(np.float32)

    def load(index: int, shard: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng([args.seed, index, shard])
        y = random.integers(0, 10, 16)
        return centres[y] + random.normal(size=(16, 32)).astype(np.float32), y.astype(np.int32)

    for step in job.steps(args.steps, state, update):
        for shard in step.shards():
            step.grad(grad, load(step.index, shard))
        if step.index % 10 == 0:
            print(f"step {step.index}: loss {step.metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
