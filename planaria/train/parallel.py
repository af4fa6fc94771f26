"""How one replica of the model is spread over the ranks of its group.

Everything here happens inside a group, along the mesh dimensions "pp", "fsdp", "cp" and "tp". Across groups there is
only Planaria, which needs nothing but the gradients.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from planaria.train.config import Config
from planaria.train.model import Block, Context, Llama
from planaria.train.shapes import Shape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# What "selective" keeps instead of computing it again: the products, which are nearly all of the work.
_KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


def along(mesh: DeviceMesh | None, name: str) -> DeviceMesh | None:
    """The dimension ``name`` of the group's mesh; None if there is nothing to do along it."""
    if mesh is None or name not in (mesh.mesh_dim_names or ()):
        return None
    part = mesh[name]
    return part if part.size() > 1 else None


def data_mesh(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """What parameters are sharded over: ranks that see other samples, or other parts of the same ones."""
    found = [name for name in ("fsdp", "cp") if along(mesh, name) is not None]
    if mesh is None or not found:
        return None
    # One dimension, because FSDP takes the first of two for one to replicate over.
    return mesh[tuple(found)]._flatten("_".join(found)) if len(found) == 2 else mesh[found[0]]


def stages_of(config: Config, shape: Shape, pipe: DeviceMesh | None) -> list[tuple[int, range]]:
    """(number, blocks) of this rank's pipeline stages. Layers are spread evenly; early stages have those left over."""
    if pipe is None:
        return [(0, range(shape.layers))]
    count = pipe.size() * config.parallelism.stages_per_rank
    each, more = divmod(shape.layers, count)
    starts = [index * each + min(index, more) for index in range(count + 1)]
    mine = range(pipe.get_local_rank(), count, pipe.size())
    return [(index, range(starts[index], starts[index + 1])) for index in mine]


def context_of(config: Config, mesh: DeviceMesh | None) -> Context | None:
    """This rank's part of every sequence; None: the whole."""
    shared = along(mesh, "cp")
    return None if shared is None else Context(shared, config.training.seq_len)


def make_part(config: Config, shape: Shape, blocks: range, mesh: DeviceMesh | None, device: torch.device) -> Llama:
    """These blocks, spread and with memory, but not yet filled. The order is that in which each sees what the one
    before made: tensor parallelism, recomputation, compilation, sharding."""
    with torch.device("meta"):
        part = Llama(shape, blocks).to(DTYPES[config.training.dtype])
    if (tensor := along(mesh, "tp")) is not None:
        _tensor_parallel(part, tensor)
    for block in part.blocks.values():
        assert isinstance(block, Block)
        block.attention.context = context_of(config, mesh)
        _recompute(block, config.activation_checkpoint.mode)
        if config.compile.enable:
            made = torch.compile(block.forward, fullgraph=True, backend=config.compile.backend)
            block.forward = made  # type: ignore[method-assign]
    if (data := data_mesh(mesh)) is not None:
        _shard(part, data, config, piped=along(mesh, "pp") is not None)
    part.to_empty(device=device)
    part.tie()
    return part


def _tensor_parallel(part: Llama, mesh: DeviceMesh) -> None:
    """Megatron's plan with sequence parallelism: between the products the stream is cut along the sequence."""
    whole: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    each = {
        "norm1": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(part, mesh, {name: plan for name, plan in whole.items() if getattr(part, name) is not None})
    for block in part.blocks.values():
        parallelize_module(block, mesh, each)
    if part.embed is not None:
        # What comes out is a tensor that is still on its way. If such a one enters a compiled block, torch 2.13 gives
        # back a gradient of another shape; a copy has arrived.
        part.embed.register_forward_hook(lambda module, inputs, stream: stream.clone())
    part.tie()


def _recompute(block: Block, mode: str) -> None:
    """Drop activations in forward and compute them again in backward: all of them (full) or all but the products."""
    if mode == "none":
        return
    again: Any = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if mode == "selective":
        again = functools.partial(again, context_fn=functools.partial(create_selective_checkpoint_contexts, _KEPT))
    # Nothing in a block draws random numbers, so there is no state of generators to put back.
    block.forward = functools.partial(again, preserve_rng_state=False)  # type: ignore[method-assign]


def _shard(part: Llama, mesh: DeviceMesh, config: Config, piped: bool) -> None:
    """FSDP2, block by block."""
    half, reduce = config.training.mixed_precision_param, config.training.mixed_precision_reduce
    # Inputs need no cast: the embedding gives the dtype, and what follows takes it over.
    policy = MixedPrecisionPolicy(DTYPES[half], DTYPES[reduce], cast_forward_inputs=False)
    # A pipeline goes through its blocks once for every micro-batch: gathering them again each time would cost too much.
    shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, reshard_after_forward=not piped)
    for module in (*part.blocks.values(), part):
        shard(module)
    # Under tensor parallelism the logits are a view; nobody writes into them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if mesh.device_type == "cpu":
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
