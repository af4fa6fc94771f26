"""The loop of plain_loop.py with Planaria. Alone: python; unkillable: planaria run --groups 4."""

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import planaria.torch as pt

job = pt.init(shards=4, seed=0)
x = torch.randn(4096, 16)
y = (x.sin().sum(dim=1) > 0).long()
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.protect(model=model, optimizer=optimizer)
data = pt.ShardedDataset(TensorDataset(x, y), batch_size=8)

for step in job.steps(128):
    for inputs, labels in step.batches(data):
        F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()

print(f"right: {(model(x).argmax(dim=1) == y).float().mean():.1%}")
