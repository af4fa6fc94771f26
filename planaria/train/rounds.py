"""The training loop of low communication: [semi_sync]."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

import planaria.torch as pt
from planaria.torch.low_comm import LowCommunication
from planaria.train.config import Config
from planaria.train.measures import Speed, Validation
from planaria.train.metrics import Recorder
from planaria.train.network import Network
from planaria.train.optimizer import rate


def sync_of(config: Config, network: Network, optimizer: torch.optim.Optimizer) -> LowCommunication | None:
    """The method that [semi_sync] names. Raises UsageError if the model cannot be cut so."""
    s, model = config.semi_sync, network.module
    match s.method:
        case "local_sgd":
            return pt.LocalSGD(model, optimizer, every=s.sync_steps, exact=s.exact, paced=s.paced)
        case "diloco":
            return pt.DiLoCo(
                model,
                optimizer,
                every=s.sync_steps,
                outer_lr=s.outer_lr,
                outer_momentum=s.outer_momentum,
                exact=s.exact,
                paced=s.paced,
            )
        case "streaming":
            return pt.StreamingDiLoCo(
                model,
                optimizer,
                every=s.sync_steps,
                fragments=s.num_fragments,
                delay=s.fragment_sync_delay,
                mix=s.fragment_update_alpha,
                outer_lr=s.outer_lr,
                outer_momentum=s.outer_momentum,
                paced=s.paced,
            )
    return None


def train_in_rounds(
    config: Config,
    job: pt.Job,
    data: pt.ShardedDataset,
    network: Network,
    optimizer: torch.optim.Optimizer,
    sync: LowCommunication,
    recorder: Recorder,
    speed: Speed,
    check: Validation | None,
    same_tokens: Callable[[], None],
) -> None:
    """``training.steps`` optimizer steps, in rounds. Metrics have a line for the first round and the last, and for
    every one in which a multiple of ``log_freq`` steps was reached; they are means over the round."""
    each, last = config.semi_sync.round, config.training.steps - 1

    def due(index: int, every: int) -> bool:
        return (index + 1) // every > (index + 1 - each) // every or index == last

    for step in job.steps(config.training.steps // each):
        same_tokens()
        with step.guard():
            batches = 0
            for tokens, labels in step.batches(data):
                loss = network.train(tokens, labels)
                if loss is not None:
                    step.record(loss=loss)
                batches += 1
                if batches % network.batches:
                    continue
                step.record(grad_norm=job.clip_grad_norm_(config.training.max_norm or math.inf))
                for group in optimizer.param_groups:
                    group["lr"] = rate(config, sync.inner_step)
                optimizer.step()
                optimizer.zero_grad()
            if not step.groups:
                continue  # void: this group has taken a newer state
            index = (step.index + 1) * each - 1  # of the newest optimizer step
            leads = job.rank == 0 and job.group == step.groups[0]
            recorder.computed(index, leads)
            measured = check is not None and due(index, config.validation.freq)
            if measured or step.index == 0 or due(index, config.metrics.log_freq):
                line = {"step": index, **step.metrics, "lr": rate(config, index)}
                share = 1.0 if sync.exact else len(step.groups) / job.shards
                fast = speed.since(index, len(step.groups), share)
                if check is not None and measured:
                    with sync.shared():
                        line["validation_loss"] = check.loss()
                    speed.start(index)
                recorder.line(line, fast)
