"""What the promise of bits (``planaria.rank.promise``) asks of torch."""

from __future__ import annotations

import os

import torch

from planaria.rank.promise import BITS


def prepare(exact: str, device: torch.device) -> None:
    """Set torch up for it. Before the script's first kernel: cuBLAS reads its setting once."""
    if exact != BITS or device.type == "cpu":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it chooses kernels by their time
    # Filling new memory finds reads of what was never written. It changes no bit of a program without such reads.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
