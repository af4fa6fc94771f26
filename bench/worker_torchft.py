"""torchft as its README shows it: DistributedDataParallel and Optimizer around a Manager, gloo, asynchronous
quorum."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.workload import (
    BATCH,
    Blocks,
    CommitLog,
    Config,
    Counted,
    Samples,
    env_int,
    limit_threads,
    loss_function,
    make_net,
)


def make_manager(
    config: Config, group: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, min_replicas: int
) -> Any:
    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=min_replicas,
        replica_id=f"group{group}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    manager.bench_store = store  # the store must live as long as the manager
    return manager


def run_blocks(config: Config, group: int) -> None:
    net, width, classes = make_net(config.size, config.seed)
    data, lossf = Samples(width, classes, config.seed), loss_function()
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    manager = make_manager(config, group, net, inner, min_replicas=config.groups)
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, inner)
    blocks = Blocks(config, group)
    for step in range(config.total_steps):
        blocks.before()
        x, y = data.batch(step, group, config.groups)
        optimizer.zero_grad()
        lossf(model(x), y).backward()
        optimizer.step()
        blocks.after()


def run_free(config: Config, group: int) -> None:
    log = CommitLog(config, group)
    net, width, classes = make_net(config.size, config.seed)
    data, lossf = Samples(width, classes, config.seed), loss_function()
    counted = Counted(net)
    inner = torch.optim.SGD(counted.parameters(), lr=0.05, momentum=0.9)
    manager = make_manager(config, group, counted, inner, min_replicas=1)
    model, optimizer = DistributedDataParallel(manager, counted), Optimizer(manager, inner)
    committed = False
    should_commit = manager.should_commit

    def watched(*args: Any, **kwargs: Any) -> bool:
        """Optimizer.step() does not tell whether the step was taken; this is the only public place that does."""
        nonlocal committed
        committed = bool(should_commit(*args, **kwargs))
        return committed

    manager.should_commit = watched
    try:
        while True:
            step = manager.current_step()
            log.attempt(step)
            x, y = data.batch(step, group, config.groups)
            optimizer.zero_grad()
            logits, zero = model(x)
            loss = lossf(logits, y) + zero
            time.sleep(config.sleep)
            loss.backward()
            samples, took_part = (
                counted.samples(manager.num_participants(), BATCH),
                manager.is_participating(),
            )
            optimizer.step()
            if committed:
                log.commit(manager.current_step() - 1, samples, took_part)
    except BaseException as error:
        log.crash(error)
        raise


def main() -> None:
    config = Config.from_argv()
    limit_threads()
    group = env_int("REPLICA_GROUP_ID")
    try:
        (run_blocks if config.mode == "blocks" else run_free)(config, group)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(3)
    os._exit(0)  # torchft's threads outlive the main thread, and its shutdown can wait for peers that are gone


if __name__ == "__main__":
    main()
