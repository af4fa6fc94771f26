"""What a rank trains: its part of the model, and how the ranks of its group compute one batch together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from planaria.train.config import Config
from planaria.train.model import initialise, loss_of
from planaria.train.parallel import DTYPES, along, context_of, data_mesh, make_part, stages_of
from planaria.train.shapes import Shape

_SCHEDULES: dict[str, Any] = {
    "1F1B": Schedule1F1B,
    "GPipe": ScheduleGPipe,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
}


class Network:
    """This rank's part of the model, filled with the weights of ``training.seed``. ``mesh`` is the group's (None: this
    rank alone); ``micro_batches`` is how many a shard has.

    ``batches`` of ``batch_size`` samples make up this rank's part of a shard. A pipeline takes all micro-batches of a
    shard as one batch, and calls backward many times for it. ``data_ranks`` ranks see different samples.
    """

    def __init__(
        self, config: Config, shape: Shape, mesh: DeviceMesh | None, device: torch.device, micro_batches: int
    ) -> None:
        self._shape, self._device, self._micro_batches = shape, device, micro_batches
        self._mesh, self._pipe, self._context = mesh, along(mesh, "pp"), context_of(config, mesh)
        self._half = DTYPES[config.training.mixed_precision_param]
        self._autocast = self._half != torch.float32 and data_mesh(mesh) is None  # FSDP casts by itself
        self._stages = stages_of(config, shape, self._pipe)
        parts = [make_part(config, shape, blocks, mesh, device) for _, blocks in self._stages]
        self.module: nn.Module = parts[0] if len(parts) == 1 else nn.ModuleList(parts)
        for part in parts:
            initialise(part, shape, config.training.seed)
        self.pipeline = None if self._pipe is None else self._make_pipeline(config, self._pipe, parts)
        self.batches, once = (micro_batches, 1) if self.pipeline is None else (1, micro_batches)
        self.batch_size = config.training.local_batch_size * once
        data = along(mesh, "fsdp")
        self.data_ranks, self.data_rank = (1, 0) if data is None else (data.size(), data.get_local_rank())

    def _make_pipeline(self, config: Config, pipe: DeviceMesh, parts: list[Any]) -> Any:
        name, count = config.parallelism.pipeline_parallel_schedule, pipe.size() * len(parts)
        stages = [
            PipelineStage(part, index, count, self._device, group=pipe.get_group())
            for (index, _), part in zip(self._stages, parts, strict=True)
        ]
        return _SCHEDULES[name](stages if name == "Interleaved1F1B" else stages[0], self._micro_batches, loss_of)

    def train(self, tokens: Tensor, labels: Tensor) -> Tensor | None:
        """Forward and backward of one batch, ``[batch_size, seq_len]`` each; adds this batch's part of the gradient of
        the shard's mean loss. Returns the batch's mean loss on this rank; None on a pipeline's stages but the last."""
        tokens, labels = self._local(tokens), self._local(labels)
        if self.pipeline is not None:
            return self._piped(self.pipeline.step, tokens, labels)
        loss = self._loss(tokens, labels)
        (loss / self._micro_batches).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor | None:
        """The mean loss of one batch on this rank, as ``train`` gives it, without gradients."""
        tokens, labels = self._local(tokens), self._local(labels)
        return self._loss(tokens, labels) if self.pipeline is None else self._piped(self.pipeline.eval, tokens, labels)

    def mean(self, losses: list[Tensor | None]) -> float:
        """The mean, over batches and over the ranks of the group, of what ``evaluate`` gave: equal on all of them."""
        mine = [loss.double() for loss in losses if loss is not None]
        total = torch.stack(mine).sum() if mine else torch.zeros((), dtype=torch.float64, device=self._device)
        if self._mesh is None:
            return total.item() / len(losses)
        dist.all_reduce(total)
        last = self._mesh.size() // (1 if self._pipe is None else self._pipe.size())  # ranks that have losses
        return total.item() / (len(losses) * last)

    def _loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with self._casting():
            return loss_of(self.module(tokens), labels)

    def _piped(self, run: Callable[..., Any], tokens: Tensor, labels: Tensor) -> Tensor | None:
        first, last = self._stages[0][0] == 0, self._stages[-1][1].stop == self._shape.layers
        losses: list[Tensor] = []
        with self._casting():
            run(*([tokens] if first else []), target=labels if last else None, losses=losses, return_outputs=False)
        return torch.stack(losses).detach().double().mean() if last else None

    def _casting(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, self._half) if self._autocast else nullcontext()

    def _local(self, x: Tensor) -> Tensor:
        """This rank's part of the sequences."""
        x = x.to(self._device, non_blocking=True)
        if self._context is None:
            return x
        return x[:, self._context.places(self._device)]
