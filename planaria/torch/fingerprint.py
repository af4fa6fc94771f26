"""What the bits of a run depend on besides the seed and the data, as key and value strings.

The lighthouse compares a joiner's fingerprint with the job's. Every entry either changes bits (seen: thread count,
instruction set, oneDNN, MKL's code path, determinism flags, library versions) or says that the groups do not run the
same job (model, shards, seed, settings).
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping

import numpy
import torch
import xxhash

from planaria.torch.settings import Settings
from planaria.torch.state import ProtectedState
from planaria.torch.world import GroupWorld

# How each key reads in a sentence, and what to do about a difference.
_WORDS: Mapping[str, tuple[str, str]] = {
    "cpu_capability": ("the CPU instruction set that torch uses", "set ATEN_CPU_CAPABILITY to one that all have"),
    "cudnn_benchmark": ("torch.backends.cudnn.benchmark", "set it alike in the script"),
    "cublas_workspace": ("CUBLAS_WORKSPACE_CONFIG", "set it alike for all groups"),
    "default_dtype": ("torch.get_default_dtype()", "set it alike in the script"),
    "deterministic": ("torch.use_deterministic_algorithms", "set it alike in the script"),
    "device": ("the device", "run all groups on the same kind of device"),
    "float32_matmul": ("torch.get_float32_matmul_precision()", "set it alike in the script"),
    "layout": ("the layout of the ranks in a group", "give all groups the same mesh and --nproc-per-group"),
    "mkl_cbwr": ("MKL_CBWR", "set it alike for all groups"),
    "model": ("the model (names, dtypes and shapes of its tensors)", "run the same script with the same arguments"),
    "numpy": ("the numpy version", "install the same"),
    "onednn": ("oneDNN's settings", "set torch.backends.mkldnn and ONEDNN_* alike"),
    "policy": ("the policy", "give all groups the same"),
    "python": ("the Python version", "use the same"),
    "reduction": ("the reduction", "give all groups the same"),
    "seed": ("the seed", "give all groups the same"),
    "shards": ("the number of shards", "give all groups the same"),
    "threads": ("torch's thread count", "set OMP_NUM_THREADS alike for all groups"),
    "torch": ("the torch version", "install the same"),
}


def fingerprint(state: ProtectedState, settings: Settings, **more: str) -> tuple[tuple[str, str], ...]:
    """(key, value) pairs, sorted by key. ``more`` adds entries, for what only the caller knows."""
    entries = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "threads": str(torch.get_num_threads()),
        "device": _device(state.device),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "onednn": _onednn(),
        "mkl_cbwr": os.environ.get("MKL_CBWR", ""),
        "deterministic": _deterministic(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "model": xxhash.xxh3_64_hexdigest("\n".join(state.describe()).encode()),
        "shards": str(settings.shards),
        "seed": str(settings.seed),
        "policy": settings.policy.value,
        "reduction": settings.reduction,
        **more,
    }
    if state.device.type == "cuda":
        entries["cudnn_benchmark"] = str(torch.backends.cudnn.benchmark)
        entries["cublas_workspace"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    return tuple(sorted(entries.items()))


def of_group(mine: tuple[tuple[str, str], ...], world: GroupWorld) -> tuple[tuple[str, str], ...]:
    """The fingerprint of a group: what all its ranks have in common, and a digest of what they have not (the stages of
    a pipeline hold different parts of the model)."""
    ranks = [dict(json.loads(each)) for each in world.gather(json.dumps(mine).encode())]
    entries = {}
    for key in sorted({key for rank in ranks for key in rank}):
        values = [rank.get(key, "") for rank in ranks]
        alike = len(set(values)) == 1
        entries[key] = values[0] if alike else "by rank " + xxhash.xxh3_64_hexdigest(json.dumps(values).encode())
    return tuple(sorted(entries.items()))


def explain(ours: tuple[tuple[str, str], ...], theirs: tuple[tuple[str, str], ...]) -> list[str]:
    """One sentence for every difference, with both values and what to do; empty if there is none."""
    mine, other = dict(ours), dict(theirs)
    sentences = []
    for key in sorted(mine.keys() | other.keys()):
        here, there = mine.get(key), other.get(key)
        if here != there:
            what, advice = _WORDS.get(key, (key, "make them alike"))
            sentences.append(f"{what} is {_shown(here)} here but {_shown(there)} there; {advice}")
    return sentences


def _shown(value: str | None) -> str:
    return "not told" if value is None else value or "not set"


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        version = torch.version.cuda or torch.version.hip or "unknown version"
        return f"cuda {torch.cuda.get_device_name(device)} ({version})"
    return f"{device.type} {platform.machine()}"


def _onednn() -> str:
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    flags = f"enabled={torch.backends.mkldnn.enabled} available={available}"
    # Environment settings choose code paths: ONEDNN_MAX_CPU_ISA, ONEDNN_DEFAULT_FPMATH_MODE and their old names.
    chosen = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(("ONEDNN_", "DNNL_"))]
    return " ".join([flags, *chosen])


def _deterministic() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn only" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"
