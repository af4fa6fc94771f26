"""The same loop with Equinox and Optax.

planaria run --groups 3 --shards 6 examples/jax_equinox.py
"""

import argparse

import equinox as eqx
import jax
import numpy as np
import optax

import planaria.jax as pj


def main() -> None:
    parser = argparse.ArgumentParser(description="train a small network with Equinox")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    job = pj.init(shards=6, seed=args.seed)
    model = eqx.nn.MLP(32, 10, 64, 2, key=jax.random.key(args.seed))
    params, rest = eqx.partition(model, eqx.is_inexact_array)  # arrays are the state, functions stay here
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def grad(state, batch, key):
        def loss(params):
            x, y = batch
            out = jax.vmap(eqx.combine(params, rest))(x)
            return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()

        value, gradients = jax.value_and_grad(loss)(state["params"])
        return gradients, {"loss": value}

    def update(state, gradients):
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        return {"params": eqx.apply_updates(state["params"], updates), "opt": opt}

    centres = np.random.default_rng(1).normal(size=(10, 32)).astype(np.float32)

    def load(index: int, shard: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng([args.seed, index, shard])
        y = random.integers(0, 10, 16)
        return centres[y] + random.normal(size=(16, 32)).astype(np.float32), y.astype(np.int32)

    for step in job.steps(args.steps, {"params": params, "opt": optimizer.init(params)}, update):
        for shard in step.shards():
            step.grad(grad, load(step.index, shard))
        if step.index % 10 == 0:
            print(f"step {step.index}: loss {step.metrics['loss']:.4f}")
    trained = eqx.combine(job.state["params"], rest)
    print(f"done: {trained.out_size} outputs")


if __name__ == "__main__":
    main()
