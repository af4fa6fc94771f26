"""The two promises that a job can make about its result, and what each asks of torch.

"bits": the final weights are those of a run in which nothing failed. Every kernel inside a shard must then be
deterministic. On a CPU with a fixed number of threads all are; on a GPU torch has to be told, and some get slower.

"samples": no step is discarded and no sample lost, but sums may round differently. It costs nothing.
"""

from __future__ import annotations

import os

import torch

from planaria.core.messages import PROMISES, Policy
from planaria.errors import UsageError
from planaria.torch.settings import Settings

BITS, SAMPLES = PROMISES


def choose(wanted: str | None, settings: Settings, device: torch.device) -> str:
    """The promise of the job: what is wanted, else "bits" where it costs nothing.

    Raises UsageError for one that is unknown, or that the other settings rule out.
    """
    if wanted not in (None, "", BITS, SAMPLES):
        raise UsageError(f"unknown exact={wanted!r}; known: {BITS}, {SAMPLES}")
    rounding = settings.reduction == "fast" or settings.policy is not Policy.REDISTRIBUTE
    if wanted == BITS and rounding:
        raise UsageError(
            f"exact={BITS!r} needs another reduction than 'fast' and the policy {Policy.REDISTRIBUTE.value!r}, not "
            f"{settings.reduction!r} and {settings.policy.value!r}; change those, or say exact={SAMPLES!r}"
        )
    return wanted or (SAMPLES if rounding or device.type != "cpu" else BITS)


def prepare(exact: str, device: torch.device) -> None:
    """Set torch up for it. Before the script's first kernel: cuBLAS reads its setting once."""
    if exact != BITS or device.type == "cpu":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it chooses kernels by their time
    # Filling new memory finds reads of what was never written. It changes no bit of a program without such reads.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
