"""Two steps that record a metric. In the first, group 0 waits in its last shard for GATE."""

import os
import time
from pathlib import Path

import torch

import planaria.torch as pt

job = pt.init(seed=1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model=model, optimizer=optimizer)
data = pt.ShardedDataset([torch.randn(8) for _ in range(64)], batch_size=2)
gate, shards = os.environ.get("GATE"), 0
for step in job.steps(2):
    for x in step.batches(data):
        shards += 1
        if gate and job.group == 0 and shards == job.shards:
            Path(f"{gate}-here").touch()
            while not Path(gate).exists():
                time.sleep(0.01)
        loss = model(x).pow(2).mean()
        loss.backward()
        step.record(loss=loss)
    assert not step.groups or step.metrics["loss"] > 0
    optimizer.step()
