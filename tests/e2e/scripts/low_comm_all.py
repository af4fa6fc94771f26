"""Low communication beside everything else at once: micro-batches, FSDP2, checkpoints, a stream, a scheduler, codes."""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import planaria.torch as pt

parser = argparse.ArgumentParser()
parser.add_argument("--exact", action="store_true")
parser.add_argument("--hold", type=Path, help="until this file exists, every round of the second half takes long")
args = parser.parse_args()

ROUNDS, EVERY, MICRO = 24, 4, 2
job = pt.init(seed=5)
model = nn.Sequential(nn.Embedding(64, 16), nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 64))
if job.world_size > 1:
    for layer in (model[2], model[4]):
        fully_shard(layer, mesh=job.mesh)
    fully_shard(model, mesh=job.mesh)
inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(inner, 2e-2, total_steps=ROUNDS * EVERY + 1)
if args.exact:
    sync: pt.DiLoCo | pt.StreamingDiLoCo = pt.DiLoCo(model, inner, every=EVERY, exact=True)
else:
    sync = pt.StreamingDiLoCo(model, inner, every=2 * EVERY, fragments=2, delay=1)


def walk(shard: int, cursor: int) -> Iterator[tuple[tuple[Tensor, Tensor], int]]:
    while True:
        at = (torch.arange(5) * (shard + 3) + cursor * cursor) % 64
        cursor += 1
        yield (at[:4], at[4]), cursor


data = pt.ShardedStream(walk, batch_size=4, micro_batches=MICRO)
job.protect(sync=sync, scheduler=scheduler, data=data)
for step in job.steps(ROUNDS):
    for number, (x, y) in enumerate(step.batches(data), 1):
        loss = nn.functional.cross_entropy(model(x), y) / MICRO
        loss.backward()
        step.record(loss=loss)
        late = step.index - ROUNDS // 2
        held = time.monotonic() + 0.3 / EVERY * 1.4**late  # slower and slower: that is no hang
        while args.hold and 2 * step.index >= ROUNDS and time.monotonic() < held and not args.hold.exists():
            time.sleep(0.01)
        if number % MICRO:
            continue
        inner.step()
        inner.zero_grad()
        scheduler.step()
