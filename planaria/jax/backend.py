"""XLA as this rank has it: which device, how many threads, and what else its bits depend on.

On a CPU, XLA's thread pool is as large as the machine has cores, and its size changes bits (seen: gradients of a
transformer with one thread and with two). So it is pinned, by the variable NPROC, which XLA reads when it makes its
first array.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import jax
import numpy
import torch
from jaxlib.version import __version__ as jaxlib_version

from planaria.core.fingerprint import SOFT
from planaria.errors import UsageError
from planaria.jax.world import GroupWorld, SoleWorld
from planaria.rank.promise import BITS
from planaria.rank.settings import Settings

THREADS = "NPROC"
# Entries that say what the job is: a difference is always refused.
_JOB = frozenset(
    {"checks", "exact", "framework", "layout", "metrics", "policy", "reduction", "seed", "shards", "steps"}
)


def prepare(wanted: str | None, settings: Settings) -> tuple[jax.Device, SoleWorld]:
    """The device of this rank: ``wanted`` ("cpu" or "cuda"), else what JAX takes; of several ranks each has one of the
    node's GPUs. And the ranks of the group, who become a JAX world here. Before JAX makes its first array: UsageError
    if that is over, and the number of XLA's threads was left to the machine, or there are other ranks."""
    where = settings.where
    if wanted not in (None, "", "cpu", "cuda"):
        raise UsageError(f"{where}: unknown device {wanted!r}; known devices: cpu, cuda")
    world = SoleWorld()
    if _begun():
        if settings.world_size > 1:
            raise UsageError(
                f"{where}: JAX made arrays before pj.init(), so this process can join no others any more; call "
                "pj.init() first"
            )
        if THREADS not in os.environ:
            raise UsageError(
                f"{where}: JAX made arrays before pj.init() could pin XLA's threads, on whose number bits depend; call "
                f"pj.init() first, or set {THREADS}=1 before Python starts"
            )
    else:
        os.environ.setdefault(THREADS, "1")
        if wanted:
            jax.config.update("jax_platforms", wanted)
        if settings.world_size > 1:
            gpu = None if wanted == "cpu" else int(os.environ.get("LOCAL_RANK") or settings.rank)
            world = GroupWorld(settings, gpu)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))  # for sums, which do not depend on it
    try:
        device = jax.local_devices()[0]
    except RuntimeError as error:
        raise UsageError(f"{where}: JAX has no device: {error}") from None
    if wanted and (device.platform == "cpu") != (wanted == "cpu"):
        raise UsageError(f"{where}: JAX runs on {device.platform} already, not on {wanted}; call pj.init() first")
    return device, world


def _begun() -> bool:
    from jax._src import xla_bridge  # nothing public tells

    return bool(xla_bridge.backends_are_initialized())


def fingerprint(settings: Settings, exact: str, device: jax.Device, **more: str) -> tuple[tuple[str, str], ...]:
    """(key, value) pairs, sorted by key. ``more``: of the job and the state. If only samples are promised, what merely
    changes bits is marked as such: a difference is told, not refused."""
    config: Any = jax.config  # its options are made at run time
    entries = {
        "framework": "jax",
        "jax": jax.__version__,
        "jaxlib": jaxlib_version,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "device": f"{device.platform} {device.device_kind}",
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "x64": str(config.jax_enable_x64),
        "matmul_precision": str(config.jax_default_matmul_precision),
        "random": f"{config.jax_default_prng_impl} partitionable={config.jax_threefry_partitionable}",
        "shards": str(settings.shards),
        "seed": str(settings.seed),
        "policy": settings.policy.value,
        "reduction": settings.reduction,
        "exact": exact,
        **more,
    }
    if device.platform == "cpu":
        entries |= {"threads": os.environ.get(THREADS, ""), "cpu": _cpu()}
    job = _JOB | {key for key in entries if key.startswith("state")}
    soft = frozenset() if exact == BITS else entries.keys() - job
    return tuple(sorted((SOFT + key if key in soft else key, value) for key, value in entries.items()))


def strict(key: str) -> bool:
    """Whether an entry of a fingerprint must be the same on all ranks of a group."""
    return key.removeprefix(SOFT) not in ("cpu", "device", "metrics")


def _cpu() -> str:
    """The instruction set for which XLA compiles: of this very processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    facts = dict(line.split("\t:", 1) for line in reversed(lines) if "\t:" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    flags = " ".join(sorted(facts.get("flags", facts.get("Features", "")).split()))
    name = facts.get("model name", platform.machine())
    return f"{name} {hashlib.sha256(flags.encode()).hexdigest()[:8]}"
