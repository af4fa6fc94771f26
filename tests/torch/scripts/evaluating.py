"""FSDP2 over two ranks, with evaluations that leave parameters gathered. HOW says which.

In the step AT every rank says that it is there, and waits for GATE.
"""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import planaria.torch as pt

how = os.environ.get("HOW", "").split()
job = pt.init(shards=4, seed=1, device="cpu")
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3), nn.Linear(3, 1))
for layer in (model[0], model):  # what is left is the root's, which stays gathered after any forward pass
    fully_shard(layer, mesh=job.mesh, reshard_after_forward=False if "keep" in how else None)
    layer.set_force_sum_reduction_for_comms(True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
points = torch.randn(64, 8)
data = pt.ShardedDataset(list(points), batch_size=2)


def evaluate() -> None:
    model.eval()
    with torch.no_grad():
        model(points)
    model.train()
    if "state" in how and job.rank == 0:
        model.state_dict()  # which gives this rank's parameters back to what they were, and no other's


if "first" in how:
    evaluate()
job.protect(model=model, optimizer=optimizer)
for step in job.steps(12):
    for x in step.batches(data):
        model(x).pow(2).mean().backward()
    if "early" in how:
        evaluate()  # what the root has gathered is old as soon as the optimizer steps
    job.clip_grad_norm_(0.01)
    optimizer.step()
    evaluate()
    if (gate := os.environ.get("GATE")) and step.index == int(os.environ["AT"]):
        Path(f"{gate}-{job.group}-{job.rank}").touch()
        while not Path(gate).exists():
            time.sleep(0.01)
