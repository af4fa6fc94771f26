"""The training loop."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import torch

import planaria.torch as pt
from planaria.errors import UsageError
from planaria.train.config import Config
from planaria.train.data import samples_of
from planaria.train.measures import Speed, Validation
from planaria.train.metrics import Recorder
from planaria.train.network import Network
from planaria.train.optimizer import make_optimizer, rate
from planaria.train.rounds import sync_of, train_in_rounds
from planaria.train.shapes import SHAPES, Shape
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
        check_state=config.fault_tolerance.check_state,
        recheck=config.fault_tolerance.recheck,
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
    sync = sync_of(config, network, optimizer)
    trained = {"model": network.module, "optimizer": optimizer} if sync is None else {"sync": sync}
    job.protect(overlap=network.pipeline is None, recorder=recorder.state, facts=facts, **trained)
    each = 1 if sync is None else config.semi_sync.round  # optimizer steps in a step of the job
    if config.checkpoint.enable:
        interval = max(1, config.checkpoint.interval // each)
        job.checkpoint(folder / config.checkpoint.folder, interval, config.checkpoint.keep_latest_k)
    speed = Speed(shape, config, job, ranks)

    def same_tokens() -> None:
        if facts["data"] != digest:  # healed by groups that read something else
            raise UsageError(f"group {job.group} has other tokens than the job; give all nodes the same data")

    if sync is not None:
        train_in_rounds(config, job, data, network, optimizer, sync, recorder, speed, check, same_tokens)
        recorder.close()
        return
    last = config.training.steps - 1
    for step in job.steps(config.training.steps):
        same_tokens()
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
