"""torch DistributedDataParallel on gloo with its default settings; blocks only, since it does not survive a
failure."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.workload import Blocks, Config, Samples, env_int, limit_threads, loss_function, make_net


def main() -> None:
    config = Config.from_argv()
    limit_threads()
    group = env_int("REPLICA_GROUP_ID")
    address = f"tcp://127.0.0.1:{os.environ['BENCH_PORT']}"
    dist.init_process_group("gloo", rank=group, world_size=config.groups, init_method=address)
    net, width, classes = make_net(config.size, config.seed)
    data, lossf = Samples(width, classes, config.seed), loss_function()
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    blocks = Blocks(config, group)
    for step in range(config.total_steps):
        blocks.before()
        x, y = data.batch(step, group, config.groups)
        optimizer.zero_grad()
        lossf(model(x), y).backward()
        optimizer.step()
        blocks.after()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
