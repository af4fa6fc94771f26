"""The training loop."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.data import default_collate

import planaria.torch as pt
from planaria.errors import UsageError
from planaria.train.config import Config
from planaria.train.data import Samples, samples_of
from planaria.train.metrics import Recorder
from planaria.train.network import Network
from planaria.train.optimizer import make_optimizer, rate
from planaria.train.shapes import SHAPES, Shape, peak_of
from planaria.train.tokens import Tokenizer, tokenizer_of


def train(config: Config) -> None:
    """Train as ``config`` says, as this process's part in the job: a rank of ``planaria run``, or alone.

    Raises UsageError for what cannot work on this machine or with this data.
    """
    degrees = config.degrees(int(os.environ.get("WORLD_SIZE", "1")))
    ranks = math.prod(degrees.values())
    if config.debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    job = pt.init(
        shards=config.shards,
        seed=config.training.seed,
        mesh={name: degree for name, degree in degrees.items() if degree > 1} or None,
        exact=None if config.fault_tolerance.exact == "auto" else config.fault_tolerance.exact,
        device=None if config.training.device == "auto" else config.training.device,
    )
    tokenizer = tokenizer_of(config.model.tokenizer_path)
    shape = shape_of(config, tokenizer)
    samples, held_out, digest = samples_of(config, tokenizer)
    mesh = job.mesh if ranks > 1 else None
    network = Network(config, shape, mesh, job.device, config.micro_batches(job.shards, ranks))
    optimizer = make_optimizer(config, network.module.parameters())
    size = network.batch_size * network.data_ranks
    data = pt.ShardedDataset(samples, size, micro_batches=network.batches)
    check = Validation(config, network, held_out) if held_out is not None else None
    folder, board = Path(config.job.dump_folder), config.metrics.save_tb_folder
    recorder = Recorder(
        folder / "metrics.jsonl", folder / board if config.metrics.enable_tensorboard else None, config.training.steps
    )
    facts = {"data": digest}
    job.protect(
        overlap=network.pipeline is None,
        model=network.module,
        optimizer=optimizer,
        recorder=recorder.state,
        facts=facts,
    )
    if config.checkpoint.enable:
        job.checkpoint(folder / config.checkpoint.folder, config.checkpoint.interval, config.checkpoint.keep_latest_k)
    speed = Speed(shape, config, job, ranks)
    last = config.training.steps - 1

    for step in job.steps(config.training.steps):
        if facts["data"] != digest:  # healed by groups that read something else
            raise UsageError(f"group {job.group} has other tokens than the job; give all nodes the same data")
        with step.guard():
            for tokens, labels in step.batches(data):
                loss = network.train(tokens, labels)
                if loss is not None:
                    step.record(loss=loss)
            if not step.groups:
                continue  # void: this group has taken a newer state
            index = step.index
            norm = job.clip_grad_norm_(config.training.max_norm or math.inf)
            for group in optimizer.param_groups:
                group["lr"] = rate(config, index)
            optimizer.step()

            leads = job.rank == 0 and job.group == step.groups[0]
            recorder.computed(index, leads)
            measured = check is not None and ((index + 1) % config.validation.freq == 0 or index == last)
            if measured or index % config.metrics.log_freq == 0 or index == last:
                line = {
                    "step": index,
                    "loss": step.metrics["loss"],
                    "grad_norm": norm.item(),
                    "lr": rate(config, index),
                }
                fast = speed.since(index, len(step.groups))
                if check is not None and measured:
                    line["validation_loss"] = check.loss()
                    speed.start(index)
                recorder.line(line, fast)
    recorder.close()


def shape_of(config: Config, tokenizer: Tokenizer) -> Shape:
    """Of the model, with a vocabulary that holds the tokenizer's. Raises UsageError if it cannot."""
    shape = SHAPES[config.model.flavor]
    if shape.vocab == 0:
        # A multiple of 64 is what matrix units and every tensor-parallel degree like.
        return replace(shape, vocab=-(-tokenizer.size // 64) * 64)
    if tokenizer.size > shape.vocab:
        raise UsageError(
            f"model.tokenizer_path has {tokenizer.size} tokens; it must have at most the {shape.vocab} of "
            f"{config.model.flavor}"
        )
    return shape


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

    def since(self, step: int, groups: int) -> dict[str, float]:
        """Over the steps since the last call, ``step`` being the newest; nothing at the first call. ``groups`` took
        part in it."""
        before = self._then
        then, now = self.start(step)
        if before is None:
            return {}
        rate = (then - before[0]) * self._tokens / (now - before[1])
        found = {"tokens_per_second": rate}
        if self._peak is not None:
            found["mfu"] = rate * self._flops / (self._peak * self._ranks * groups)
        return found
