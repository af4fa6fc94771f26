"""Train a small network in plain JAX. Kill any part of it at any time: same bits.

planaria run --groups 3 --shards 6 examples/jax_mlp.py    three groups; one that dies is started again
python examples/jax_mlp.py                                alone: one group, the same weights at the end
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import planaria.jax as pj

WIDTHS = (64, 128, 128, 10)


def logits(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    """x ``[batch, 64]`` -> ``[batch, 10]``."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def grad(state, batch, key):
    """The gradients of one shard, and what to average over all of them."""

    def loss(params):
        x, y = batch
        x = x + 0.1 * jax.random.normal(key, x.shape)  # the same noise on whatever group computes the shard
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits(params, x)), y[:, None], axis=1))

    value, gradients = jax.value_and_grad(loss)(state["params"])
    return gradients, {"loss": value}


def update(state, gradients):
    """The next state, from the mean gradient of all shards: SGD with momentum."""
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], gradients)
    params = jax.tree.map(lambda p, v: p - 0.05 * v, state["params"], velocity)
    return {"params": params, "velocity": velocity}


def main() -> None:
    parser = argparse.ArgumentParser(description="train a small network on made-up digits")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16, help="samples in each of the shards of a step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    job = pj.init(shards=6, seed=args.seed)
    keys = jax.random.split(jax.random.key(args.seed), len(WIDTHS))
    params = [
        {"w": jax.random.normal(key, (a, b)) / a**0.5, "b": jnp.zeros(b)}
        for key, a, b in zip(keys, WIDTHS, WIDTHS[1:], strict=False)
    ]
    centres = np.random.default_rng(1).normal(size=(10, 64)).astype(np.float32)

    def load(index: int, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples of a shard: a function of (step, shard) alone."""
        random = np.random.default_rng([args.seed, index, shard])
        y = random.integers(0, 10, args.batch_size)
        return centres[y] + random.normal(size=(args.batch_size, 64)).astype(np.float32), y.astype(np.int32)

    state = {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params)}
    for step in job.steps(args.steps, state, update):
        for shard in step.shards():
            step.grad(grad, load(step.index, shard))
        if step.index % 10 == 0:
            print(f"step {step.index}: loss {step.metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
