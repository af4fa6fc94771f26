"""Takes a checkpoint up in one layout of the group's ranks, and saves it again from there. FROM may be empty; with OWN,
every rank has a tensor of its own."""

import json
import os
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import planaria.torch as pt
from planaria.rank.durable import Schedule
from planaria.torch.checkpoints import Checkpoints
from planaria.torch.state import ProtectedState

layout, source, target = (os.environ[name] for name in ("LAYOUT", "FROM", "TO"))
meshes = {"plain": None, "fsdp": {"fsdp": -1}, "tp": {"tp": -1}, "fsdp-tp": {"fsdp": 2, "tp": -1}}
job = pt.init(shards=4, seed=1, mesh=meshes[layout], device="cpu")
torch.manual_seed(1 if not source else 2)
# 7 rows over 2 or 4 ranks: uneven parts, and in a larger group empty ones.
model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.Linear(6, 7), nn.Linear(7, 1))
model.add_module("odd[4]_x]", nn.Linear(5, 2))
if "tp" in layout:
    parallelize_module(model, job.mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
if "fsdp" in layout:
    fully_shard(model, mesh=job.mesh["fsdp"])
first, *rest = model.parameters()
optimizers = [torch.optim.AdamW([first], lr=0.1), torch.optim.AdamW(rest, lr=0.1)]
if not source:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
means = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
facts = {"rows": [1, (2, "x")], "means": [means]}
if own := os.environ.get("OWN"):
    facts["own"] = torch.full((3,), float(own) * job.rank if not source else -1.0)  # one name, other contents
state = ProtectedState(model=[{"a.b": model}], optimizer=optimizers, facts=facts)


def checkpoints(directory: str) -> Checkpoints:
    schedule = Schedule(Path(directory), 10, 3)
    told, world = job.settings, job._world
    return Checkpoints(schedule, told, world, state, 20, lambda: told.born, world.gather, print, lambda: None)


if source:
    assert checkpoints(source).resume() == 20
    for name, parameter in model.named_parameters():
        held = [optimizer.state[parameter]["exp_avg"] for optimizer in optimizers if parameter in optimizer.state]
        for tensor in (*held, facts["means"][0][name]):
            # To be stepped together they must be laid out alike.
            assert isinstance(tensor, DTensor) == isinstance(parameter, DTensor), name
            assert torch.equal(tensor, tensor + torch.zeros_like(parameter)), name
    assert not own or facts["own"].tolist() == [float(own) * job.rank] * 3
checkpoints(target).end(20, True)
(Path(os.environ["PLANARIA_DIR"]) / "result.json").write_text(json.dumps({"digest": ""}))
