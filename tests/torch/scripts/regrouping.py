"""One of two ranks whose connections are replaced again and again, as if one of them were lost each time.

    RANK=0 regrouping.py DIRECTORY LIVES

Prints after every life how many files and threads it has, when what it left behind has had time to end.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from planaria.exchange.waiting import Bell
from planaria.torch.world import GroupWorld

where, lives, rank = Path(sys.argv[1]), int(sys.argv[2]), int(os.environ["RANK"])


def port(life: int) -> int:
    """Where rank 0 is met, who tells the other by a file. It holds the port, on which its store is to listen."""
    path = where / f"port{life}"
    if rank == 0:
        held.append(socket.socket())
        held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held[-1].bind(("127.0.0.1", 0))
        path.with_suffix(".new").write_text(str(held[-1].getsockname()[1]))
        path.with_suffix(".new").rename(path)
    while not path.exists():
        time.sleep(0.01)
    return int(path.read_text())


def left_over() -> bool:
    return any(thread.name == "planaria-let-go" for thread in threading.enumerate())


held: list[socket.socket] = []
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port(0)), WORLD_SIZE="2")
world = GroupWorld(rank, 2, torch.device("cpu"), {"fsdp": 2}, "a test")
beside = world.side_group()
model = torch.nn.Linear(8, 8)
fully_shard(model, mesh=world.mesh)
for life in range(1, lives + 1):
    world.cut()
    world.renew(port(life), f"life {life}", Bell(), lambda: False)
    model(torch.ones(2, 8)).sum().backward()
    assert world.gather(bytes([rank])) == [b"\0", b"\1"]
    dist.barrier(beside)
    while left_over():
        time.sleep(0.01)
    if rank == 0:
        held.pop().close()
    print(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), flush=True)
os._exit(0)  # nobody waits for the other: it may have ended first
