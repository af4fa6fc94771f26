"""Gradient clipping whose norm is that of the whole model, however it is spread over the ranks of a group."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter


def clip_grad_norm_(
    parameters: Iterable[Parameter], max_norm: float, norm_type: float = 2.0, stages: DeviceMesh | None = None
) -> Tensor:
    """Scale the gradients so that their norm is at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does it.

    That function takes either plain tensors or DTensors of one mesh, and knows nothing of pipelines. Here every
    gradient counts once: of a DTensor the whole, a plain tensor as it is (it is alike on all ranks that have it), and
    what lies on other ``stages`` (the pipeline's dimension of the mesh).

    Returns the norm before, a scalar on the gradients' device: the same on every rank of the group, and, after
    ``step.batches``, on every group.
    """
    everything = list(parameters)
    gradients = [p.grad for p in everything if p.grad is not None]
    # A stage may be without gradients, but not without its part in the collectives.
    total = (
        _total_norm(gradients, norm_type)
        if gradients
        else torch.zeros((), dtype=torch.float32, device=everything[0].device)
    )
    if stages is not None and stages.size() > 1:
        total = _over(total, norm_type, stages.get_group())
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # torch's own guard against a norm of nothing
    for same in _alike(gradients):
        torch._foreach_mul_(_local(same), factor.to(same[0].device))
    return total


def _total_norm(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Over all gradients of this stage. Norms are combined as powers: sums of them over what is spread out."""
    totals: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for same in _alike(gradients):
        spread = _spread_over(same[0])
        full = [each for each in _local(same) if each.numel()]
        # In fp32 whatever the gradients are: the square of a norm leaves the range of a half soon.
        norms = torch._foreach_norm(full, norm_type, dtype=torch.float32) if full else ()
        totals.setdefault(spread, []).extend(norms)
    parts = []
    for groups, of in totals.items():
        # A rank may hold nothing of these gradients, but it has its part in the collectives.
        every = [norm.to(of[0].device) for norm in of] or [
            torch.zeros((), dtype=torch.float32, device=gradients[0].device)
        ]
        part = torch.linalg.vector_norm(torch.stack(every), norm_type)
        for group in groups:
            part = _over(part, norm_type, group)
        parts.append(part)
    total: Tensor = torch.linalg.vector_norm(torch.stack([part.to(parts[0].device) for part in parts]), norm_type)
    return total


def _spread_over(gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups of ranks that hold different parts of the gradient."""
    if not isinstance(gradient, DTensor):
        return ()
    # After step.batches a gradient lies as its parameter does: in shards (of several kinds), or alike.
    placed = enumerate(gradient.placements)
    return tuple(gradient.device_mesh.get_group(dim) for dim, placement in placed if not placement.is_replicate())


def _local(gradients: list[Tensor]) -> list[Tensor]:
    return [each.to_local() if isinstance(each, DTensor) else each for each in gradients]


def _over(norm: Tensor, norm_type: float, group: dist.ProcessGroup) -> Tensor:
    """The norm of what the ranks of ``group`` hold together, of the norms of their parts."""
    if math.isinf(norm_type):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
        return norm
    power: Tensor = norm**norm_type
    dist.all_reduce(power, group=group)
    whole: Tensor = power ** (1.0 / norm_type)
    return whole


def _alike(gradients: list[Tensor]) -> list[list[Tensor]]:
    """The gradients by kind (plain, or the mesh and the placements), each kind in order of its first."""
    kinds: dict[object, list[Tensor]] = {}
    for gradient in gradients:
        spread = isinstance(gradient, DTensor)
        kind = (gradient.device_mesh, gradient.placements) if spread else gradient.device  # type: ignore[attr-defined]
        kinds.setdefault((kind, gradient.dtype), []).append(gradient)
    return list(kinds.values())
