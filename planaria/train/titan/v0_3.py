"""torchtitan 0.3's Trainer, whose loop goes over Planaria's steps.

A group is one torchtitan world: model, parallelism, optimizer, learning rates, loss and metrics are torchtitan's. What
a step consists of is what it would be under ``data_parallel_replicate_degree`` V, the number of shards (not of groups):
shard v reads the data of data rank v, the global batch is all V shards, and every valid token of it weighs the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from torchtitan import trainer as titan
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.observability import structured_logger as sl
from torchtitan.tools.logging import logger

import planaria.torch as pt
from planaria.errors import UsageError
from planaria.train.titan import older_torch
from planaria.train.titan.v0_3_data import ShardedLoader

Batch = list[tuple[dict[str, torch.Tensor], torch.Tensor]]


class Trainer(titan.Trainer):  # type: ignore[misc]
    """This process's trainer: one rank of one group."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Trainer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config) -> None:
        _check(config)
        # torchtitan wants torchrun's variables. By itself a script is a job of one group of one rank.
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        for name, value in alone.items():
            os.environ.setdefault(name, value)
        # Of all groups: one of them saves.
        folder = os.path.abspath(os.path.join(config.dump_folder, config.checkpoint.folder))
        config.checkpoint = replace(config.checkpoint, folder=folder)
        if group := os.environ.get("PLANARIA_GROUP"):
            config.dump_folder = os.path.join(config.dump_folder, f"group{group}")
        super().__init__(config)
        self.dataloader.micro_batches = self.gradient_accumulation_steps
        self.dataloader.batch_size = self.num_pipeline_parallel_microbatches
        self.dataloader.seconds = self.metrics_processor.data_loading_times

    def init_distributed(self) -> ParallelDims:
        """torchtitan's world is this group. Its settings count for the whole job, so a group's are worked out here,
        before anything is built from them."""
        config, dims = self.config, super().init_distributed()
        mesh = {"pp": dims.pp, "fsdp": dims.dp_shard, "cp": dims.cp, "tp": dims.tp}
        self.job = pt.init(seed=config.debug.seed or 0, mesh=mesh, device=self.device.type)
        shards = self.job.shards
        total = config.training.global_batch_size
        if total > 0:
            if total % shards:
                raise UsageError(
                    f"--training.global_batch_size {total} is that of the whole job, so it must be a multiple of the "
                    f"number of shards, {shards}"
                )
            config.training = replace(config.training, global_batch_size=total // shards)
        config.dataloader = ShardedLoader.Config(inner=config.dataloader, shards=shards)
        return dims

    def train(self) -> None:
        config, job = self.config, self.job
        self._start_from_weights()
        job.protect(
            **{f"model{index}": part for index, part in enumerate(self.model_parts)},
            **{f"optimizer{index}": optimizer for index, optimizer in enumerate(self.optimizers)},
            lr_scheduler=self.lr_schedulers,
            data=self.dataloader,
            # With overlap a gradient must be complete after one backward. A pipeline's schedule runs many, and a
            # chunked loss runs that of lm_head before, whose weight may be the embedding's, too.
            overlap=not (self.parallel_dims.pp_enabled or getattr(self.model_config, "enable_weight_tying", False)),
        )
        first, saver = True, 0
        with config.profiler.build(global_step=0, base_folder=config.dump_folder) as profiler:
            for step in job.steps(config.training.steps):
                self.step = step.index + 1
                sl.set_step(self.step)
                self.gc_handler.run(self.step)
                with step.guard():
                    with sl.log_trace_span("step"):
                        self._compute(step)
                        if not step.groups:
                            continue  # this group has taken a newer state from its peers: nothing done here counts
                        saver = step.groups[0]
                        self._apply(step)
                    if config.validator.enable and self.validator.should_validate(self.step):
                        self.validator.validate(self.model_parts, self.step)
                    profiler.step()
                    if first:
                        timeout = timedelta(seconds=config.comm.train_timeout_seconds)
                        dist_utils.set_pg_timeouts(timeout=timeout, parallel_dims=self.parallel_dims)
                        first = False
        self.step = config.training.steps
        if job.group == saver:
            self.checkpointer.save(self.step, last_step=True)
        logger.info("Training completed")

    def _start_from_weights(self) -> None:
        """Load the weights that the training is to start from, if any are given, and have the job save and resume.
        It resumes from Planaria's checkpoints only: torchtitan's do not say where each shard stands in the data."""
        config = self.config.checkpoint
        if not config.enable:
            return
        # torchtitan would rather resume from what is in its folder, where an earlier run may have left its weights.
        self.checkpointer.folder = ""
        self.checkpointer.load()
        self.checkpointer.folder = config.folder
        if not config.load_only:
            keep = config.keep_latest_k or sys.maxsize
            self.job.checkpoint(os.path.join(config.folder, "planaria"), every=config.interval, keep=keep)

    def _compute(self, step: pt.Step) -> None:
        """Forward and backward of every batch of this group's shards."""
        # Valid tokens of the whole step are known after the exchange only: until then as if all were valid.
        assumed = torch.tensor(self._tokens, dtype=torch.int64, device=self.device)
        for batch in step.batches(self.dataloader):
            inputs, labels, valid = self._to_device(batch)
            if self.parallel_dims.pp_enabled:
                loss = self.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=assumed)
            else:
                loss = self.forward_backward_step(input_dict=inputs[0], labels=labels[0], global_valid_tokens=assumed)
            if not self.parallel_dims.pp_enabled or self.pp_has_last_stage:
                # What comes of it is the mean over shards, their batches and ranks; torchtitan sums the last two.
                dims, batches = self.parallel_dims, self.gradient_accumulation_steps
                step.record(loss=loss * (batches * dims.dp_shard * dims.cp), valid=valid * batches * dims.dp_shard)

    def _to_device(self, batch: Batch) -> tuple[list[dict[str, Any]], list[torch.Tensor], int]:
        valid = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in batch)
        self.metrics_processor.ntokens_since_last_log += sum(labels.numel() for _, labels in batch)
        inputs = [
            {key: value.to(self.device) if isinstance(value, torch.Tensor) else value for key, value in given.items()}
            for given, _ in batch
        ]
        return inputs, [labels.to(self.device) for _, labels in batch], valid

    @property
    def _tokens(self) -> int:
        """Positions in a shard, of all ranks of the group."""
        training = self.config.training
        per_rank = training.local_batch_size * training.seq_len * self.gradient_accumulation_steps
        return int(per_rank * self.parallel_dims.dp_shard)

    def _apply(self, step: pt.Step) -> None:
        """Clip, step the optimizer, log. The gradients are final, and the same in every group."""
        dims, training = self.parallel_dims, self.config.training
        lr_metrics = self.lr_schedulers.get_metrics()
        parameters = [p for part in self.model_parts for p in part.parameters()]
        correction = self._tokens / step.metrics["valid"] if step.metrics["valid"] else 1.0
        if correction != 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(correction)
        with sl.log_trace_span("optim"):
            grad_norm = dist_utils.clip_grad_norm_(
                parameters,
                training.max_norm,
                foreach=True,
                pp_mesh=dims.get_optional_mesh("pp"),
                ep_enabled=dims.ep_enabled,
            )
            self.optimizers.step()
            self.lr_schedulers.step()
        self.ntokens_seen = self.step * self._tokens * self.job.shards
        if self.metrics_processor.should_log(self.step):
            if not self.dataloader.seconds:
                self.dataloader.seconds.append(0.0)  # other groups computed everything; torchtitan takes a mean
            loss = step.metrics["loss"] * correction
            extra = {"n_tokens_seen": self.ntokens_seen, **lr_metrics}
            # Only means are known of other groups, so the mean stands for the largest loss, too.
            self.metrics_processor.log(self.step, loss, loss, float(grad_norm.item()), extra_metrics=extra)


def configurations(model: str) -> dict[str, Callable[[], Any]]:
    """torchtitan's configurations of a model, by name."""
    registry = import_module(f"torchtitan.models.{model}.config_registry")
    theirs = {
        name: value for name, value in vars(registry).items() if getattr(value, "__module__", "") == registry.__name__
    }
    return {name: _wrapped(function) for name, function in theirs.items() if callable(function)}


def _wrapped(function: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: under_planaria(function())


def under_planaria(config: Any) -> Trainer.Config:
    """The configuration with a trainer of this file, and with defaults that it can work with."""
    ours = Trainer.Config(**{field.name: getattr(config, field.name) for field in fields(config)})
    ours.training = replace(ours.training, disable_cuda_graphs=True)
    if older_torch.OLDER:
        older_torch.patch()
        ours.parallelism = replace(ours.parallelism, spmd_backend=older_torch.SPMD_BACKEND)
    return ours


def _check(config: Any) -> None:
    """Raise UsageError for what cannot work together with Planaria."""
    replicas = config.parallelism.data_parallel_replicate_degree
    if replicas != 1:
        raise UsageError(
            f"--parallelism.data_parallel_replicate_degree {replicas}: groups are the replicas, so this must stay 1; "
            f"say planaria run --groups {replicas}"
        )
    checkpoint = config.checkpoint
    if checkpoint.enable and (checkpoint.load_step != -1 or not checkpoint.initial_load_model_only):
        raise UsageError(
            "--checkpoint.load_step and --checkpoint.no-initial_load_model_only: a training starts with given weights "
            "at its first step, or goes on from the newest of its own checkpoints, which are not torchtitan's"
        )
    if not config.training.disable_cuda_graphs:
        raise UsageError(
            "--training.no-disable_cuda_graphs: a replayed graph runs no hooks, by which gradients are collected; "
            "leave CUDA graphs off"
        )
