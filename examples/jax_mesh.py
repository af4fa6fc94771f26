"""Train a small network whose weights are spread over all devices of a group, which may be several processes.

planaria run --groups 2 --nproc-per-group 2 examples/jax_mesh.py    each group is a JAX world of two processes
planaria chaos examples/jax_mesh.py --groups 2 --nproc-per-group 2 --verify
python examples/jax_mesh.py --devices 2                             alone: one process with two devices
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import planaria.jax as pj

IN, HIDDEN, OUT = 64, 512, 10


def main() -> None:
    parser = argparse.ArgumentParser(description="train a network that is spread over a mesh, on made-up digits")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16, help="samples in each of the shards of a step")
    parser.add_argument("--devices", type=int, default=1, help="of each process, if it has the CPU")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", args.devices)
    job = pj.init(shards=6, seed=args.seed)  # the processes of this group become one JAX world
    mesh = jax.make_mesh((len(jax.devices()),), ("model",), axis_types=(jax.sharding.AxisType.Auto,))

    def spread(*spec: str | None) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*spec))

    places = {"in": spread(None, "model"), "bias": spread("model"), "out": spread("model", None)}

    def fresh(key: jax.Array) -> dict[str, jax.Array]:
        first, second = jax.random.split(key)
        return {
            "in": jax.random.normal(first, (IN, HIDDEN)) / IN**0.5,
            "bias": jnp.zeros(HIDDEN),
            "out": jax.random.normal(second, (HIDDEN, OUT)) / HIDDEN**0.5,
        }

    # Each device makes its own part: no process ever holds the whole of it.
    params = jax.jit(fresh, out_shardings=places)(jax.random.key(args.seed))
    velocity = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), out_shardings=places)(params)

    def grad(state, batch, key):
        """The gradients of one shard, and what to average over all of them. All processes of the group run this."""

        def loss(params):
            x, y = batch
            x = x + 0.1 * jax.random.normal(key, x.shape)
            logits = jax.nn.relu(x @ params["in"] + params["bias"]) @ params["out"]
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1))

        value, gradients = jax.value_and_grad(loss)(state["params"])
        return gradients, {"loss": value}

    def update(state, gradients):
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], gradients)
        params = jax.tree.map(lambda p, v: p - 0.05 * v, state["params"], velocity)
        return {"params": params, "velocity": velocity}

    centres = np.random.default_rng(1).normal(size=(OUT, IN)).astype(np.float32)

    def load(index: int, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples of a shard: a function of (step, shard) alone, and the same on all processes of the group."""
        random = np.random.default_rng([args.seed, index, shard])
        y = random.integers(0, OUT, args.batch_size)
        return centres[y] + random.normal(size=(args.batch_size, IN)).astype(np.float32), y.astype(np.int32)

    for step in job.steps(args.steps, {"params": params, "velocity": velocity}, update):
        for shard in step.shards():
            step.grad(grad, load(step.index, shard))
        if step.index % 10 == 0 and job.rank == 0:
            print(f"step {step.index}: loss {step.metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
