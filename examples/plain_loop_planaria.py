"""The loop of plain_loop.py with Planaria. Run it alone, or: planaria run --groups 4 plain_loop_planaria.py"""

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import planaria.torch as pt

job = pt.init(shards=4, seed=0)
x = torch.randn(4096, 16)
train_set = TensorDataset(x, (x.sin().sum(dim=1) > 0).long())

model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.protect(model=model, optimizer=optimizer)
data = pt.ShardedDataset(train_set, batch_size=8)

for step in job.steps(128):
    for inputs, labels in step.batches(data):
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        step.record(loss=loss)
    optimizer.step()
    print(f"step {step.index}: loss {step.metrics['loss']:.4f}")
