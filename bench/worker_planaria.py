"""Planaria as its README shows it. With as many shards as groups, shard v of step s has the data that group v
of a peer has in step s."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

import planaria.torch as pt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.workload import (
    Blocks,
    CommitLog,
    Config,
    Counted,
    Samples,
    be_deterministic,
    limit_threads,
    loss_function,
    make_net,
    make_task,
)

ENDLESS = 10**9  # steps: the driver ends the job


def as_it_is(batch: Any) -> Any:
    """Samples.__getitems__ gives a batch already."""
    return batch


def sharded(samples: Samples, config: Config) -> pt.ShardedDataset:
    return pt.ShardedDataset(samples, batch_size=config.shard_batch, collate_fn=as_it_is, shuffle=False)


def run_blocks(config: Config, job: pt.Job) -> None:
    task = make_task(config, job.device)
    data, optimizer = sharded(task.data, config), task.optimizer()
    job.protect(model=task.net, optimizer=optimizer)
    blocks = Blocks(config, job.group, job.device)
    for step in job.steps(config.total_steps):
        blocks.before()
        for batch in step.batches(data):
            task.loss(task.net, batch).backward()
        optimizer.step()
        blocks.after()


def run_steps(config: Config, job: pt.Job) -> None:
    """As a user has it: with FSDP2 if wanted, and the loss in the record of the run."""
    task = make_task(config, job.device)
    if config.fsdp:
        from torch.distributed.fsdp import fully_shard

        for block in task.net.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=job.mesh)
        fully_shard(task.net, mesh=job.mesh)
    data, optimizer = sharded(task.data, config), task.optimizer()
    job.protect(model=task.net, optimizer=optimizer)
    for step in job.steps(config.steps or ENDLESS):
        for batch in step.batches(data):
            loss = task.loss(task.net, batch)
            step.record(loss=loss)
            loss.backward()
        time.sleep(config.sleep)
        optimizer.step()


def run_free(config: Config, job: pt.Job) -> None:
    log = CommitLog(config, job.group)
    net, width, classes = make_net(config.size, config.seed)
    data, lossf = sharded(Samples(width, classes, config.seed), config), loss_function()
    model = Counted(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(ENDLESS):
        log.attempt(step.index)
        batches = 0
        for x, y in step.batches(data):
            logits, zero = model(x)
            loss = lossf(logits, y) + zero
            time.sleep(config.sleep * config.groups / job.shards)  # work belongs to a shard: inherited ones cost too
            loss.backward()
            step.record(loss=loss.item())
            batches += 1
        samples = model.samples(job.shards, config.shard_batch)
        optimizer.step()
        log.commit(step.index, samples, batches > 0)


def main() -> None:
    config = Config.from_argv()
    limit_threads()
    be_deterministic(config)
    job = pt.init(shards=config.shard_count, seed=config.seed)
    {"blocks": run_blocks, "free": run_free, "steps": run_steps}[config.mode](config, job)


if __name__ == "__main__":
    main()
