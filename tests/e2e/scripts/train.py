"""A small model whose steps take as long as the test wants. Options make it misbehave in one way."""

import argparse
import threading
import time
from pathlib import Path

import torch
from torch import nn

import planaria.torch as pt
from planaria.core.messages import Phase
from planaria.exchange.communicator import Communicator
from planaria.rank import saver
from planaria.rank.session import Session

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pause", type=float, default=0.0, help="seconds in every shard")
parser.add_argument("--hold", type=Path, help="until this file exists, every shard of the second half takes long")
parser.add_argument("--hold-for", type=float, help="seconds that such a shard takes (default: longer and longer)")
parser.add_argument(
    "--linger", default="", help="a phase that takes a moment longer: one of milliseconds is hard to hit"
)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--samples", type=int, default=500)
parser.add_argument("--odd", default="", help="what goes wrong, and in group 1 only")
args = parser.parse_args()

if args.odd == "early":
    print("early", torch.rand(()), torch.get_default_dtype())  # before anything is seeded
job = pt.init(shards=6, seed=3)
odd = args.odd if job.group == 1 else ""
if odd == "threads":
    torch.set_num_threads(2)
if odd == "start":
    torch.manual_seed(99)
if args.odd == "mute" and job.settings.born.incarnation == 0:
    # In the first life of every group nothing is heard of a checkpoint that is complete: it hangs before it tells.
    saver.prune = lambda *_: threading.Event().wait()
if args.linger:
    show = Session.show

    def linger(session: Session, phase: Phase, shard: int = -1) -> None:
        show(session, phase, shard)
        if phase is Phase[args.linger]:
            time.sleep(0.2)

    Session.show = linger


def lose_a_message() -> None:
    """The group's next exchange takes the numbers of another: nothing that it sends meets what the others wait for."""
    real = Communicator.tags

    def tags(life: Communicator, count: int) -> int:
        Communicator.tags = real
        real(life, 1)
        return real(life, count)

    Communicator.tags = tags


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, args.width), nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(args.width, 4)
        self.extra = nn.Linear(args.width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        out = self.head(hidden)
        return out if odd == "unused" else out + self.extra(hidden)


model = Model()
if args.odd == "frozen":
    model.requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
generator = torch.Generator().manual_seed(0)
points = torch.randn(args.samples, 16, generator=generator)
labels = torch.randint(0, 4, (args.samples,), generator=generator)
if args.odd == "early":
    torch.set_default_dtype(torch.float64)  # too late for everything above
data = pt.ShardedDataset(torch.utils.data.TensorDataset(points, labels), batch_size=4)
job.protect(model=model, optimizer=optimizer, scheduler=scheduler)
for step in job.steps(args.steps):
    late = min(step.index - args.steps // 2, 30)
    # However slow a machine, no job is over before what is to happen to it has happened; slower and slower is no hang.
    hold_for = args.hold_for or 0.3 * 1.1**late
    if odd == "mislays" and step.index == 9:
        lose_a_message()
    for x, y in step.batches(data):
        loss = nn.functional.cross_entropy(model(x), y)
        if odd == "nan" and step.index == 5:
            loss = loss * float("nan")
        loss.backward()
        step.record(loss=loss)
        time.sleep(args.pause + (0.2 if odd == "slow" else 0.0))
        held = time.monotonic() + hold_for
        while args.hold and 2 * step.index >= args.steps and time.monotonic() < held and not args.hold.exists():
            time.sleep(0.01)
    optimizer.step()
    scheduler.step()
