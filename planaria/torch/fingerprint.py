"""What the bits of a run depend on besides the seed and the data, as key and value strings.

The lighthouse compares a joiner's fingerprint with the job's. Every entry either changes bits (seen: thread count,
instruction set, oneDNN, MKL's code path, determinism flags, library versions) or says that the groups do not run the
same job (model, shards, seed, settings).
"""

from __future__ import annotations

import os
import platform

import numpy
import torch
import xxhash

from planaria.core.fingerprint import SOFT
from planaria.rank.promise import BITS
from planaria.rank.settings import Settings
from planaria.torch.state import ProtectedState

# Entries that say what the job is: a difference is always refused.
_JOB = frozenset({"checks", "exact", "layout", "model", "policy", "reduction", "seed", "shards", "steps", "sync"})
# What the ranks of a group have in common. The stages of a pipeline hold different parts of the model.
ALIKE = _JOB - {"model"}


def fingerprint(state: ProtectedState, settings: Settings, exact: str, **more: str) -> tuple[tuple[str, str], ...]:
    """(key, value) pairs, sorted by key. ``more`` adds entries, for what only the caller knows.

    If only samples are promised, what merely changes bits is marked as such: a difference is told, not refused.
    """
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
        "exact": exact,
        **more,
    }
    if state.device.type == "cuda":
        entries["cudnn_benchmark"] = str(torch.backends.cudnn.benchmark)
        entries["cublas_workspace"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
        # Inside a group NCCL chooses how it sums by the links that it finds, unless it is told.
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        chosen = {name: os.environ.get(name, "") for name in ("NCCL_ALGO", "NCCL_PROTO")}
        entries["nccl"] = " ".join([".".join(map(str, version)), *filter(None, chosen.values())])
    soft = frozenset() if exact == BITS else entries.keys() - _JOB
    return tuple(sorted((SOFT + key if key in soft else key, value) for key, value in entries.items()))


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
