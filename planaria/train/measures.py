"""What the trainer measures beside the training loss."""

from __future__ import annotations

import time

import torch
from torch.utils.data import default_collate

import planaria.torch as pt
from planaria.errors import UsageError
from planaria.train.config import Config
from planaria.train.data import Samples
from planaria.train.network import Network
from planaria.train.shapes import Shape, peak_of


class Validation:
    """The mean loss over the same batches every time, computed by every group for itself: nothing is exchanged between
    groups, and all get the same. Whatever it draws from random generators changes nothing: they are seeded anew
    before the next step."""

    def __init__(self, config: Config, network: Network, samples: Samples) -> None:
        self._network, self._samples = network, samples
        self._size = network.batch_size * network.data_ranks
        shard = self._size * network.batches
        self._batches = min(config.validation.steps, len(samples) // shard) * network.batches
        if not self._batches:
            raise UsageError(
                f"[validation] has {len(samples)} samples but needs the {shard} of a shard; hold out more, or give it "
                "files"
            )

    def loss(self) -> float:
        module, each = self._network.module, self._network.batch_size
        module.eval()
        losses = []
        for batch in range(self._batches):
            first = batch * self._size + self._network.data_rank * each
            tokens, labels = default_collate([self._samples[index] for index in range(first, first + each)])
            losses.append(self._network.evaluate(tokens, labels))
        module.train()
        return self._network.mean(losses)


class Speed:
    """Tokens a second of the whole job, and how much of the devices' peak that is (model FLOPs utilisation)."""

    def __init__(self, shape: Shape, config: Config, job: pt.Job, ranks: int) -> None:
        length = config.training.seq_len
        once = config.training.local_batch_size * config.degrees(ranks)["fsdp"]
        self._tokens = length * once * job.shards * config.micro_batches(job.shards, ranks)
        self._flops, self._ranks = shape.flops_per_token(length), ranks
        name = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else ""
        self._peak = peak_of(name)
        self._then: tuple[int, float] | None = None

    def start(self, step: int) -> tuple[int, float]:
        """Measure from here on, ``step`` being the newest that is done. Returns it, and the time."""
        self._then = (step, time.perf_counter())
        return self._then

    def since(self, step: int, groups: int, share: float = 1.0) -> dict[str, float]:
        """Over the steps since the last call, ``step`` being the newest; nothing at the first call. ``groups`` took
        part in it, with ``share`` of the job's tokens."""
        before = self._then
        then, now = self.start(step)
        if before is None:
            return {}
        rate = (then - before[0]) * self._tokens * share / (now - before[1])
        found = {"tokens_per_second": rate}
        if self._peak is not None:
            found["mfu"] = rate * self._flops / (self._peak * self._ranks * groups)
        return found
