"""A small model trained by groups of several ranks, laid out as told: see MESHES."""

import argparse
import contextlib
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import planaria.torch as pt
from planaria.torch.checkpoint_io import CheckpointWriter

parser = argparse.ArgumentParser()
MESHES = {
    "plain": None,
    "fsdp": {"fsdp": -1},
    "tp": {"tp": -1},
    "pp": {"pp": -1},
    "pp-loops": {"pp": -1},  # two stages in every rank
    "fsdp-tp": {"fsdp": 2, "tp": -1},
    "pp-fsdp": {"pp": 2, "fsdp": -1},
}
parser.add_argument("layout", choices=MESHES)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pause", type=float, default=0.0, help="seconds in every shard")
parser.add_argument("--hurry", type=Path, help="once this file exists, without the pause")
parser.add_argument("--hold", type=Path, help="until this file exists, shards of the second half take long")
parser.add_argument("--device", default="cpu")
parser.add_argument("--guard", action="store_true")
parser.add_argument("--rich", action="store_true", help="mixed precision, checkpointing, tied and frozen parameters")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--slow-saves", type=float, default=0.0, help="seconds that a rank takes longer to write its part")
parser.add_argument("--odd", default="", help="what goes wrong, and in the last group only")
args = parser.parse_args()

last = int(os.environ.get("PLANARIA_GROUP", 0)) + 1 == int(os.environ.get("PLANARIA_GROUPS", 1))
odd, rank = args.odd if last else "", int(os.environ.get("RANK", 0))
if odd == "layout":
    args.layout = "tp"
shape = {"fsdp": 3} if odd == "mesh" else MESHES[args.layout]
job = pt.init(shards=4, seed=3 + rank if odd == "seed" else 3, mesh=shape, device=args.device)

if args.slow_saves:
    write = CheckpointWriter.write_data

    def slowly(*given):
        written = write(*given)
        time.sleep(args.slow_saves)
        return written

    CheckpointWriter.write_data = slowly


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


# Made whole on every rank, from the job's seed, and then cut: the start does not depend on the layout.
model = nn.Sequential(nn.Linear(16, 32), Block(32), Block(32), nn.Linear(32, 4)).to(job.device)
if args.rich:
    model[2].norm = model[1].norm  # tied
    model[0].bias.requires_grad_(False)
    for block in (model[1], model[2]):
        checkpoint(block)
schedule = None
if "tp" in args.layout:
    for block in (model[1], model[2]):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, job.mesh["tp"], plan)


def shard(layer: nn.Module) -> None:
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.rich else MixedPrecisionPolicy()
    fully_shard(layer, mesh=job.mesh["fsdp"], mp_policy=half)
    assert isinstance(layer, FSDPModule)
    if args.device == "cpu":
        layer.set_force_sum_reduction_for_comms(True)  # gloo cannot divide while it sums


if "fsdp" in args.layout and odd != "whole":
    # What is tied must be sharded together, and a pipeline's stages are sharded when they are cut.
    for layer in (model,) if args.rich else model if "pp" in args.layout else (*model, model):
        shard(layer)
if "pp" in args.layout:
    pipe = job.mesh["pp"]
    count = pipe.size() * (2 if args.layout == "pp-loops" else 1)
    each = len(model) // count
    mine = range(pipe.get_local_rank(), count, pipe.size())
    parts = [model[number * each : (number + 1) * each] for number in mine]
    if "fsdp" in args.layout:
        for part in parts:
            shard(part)
    numbered = zip(parts, mine, strict=True)
    stages = [PipelineStage(part, n, count, job.device, group=pipe.get_group()) for part, n in numbered]
    entropy = nn.functional.cross_entropy
    if len(stages) == 1:
        schedule = Schedule1F1B(stages[0], n_microbatches=2, loss_fn=entropy)
    else:
        schedule = ScheduleInterleaved1F1B(stages, n_microbatches=2, loss_fn=entropy)
    model = nn.ModuleList(parts)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=args.rich)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
# Without code generation, which takes a minute: what is traced and recompiled is the same.
run = torch.compile(model, backend="aot_eager") if args.compile else model
generator = torch.Generator().manual_seed(0)
points = torch.randn(500, 16, generator=generator)
labels = torch.randint(0, 4, (500,), generator=generator)
samples = torch.utils.data.TensorDataset(points, labels)
data = pt.ShardedDataset(samples, batch_size=4)
job.protect(overlap=schedule is None, model=model, optimizer=optimizer, scheduler=scheduler)
for step in job.steps(args.steps + rank if odd == "steps" else args.steps):
    if odd == "leaves" and rank == 1 and step.index == 3:
        break
    if odd == "memory" and job.rank == 1 and step.index == 3:
        raise torch.OutOfMemoryError("out of memory: tried to allocate more than there is")
    with step.guard() if args.guard else contextlib.nullcontext():
        for x, y in step.batches(data):
            while odd == "hangs" and rank == 1 and step.index == 40 and os.environ.get("PLANARIA_INCARNATION") == "0":
                time.sleep(1)
            x, y = x.to(job.device), y.to(job.device)
            if schedule is None:
                loss = nn.functional.cross_entropy(run(x).float(), y)
                loss.backward()
                step.record(loss=loss)
            else:
                losses: list[torch.Tensor] = []
                target = {"target": y, "losses": losses} if stages[-1].is_last else {}
                schedule.step(*([x] if stages[0].is_first else []), **target)
                if losses:
                    step.record(loss=torch.stack(losses).mean())
            if args.pause and not (args.hurry and args.hurry.exists()):
                time.sleep(args.pause)
            late = min(step.index - args.steps // 2, 30)
            held = time.monotonic() + 0.3 * 1.1**late  # slower and slower: that is no hang
            while args.hold and late >= 0 and time.monotonic() < held and not args.hold.exists():
                time.sleep(0.01)
        job.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
    if args.odd == "stops" and not step.groups:
        break  # as a script may that does not like the numbers
if args.odd == "stops":
    with args.hold.with_name("result").open("a") as file:
        file.write(f"{os.environ['REPLICA_GROUP_ID']} {step.index}\n")
