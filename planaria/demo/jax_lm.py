"""Train a tiny language model in plain JAX on Python's own source code. Kill any part of it at any time: same bits.

planaria run --groups 4 --shards 8 planaria/demo/jax_lm.py    four groups; one that dies is started again
python planaria/demo/jax_lm.py                                alone: one group, the same weights at the end
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import planaria.jax as pj
from planaria.demo.files import text_files

WIDTH, HEADS, DEPTH, BYTES = 64, 4, 2, 256
Params = dict[str, Any]


def new_params(key: jax.Array, length: int) -> Params:
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    keys = iter(jax.random.split(key, DEPTH * len(shapes) + 3))
    blocks = [
        {name: jax.random.normal(next(keys), shape) * shape[0] ** -0.5 for name, shape in shapes.items()}
        for _ in range(DEPTH)
    ]
    embed = 0.02 * jax.random.normal(next(keys), (BYTES, WIDTH))
    place = 0.02 * jax.random.normal(next(keys), (length, WIDTH))
    return {"embed": embed, "place": place, "blocks": blocks, "head": jnp.zeros((WIDTH, BYTES))}


def normalised(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def logits(params: Params, x: jax.Array) -> jax.Array:
    """Bytes int32 ``[b, t]`` -> logits ``[b, t, 256]`` for the next byte."""
    h = params["embed"][x] + params["place"]
    for block in params["blocks"]:
        qkv = (normalised(h) @ block["qkv"]).reshape(*x.shape, 3, HEADS, WIDTH // HEADS)
        heads = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        h = h + heads.reshape(*x.shape, WIDTH) @ block["out"]
        h = h + jax.nn.silu(normalised(h) @ block["up"]) @ block["down"]
    return normalised(h) @ params["head"]


def grad(state: Params, batch: jax.Array, key: jax.Array) -> tuple[Params, dict[str, jax.Array]]:
    def loss(params: Params) -> jax.Array:
        told = jax.nn.log_softmax(logits(params, batch[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(told, batch[:, 1:, None], axis=2))

    value, gradients = jax.value_and_grad(loss)(state["params"])
    return gradients, {"loss": value}


def main() -> None:
    parser = argparse.ArgumentParser(description="train a byte-level transformer in JAX")
    parser.add_argument("--data", metavar="GLOB", help="text files to train on (default: Python's standard library)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences in each of the shards of a step")
    parser.add_argument("--length", type=int, default=64, help="bytes in a sequence")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    def update(state: Params, gradients: Params) -> Params:
        """Adam, with a warm-up."""
        count = state["count"] + 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], gradients)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["second"], gradients)
        rate = args.lr * jnp.minimum(1.0, count / 20) * jnp.sqrt(1 - 0.99**count) / (1 - 0.9**count)
        step = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), state["params"], first, second)
        return {"params": step, "first": first, "second": second, "count": count}

    job = pj.init(shards=8, seed=args.seed)
    parts = [path.read_bytes() for path in text_files(args.data, args.length)]
    text = np.frombuffer(b"".join(parts), np.uint8)

    def load(index: int, shard: int) -> np.ndarray:
        """int32 ``[b, length + 1]``: a function of (step, shard) alone."""
        random = np.random.default_rng([args.seed, index, shard])
        starts = random.integers(0, len(text) - args.length, args.batch_size)
        return np.stack([text[at : at + args.length + 1] for at in starts]).astype(np.int32)

    params = new_params(jax.random.key(args.seed), args.length)
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = {"params": params, "first": zeros, "second": zeros, "count": 0}
    for step in job.steps(args.steps, state, update):
        for shard in step.shards():
            step.grad(grad, load(step.index, shard))
        if step.index % 10 == 0:
            print(f"step {step.index}: loss {step.metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
