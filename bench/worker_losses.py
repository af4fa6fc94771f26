"""What is trained while bench/losses.py takes parts of it away: a small net, under FSDP2 where a group has several
ranks, with every step guarded."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import TensorDataset

import planaria.torch as pt

parser = argparse.ArgumentParser()
parser.add_argument("--sleep", type=float, default=0.02, help="seconds added to each shard")
parser.add_argument("--shards", type=int, default=4)
parser.add_argument("--width", type=int, default=256)
args = parser.parse_args()

job = pt.init(shards=args.shards, seed=1)
width = args.width
model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 8))
model = model.to(job.device)
if job.world_size > 1:
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer, mesh=job.mesh)
        assert isinstance(layer, FSDPModule)
        if job.device.type == "cpu":
            layer.set_force_sum_reduction_for_comms(True)  # gloo cannot divide while it sums
optimizer = torch.optim.AdamW(model.parameters())
generator = torch.Generator().manual_seed(2)
points = torch.randn(4096, 64, generator=generator)
data = pt.ShardedDataset(TensorDataset(points, points.sum(1).long() % 8), batch_size=16)
job.protect(model=model, optimizer=optimizer)
for step in job.steps(10**9):
    with step.guard():
        for x, y in step.batches(data):
            loss = nn.functional.cross_entropy(model(x.to(job.device)), y.to(job.device))
            loss.backward()
            step.record(loss=loss)
            time.sleep(args.sleep)
        optimizer.step()
