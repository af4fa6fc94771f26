"""A loop that works at the top of its body. ACTS say what goes wrong in this rank."""

import os
import time

import torch

import planaria.torch as pt
from planaria.errors import CommunicatorError
from planaria.exchange import tree_exchange

job = pt.init(seed=1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
job.protect(model=model, optimizer=optimizer, scheduler=scheduler)
data = pt.ShardedDataset([torch.randn(8) for _ in range(64)], batch_size=2)
acts = os.environ.get("ACTS", "").split()

if "miss-step-3" in acts:
    # The last bytes of this exchange do not reach this rank, though its peers had everything.
    finish, calls = tree_exchange.TreeExchange.finish, []

    def missing(self, interrupted=lambda: False):
        result = finish(self, interrupted)
        calls.append(result)
        if len(calls) == 4:
            raise CommunicatorError("the connection was closed by the peer")
        return result

    tree_exchange.TreeExchange.finish = missing

for step in job.steps(8):
    if "schedule" in os.environ.get("LOOP", ""):
        scheduler.step()
    else:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step.index + 1)
    for x in step.batches(data):
        ((model(x) - x) ** 2).mean().backward()
        if "slow-shards" in acts:
            time.sleep(0.4)
    optimizer.step()
    if "slow-after-3" in acts and step.index == 3:
        time.sleep(2)
