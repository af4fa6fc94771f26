"""A small model trained by a method of low communication. Options make it misbehave in one way."""

import argparse
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import planaria.torch as pt

parser = argparse.ArgumentParser()
parser.add_argument("--method", default="diloco")
parser.add_argument("--rounds", type=int, default=60)
parser.add_argument("--every", type=int, default=2)
parser.add_argument("--exact", action="store_true")
parser.add_argument("--shards", type=int)
parser.add_argument("--pause", type=float, default=0.0, help="seconds in every inner step")
parser.add_argument("--hold", type=Path, help="until this file exists, every round of the second half takes long")
parser.add_argument("--held", type=float, help="seconds that a round takes then (default: longer and longer)")
parser.add_argument("--guard", action="store_true", help="outlive the loss of a rank")
parser.add_argument("--odd", default="", help="what goes wrong, and in group 1 only")
parser.add_argument("--paced", action="store_true", help="rates from inner_step, and group 1 is slow")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--go", type=Path, help="until this file exists, --odd late is")
args = parser.parse_args()

job = pt.init(shards=args.shards, seed=3)
odd = args.odd if job.group == 1 else ""
width = 32
model = nn.Sequential(
    nn.Linear(16, width), nn.Tanh(), nn.Dropout(args.dropout), nn.Linear(width, width), nn.Linear(width, 4)
)
model.to(job.device)
if job.world_size > 1:
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=job.mesh)
    fully_shard(model, mesh=job.mesh)
inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
every = args.every * 2 if odd == "every" else args.every
if args.method == "streaming":
    sync = pt.StreamingDiLoCo(model, inner, every=2 * every, fragments=2, delay=1, paced=args.paced)
elif args.method == "local_sgd":
    sync = pt.LocalSGD(model, inner, every=every, exact=args.exact)
else:
    sync = pt.DiLoCo(model, inner, every=every, exact=args.exact, paced=args.paced)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(inner, 120)
generator = torch.Generator().manual_seed(0)
points = torch.randn(500, 16, generator=generator)
labels = torch.randint(0, 4, (500,), generator=generator)
data = pt.ShardedDataset(torch.utils.data.TensorDataset(points, labels), batch_size=4)
job.protect(sync=sync, scheduler=scheduler)
for step in job.steps(args.rounds):
    late = min(step.index - args.rounds // 2, 30)
    hold_for = args.held or 0.6 * 1.1**late  # slower and slower: that is no hang
    with step.guard() if args.guard else nullcontext():
        for x, y in step.batches(data):
            began = time.monotonic()
            loss = nn.functional.cross_entropy(model(x.to(job.device)), y.to(job.device))
            if odd == "nan" and step.index == 5:
                loss = loss * float("nan")
            loss.backward()
            inner.step()
            inner.zero_grad()
            if args.paced:
                inner.param_groups[0]["lr"] = 1e-2 / (1 + sync.inner_step)
                # Ten times as long as it takes by itself, which depends on what else the machine has to do.
                time.sleep(max(0.03, 9 * (time.monotonic() - began)) if job.group == 1 else 0.0)
            else:
                scheduler.step()
            step.record(loss=loss)
            time.sleep(args.pause)
            if odd == "late" and step.index == 8 and not args.go.exists():
                time.sleep(2.0)  # it gets on, if slowly
            held = time.monotonic() + hold_for / every
            while args.hold and 2 * step.index >= args.rounds and time.monotonic() < held and not args.hold.exists():
                time.sleep(0.01)
