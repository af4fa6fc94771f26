"""The fork server with what it really imports: torch is paid for once, and its forks compute."""

from __future__ import annotations

from collections.abc import Callable

from planaria.agent.proc import thread_count
from planaria.engines.base import Ended, Started

from .conftest import Engine, plain_environ

SCRIPT = """
import os, sys
assert "torch._dynamo" in sys.modules, "imported before the fork"
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.ones(8, 64)).square().sum().backward()
    optimizer.step()
print(torch.get_num_threads(), float(model.weight.detach().sum()))
"""


async def test_forks_of_a_warm_server_train(make_engine: Callable[..., Engine]) -> None:
    environ = plain_environ(OMP_NUM_THREADS="1")
    del environ["PLANARIA_PRELOAD"]
    engine = make_engine(SCRIPT, environ=environ)
    for group in range(2):
        engine.engine.create(group, 0)
        assert isinstance(await engine.next(), Started)
        assert thread_count(engine.engine.fork_server_pid) == 1
        change = await engine.next()
        assert isinstance(change, Ended) and change.returncode == 0, engine.log(group, name="stderr.log")
    assert engine.log(0) == engine.log(1) != ""
    assert engine.log(0).startswith("1 ")
