"""torchtitan.train on a CPU: ``python -m tests.titan.on_cpu --module … --config …``, as ``-m torchtitan.train``.

torchtitan trains on GPUs only. What it asks of a GPU is put in place here, for tests; nothing of it is in the package.

From the environment: TITAN_PAUSE, seconds before every forward, for tests that must meet a moment; TITAN_WEIGHTS, the
file that gets the weights at the end.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
import types
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import BlockMask, create_mask

from planaria.train.titan import older_torch


def prepare() -> None:
    """Before the first import of torchtitan's trainer: modules take the device by name when they are imported."""
    # It needs triton. Only expert parallelism over NVLink calls what is in it.
    kernels = types.ModuleType("torchtitan.distributed.minimal_async_ep.kernels")
    kernels.__getattr__ = lambda name: None  # type: ignore[method-assign]
    sys.modules[kernels.__name__] = kernels

    import torchtitan.tools.utils as utils

    utils.device_type = "cpu"
    utils.device_module = _Device("cpu")
    utils.get_local_device = lambda: torch.device("cpu")
    # gloo has no PREMUL_SUM, with which FSDP2 would scale; torchtitan's factor is 1.
    scale = FSDPModule.set_gradient_divide_factor

    def sum_only(module: FSDPModule, factor: float) -> None:
        scale(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = sum_only  # type: ignore[method-assign]

    from torchtitan.models.common.attention import FlexAttention

    FlexAttention._compiled_flex_attn = _attention
    older_torch.patch()  # torchtitan by itself needs it, too


def observe() -> None:
    """Do what the environment asks for."""
    from torchtitan.trainer import Trainer

    compute, close = Trainer.forward_backward_step, Trainer.close
    pause = float(os.environ.get("TITAN_PAUSE", "0"))

    def slowly(trainer: Trainer, **batch: Any) -> torch.Tensor:
        time.sleep(pause)
        return compute(trainer, **batch)

    def saving(trainer: Trainer) -> None:
        parameters = [(n, p.detach()) for part in trainer.model_parts for n, p in part.named_parameters()]
        weights = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in parameters}
        if torch.distributed.get_rank() == 0:
            torch.save(weights, os.environ["TITAN_WEIGHTS"])
        close(trainer)

    Trainer.forward_backward_step = slowly
    if "TITAN_WEIGHTS" in os.environ:
        Trainer.close = saving


class _Device(types.ModuleType):
    """torch.cpu with what torchtitan's metrics ask of torch.cuda."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_device_name(self, device: object) -> str:
        return "CPU"

    def get_device_properties(self, device: object) -> types.SimpleNamespace:
        return types.SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, device: object) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: BlockMask, scale: Any, enable_gqa: bool, **_: Any
) -> tuple[torch.Tensor, None]:
    """FlexAttention has no backward on a CPU: the same with the mask written out."""
    mask = create_mask(block_mask.mask_mod, q.shape[0], q.shape[1], q.shape[2], k.shape[2], device="cpu")
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
    return out, None


if __name__ == "__main__":
    prepare()
    observe()
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
