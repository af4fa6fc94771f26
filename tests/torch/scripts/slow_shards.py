"""Three steps whose second and third shard take long in group 0."""

import time

import torch

import planaria.torch as pt

job = pt.init(seed=1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model=model, optimizer=optimizer)
data = pt.ShardedDataset([torch.randn(8) for _ in range(64)], batch_size=2)
shards = 0
for step in job.steps(3):
    for x in step.batches(data):
        shards += 1
        if job.group == 0 and not job.alone and shards in (2, 3):
            time.sleep(4)
        model(x).pow(2).mean().backward()
    optimizer.step()
