"""Planaria's contestants of bench/slow_links.py."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import planaria.torch as pt
from bench.text_net import BATCH, LR, Log, Windows, fragments, make_net

parser = argparse.ArgumentParser()
parser.add_argument("--method", choices=("step", "diloco", "streaming"), required=True)
parser.add_argument("--every", type=int, default=40)
parser.add_argument("--delay", type=int, default=5)
parser.add_argument("--shards", type=int, default=4)
args = parser.parse_args()

job = pt.init(shards=args.shards, seed=1)
net = make_net(job.seed)
optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
data, log = pt.ShardedDataset(Windows(), batch_size=BATCH), Log()
if args.method == "step":
    every, sync = 1, None
    job.protect(model=net, optimizer=optimizer)
else:
    if args.method == "diloco":
        sync = pt.DiLoCo(net, optimizer, every=args.every)
    else:
        sync = pt.StreamingDiLoCo(net, optimizer, every=args.every, fragments=fragments(net), delay=args.delay)
    every = sync.steps
    job.protect(sync=sync)
for step in job.steps(10**7):
    for x, y in step.batches(data):
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        if sync is not None:
            optimizer.step()
            optimizer.zero_grad()
        step.record(loss=loss)
    if sync is None:
        optimizer.step()
    log.write(sync=step.index, steps=every, groups=len(step.groups), group=job.group)
