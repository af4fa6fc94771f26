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
    limit_threads,
    loss_function,
    make_net,
)

ENDLESS = 10**9  # steps: the driver ends the job


def as_it_is(batch: Any) -> Any:
    """Samples.__getitems__ gives a batch already."""
    return batch


def sharded(samples: Samples, config: Config) -> pt.ShardedDataset:
    return pt.ShardedDataset(samples, batch_size=config.shard_batch, collate_fn=as_it_is, shuffle=False)


def run_blocks(config: Config, job: pt.Job) -> None:
    net, width, classes = make_net(config.size, config.seed)
    data, lossf = sharded(Samples(width, classes, config.seed), config), loss_function()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    job.protect(model=net, optimizer=optimizer)
    blocks = Blocks(config, job.group)
    for step in job.steps(config.total_steps):
        blocks.before()
        for x, y in step.batches(data):
            lossf(net(x), y).backward()
        optimizer.step()
        blocks.after()


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
    job = pt.init(shards=config.shard_count, seed=config.seed)
    (run_blocks if config.mode == "blocks" else run_free)(config, job)


if __name__ == "__main__":
    main()
