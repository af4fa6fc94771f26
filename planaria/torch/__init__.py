"""The PyTorch front.

import planaria.torch as pt

job = pt.init()
job.protect(model=model, optimizer=optimizer)
data = pt.ShardedDataset(train_set, batch_size=8)
for step in job.steps(10_000):
    for batch in step.batches(data):
        loss_fn(model(batch)).backward()
    optimizer.step()
"""

from planaria.core.messages import Policy
from planaria.errors import JobLostError, NonFiniteError, PlanariaError, UsageError
from planaria.torch.data import ShardedDataset, ShardedStream
from planaria.torch.job import Job, init
from planaria.torch.low_comm import DiLoCo, LocalSGD, StreamingDiLoCo
from planaria.torch.step import Step

__all__ = [
    "DiLoCo",
    "Job",
    "JobLostError",
    "LocalSGD",
    "NonFiniteError",
    "PlanariaError",
    "Policy",
    "ShardedDataset",
    "ShardedStream",
    "Step",
    "StreamingDiLoCo",
    "UsageError",
    "init",
]
