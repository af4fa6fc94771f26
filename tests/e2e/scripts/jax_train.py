"""A small JAX network whose steps take as long as the test wants. Options make it misbehave in one way."""

import argparse
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import planaria.jax as pj

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--hold", type=Path, help="until this file exists, every shard of the second half takes long")
parser.add_argument(
    "--devices", type=int, default=1, help="of a process; the first layer is spread over those of its group"
)
parser.add_argument("--width", type=int, default=32, help="of the layer in the middle")
parser.add_argument("--pause", type=float, default=0, help="seconds that every shard takes longer")
parser.add_argument("--odd", default="", help="what goes wrong, and in group 1 (or rank 1) only")
args = parser.parse_args()

odd = args.odd if os.environ.get("PLANARIA_GROUP") == "1" else ""
if "rank" in args.odd and os.environ.get("RANK") == "1":
    odd = args.odd
if odd == "version":
    jax.__version__ = "0.4.1"
if args.devices > 1:
    jax.config.update("jax_num_cpu_devices", args.devices)
job = pj.init(shards=6, seed=4 if odd == "rank-seed" else 3)
traces = {"grad": 0, "update": 0}
optimizer = optax.adamw(optax.cosine_decay_schedule(1e-2, args.steps))


def complain(x: np.ndarray) -> np.ndarray:
    if odd == "callback":
        raise RuntimeError("this callback always fails")
    return x


def damage(bias: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """One bit flips, once: a healing does the step again."""
    if odd == "damage" and int(seen) == 10 and not (mark := Path(os.environ["PLANARIA_DIR"]) / "damaged").exists():
        mark.touch()
        bias = np.array(bias)
        bias.view(np.uint32)[3] ^= 1
    return bias


def grad(state, batch, key):
    traces["grad"] += 1

    def loss(params):
        x, y = batch
        hidden = jnp.tanh(x @ params["w"].astype(jnp.float32) + params["b"])
        hidden *= jax.random.bernoulli(key, 0.9, hidden.shape)
        out = hidden @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()

    value, gradients = jax.value_and_grad(loss)(state["params"])
    if args.odd == "callback":
        value = jax.pure_callback(complain, value, value)
    name = "accuracy" if odd == "metrics" else "loss"
    return gradients, {name: value * (2.0 if odd in ("program", "rank-program") else 1.0)}


def update(state, gradients):
    traces["update"] += 1
    updates, opt = optimizer.update(gradients, state["opt"], state["params"])
    key, _ = jax.random.split(state["key"])
    params = optax.apply_updates(state["params"], updates)
    if args.odd == "damage":
        params["b"] = jax.pure_callback(damage, params["b"], params["b"], state["seen"])
    return {"params": params, "opt": opt, "key": key, "seen": state["seen"] + 1}


keys = jax.random.split(jax.random.key(5), 2)
params = {
    "w": jax.random.normal(keys[0], (16, args.width)).astype(jnp.bfloat16),
    "b": jnp.full(args.width, 1.0 if odd == "rank-state" else 0.0),
    "head": jax.random.normal(keys[1], (args.width, 4)),
}
if len(jax.devices()) > 1 and args.odd != "no-mesh":
    mesh = jax.make_mesh((len(jax.devices()),), ("x",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    params["w"] = jax.device_put(params["w"], spread)
if odd == "state":
    params["extra"] = jnp.zeros(3)
state = {"params": params, "opt": optimizer.init(params), "key": jax.random.key(1), "seen": 0}


def load(index: int, shard: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng([3, index, shard])
    return random.normal(size=(8, 16)).astype(np.float32), random.integers(0, 4, 8).astype(np.int32)


for step in job.steps(args.steps, state, update):
    for shard in step.shards():
        if args.odd == "own-gradient":
            step.add({name: jnp.zeros(2) for name in params})
        else:
            step.grad(grad, load(step.index, shard))
        time.sleep(args.pause)
        if odd == "rank-leaves" and step.index == 5:
            sys.exit(3)
        late = min(step.index - args.steps // 2, 25)
        held = time.monotonic() + 0.5 * 1.1**late  # slower and slower: that is no hang
        while args.hold and 2 * step.index >= args.steps and time.monotonic() < held and not args.hold.exists():
            time.sleep(0.01)
    assert step.metrics.keys() == {"loss"}
assert int(job.state["seen"]) == args.steps
print(f"traced {traces}")
