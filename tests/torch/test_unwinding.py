"""A pass that ends half-way, through FSDP2 or a pipeline, leaves nothing behind once it is unwound."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from planaria.errors import PlanariaError
from planaria.torch.unwinding import Pipelines, unwind


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Breaks(torch.autograd.Function):
    """Passes everything on, until it is told to fail in one direction."""

    fails = ""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        if Breaks.fails == "forward":
            raise RuntimeError("lost")
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if Breaks.fails == "backward":
            raise RuntimeError("lost")
        return grad.clone()


class Layer(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.one, self.two, self.breaks = nn.Linear(8, 8), nn.Linear(8, 8), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.one(x))
        if self.breaks:  # between its parameters: when it fails, some of their gradients are there and others not
            x = Breaks.apply(x)
        return torch.tanh(self.two(x))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(1)
    model(torch.randn(4, 8)).pow(2).sum().backward()
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("where", range(3))
def test_what_is_left_of_half_a_pass(world: None, where: int, direction: str, keeps: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(breaks=number == where) for number in range(3)))
    mesh = init_device_mesh("cpu", (1,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=not keeps)
        layer.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    before = gradients(model)
    for _ in range(2):
        Breaks.fails = direction
        try:
            with pytest.raises(RuntimeError, match="lost"):
                gradients(model)
        finally:
            Breaks.fails = ""
        unwind([model])
        assert all(map(torch.equal, gradients(model), before))


def test_what_is_left_of_half_a_step_of_a_pipeline(world: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(breaks=True), Layer(breaks=False))
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    pipelines = Pipelines()

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        x, y = torch.randn(2, 4, 8).unbind()
        schedule.step(x, target=y)
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    before = step()
    for direction in ("forward", "backward"):
        Breaks.fails = direction
        try:
            with pytest.raises(RuntimeError):
                step()
        finally:
            Breaks.fails = ""
        pipelines.rewind()
        # As those of a new rank, they ask their neighbours for shapes again.
        assert not (stage.fwd_cache or stage.args_recv_info or schedule._stage_forward_initialized)
        assert all(map(torch.equal, step(), before))
    ScheduleGPipe(stage, n_microbatches=2)
    pipelines.rewind()
    late = ScheduleGPipe(stage, n_microbatches=2)
    with pytest.raises(PlanariaError, match="before the loop"):
        pipelines.rewind()
    assert late is not None
