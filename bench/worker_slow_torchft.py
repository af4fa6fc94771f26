"""torchft's DiLoCo in bench/slow_links.py: (streaming) as its documentation has it, over gloo. Its quantised exchange
needs a GPU, so it sends fp32 here."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]
from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.text_net import BATCH, CONTEXT, LR, Log, fragments, make_net, text
from bench.workload import limit_threads


def batch(step: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = text()
    generator = torch.Generator().manual_seed(step * 1009 + group)
    starts = torch.randint(0, len(whole) - CONTEXT, (BATCH,), generator=generator)
    rows = torch.stack([whole[s : s + CONTEXT + 1] for s in starts.tolist()]).long()
    return rows[:, :-1], rows[:, -1]


def train(args: argparse.Namespace, group: int, host: str) -> None:
    net = make_net(1)
    inner = torch.optim.AdamW(net.parameters(), lr=LR)
    parts = fragments(net) if args.fragments == 2 else [net]
    outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts]

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        inner.load_state_dict(state["inner"])

    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "inner": inner.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        replica_id=f"group{group}",
        store_addr=host,
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname=host,
    )
    log = Log()
    should_commit = manager.should_commit

    def watched(*words: Any, **more: Any) -> bool:
        done = bool(should_commit(*words, **more))
        steps = args.every // len(parts)
        log.write(sync=manager.current_step(), steps=steps * done, groups=manager.num_participants(), group=group)
        return done

    manager.should_commit = watched
    with DiLoCo(
        manager,
        parts,
        inner,
        outer if len(outer) > 1 else outer[0],
        sync_every=args.every,
        fragment_sync_delay=args.delay if len(parts) > 1 else 0,
        fragment_update_alpha=0.5 if len(parts) > 1 else 0.0,
    ):
        step = 0
        while True:
            x, y = batch(step, group)
            inner.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            inner.step()
            step += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=40)
    parser.add_argument("--delay", type=int, default=5)
    parser.add_argument("--fragments", type=int, default=2)
    limit_threads()
    host = os.environ["BENCH_HOST"]
    socket.gethostname = lambda: host  # what the machine is called leads out of the namespace
    try:
        train(parser.parse_args(), int(os.environ["REPLICA_GROUP_ID"]), host)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(3)
