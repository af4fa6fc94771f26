"""torch DistributedDataParallel, on gloo with its default settings or on NCCL; blocks only, since it does not survive
a failure."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.workload import Blocks, Config, env_int, limit_threads, make_task


def main() -> None:
    config = Config.from_argv()
    limit_threads()
    group = env_int("REPLICA_GROUP_ID")
    address = f"tcp://127.0.0.1:{os.environ['BENCH_PORT']}"
    gpu = config.device == "cuda"
    device = torch.device("cuda", group) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", rank=group, world_size=config.groups, init_method=address)
    task = make_task(config, device)
    # On a GPU without its second copy of all gradients, as everybody who trains large models has it.
    model = torch.nn.parallel.DistributedDataParallel(task.net, gradient_as_bucket_view=gpu)
    optimizer = task.optimizer()
    blocks = Blocks(config, group, device)
    for step in range(config.total_steps):
        blocks.before()
        batch = task.data.batch(step, group, config.groups, config.batch)
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
        blocks.after()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
