"""What a healthy step of planaria.jax costs: beside one jit of the same work, and beside JAX's own data parallelism.

python bench/jax_step.py --groups 2 --steps 30
python bench/jax_step.py --device cuda --width 4096 --depth 12 --batch 4096     # each group has a GPU

Every process makes the same step in turn in three ways: by planaria.jax with the other groups; by one jit over its own
part of the batch, without the others (what the work itself costs); and by one jit whose gradients are averaged by
``pmean`` over all processes (jax.distributed, which the loss of one ends). The least of all steps counts, of wall time
and of this process's processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAYS = ("one jit, alone", "jit with pmean", "planaria.jax")


def rank(args: argparse.Namespace) -> None:
    """Runs in every group's process."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import planaria.jax as pj

    group = int(os.environ["PLANARIA_GROUP"])
    os.environ.setdefault("NPROC", "1")
    jax.distributed.initialize(args.address, args.groups, group)
    job = pj.init(shards=args.groups)
    sizes = [args.width] * (args.depth + 1)
    params = [jax.random.normal(jax.random.key(i), (n, n)) / n**0.5 for i, n in enumerate(sizes[:-1])]
    params = [jax.device_put(np.asarray(each), job.device) for each in params]

    def grad(state: Any, batch: Any, key: Any) -> Any:
        def loss(params: Any) -> Any:
            x = batch
            for w in params:
                x = jnp.tanh(x @ w)
            return jnp.mean((x - batch) ** 2)

        value, gradients = jax.value_and_grad(loss)(state["params"])
        return gradients, {"loss": value}

    def update(state: Any, gradients: Any) -> Any:
        """Adam, without its corrections."""
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], gradients)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["second"], gradients)
        step = jax.tree.map(lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), state["params"], first, second)
        return {"params": step, "first": first, "second": second}

    mesh = Mesh(np.array(jax.devices()), ("group",))
    everywhere, spread = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("group"))

    def fresh() -> Any:
        return {"params": params, "first": [0 * p for p in params], "second": [0 * p for p in params]}

    def replicated(leaf: Any) -> Any:
        return jax.make_array_from_callback(leaf.shape, everywhere, lambda index: np.asarray(leaf)[index])

    def averaged(state: Any, batch: Any) -> Any:
        return jax.lax.pmean(grad(state, batch, None)[0], "group")

    part = PartitionSpec("group")
    shared = jax.shard_map(averaged, mesh=mesh, in_specs=(PartitionSpec(), part), out_specs=PartitionSpec())
    single = jax.jit(lambda state, batch: update(state, grad(state, batch, None)[0]), donate_argnums=0)
    parallel = jax.jit(lambda state, batch: update(state, shared(state, batch)), donate_argnums=0)
    batch = np.random.default_rng(group).normal(size=(args.batch, args.width)).astype(np.float32)
    mine = jax.device_put(batch, job.device)
    theirs = jax.make_array_from_process_local_data(spread, batch)
    states = {"one jit, alone": jax.tree.map(jnp.copy, fresh()), "jit with pmean": jax.tree.map(replicated, fresh())}
    least: dict[str, list[float]] = {way: [float("inf")] * 2 for way in WAYS}

    def timed(way: str, work: Callable[[], Any]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(work())
        spent = time.perf_counter() - wall, time.process_time() - cpu
        least[way] = [min(pair) for pair in zip(least[way], spent, strict=True)]

    def advance(way: str, program: Any, given: Any) -> Any:
        states[way] = program(states[way], given)
        return states[way]

    for step in job.steps(args.steps, fresh(), update):

        def planaria(step: pj.Step = step) -> None:
            for _ in step.shards():
                step.grad(grad, mine)

        timed("planaria.jax", planaria)
        timed("one jit, alone", lambda: advance("one jit, alone", single, mine))
        timed("jit with pmean", lambda: advance("jit with pmean", parallel, theirs))
    if group == 0:
        numbers = sum(p.size for p in params)
        Path(args.out).write_text(json.dumps({"numbers": numbers, "least": least}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out:
        rank(args)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "out.json")
        command = [sys.executable, "-m", "planaria", "run", "--groups", str(args.groups), "--device", args.device]
        command += ["--quiet", "--max-replacements", "0", "--log-dir", f"{directory}/run", __file__, *sys.argv[1:]]
        subprocess.run([*command, "--address", address, "--out", str(out)], check=True)
        found = json.loads(out.read_text())
    print(f"{found['numbers'] / 1e6:.1f} million parameters, {args.groups} groups, least of {args.steps} steps")
    base = found["least"][WAYS[0]]
    for way in WAYS:
        wall, cpu = found["least"][way]
        print(f"{way:16} {1e3 * wall:8.1f} ms {wall / base[0]:6.2f}x   cpu {1e3 * cpu:8.1f} ms {cpu / base[1]:6.2f}x")


if __name__ == "__main__":
    main()
