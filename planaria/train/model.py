"""A reference Llama: RoPE, RMSNorm, SwiGLU and grouped queries, in plain PyTorch.

It is written to be taken apart: every parameter can be made on the meta device and filled later, there are no buffers,
a pipeline stage is the same class with fewer blocks, and names do not depend on how the model is spread.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.attention.bias import causal_lower_right

from planaria.train.shapes import Shape


class Attention(nn.Module):
    """Causal attention with grouped queries, ``[b, t, dim]`` to the same. Under context parallelism (``context``, set
    by ``parallel``) ``t`` is this rank's part of the sequence, under tensor parallelism the heads are its part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim, self.theta = shape.head_dim, shape.theta
        self.context: Context | None = None
        self.q = nn.Linear(shape.dim, shape.heads * shape.head_dim, bias=False)
        self.k = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.v = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.o = nn.Linear(shape.heads * shape.head_dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.q, self.k, self.v))
        here = torch.arange(q.shape[2], device=q.device) if self.context is None else self.context.places(q.device)
        angle = torch.outer(
            here.float(), self.theta ** (-torch.arange(0, self.head_dim, 2, device=q.device) / self.head_dim)
        )
        heads = attend(rotate(q, angle), rotate(k, angle), v, self.context)
        out: Tensor = self.o(heads.transpose(1, 2).flatten(2))
        return out


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021): turns each pair ``(x[i], x[i + half])`` by its angle, in fp32.
    ``x [b, heads, t, head_dim]``, ``angle [t, head_dim / 2]``."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Context:
    """This rank's part of a sequence of ``length`` tokens that is shared by the ranks of ``mesh``.

    ``n`` ranks cut it into ``2 n`` pieces, and rank ``r`` has the pieces ``r`` and ``2 n - 1 - r``: under the causal
    mask early pieces are cheap and late ones dear, so each rank has the same work (Llama 3, arXiv 2407.21783, 3.3.2).
    """

    def __init__(self, mesh: DeviceMesh, length: int) -> None:
        rank, count = mesh.get_local_rank(), 2 * mesh.size()
        self.mesh, self.piece = mesh, length // count
        self.numbers = (rank, count - 1 - rank)
        # Made here, because torch.compile cannot make them.
        self.masks = tuple(causal_lower_right(self.piece, (number + 1) * self.piece) for number in self.numbers)

    def places(self, device: torch.device) -> Tensor:
        """Positions in the sequence of the tokens that this rank has."""
        return torch.cat([torch.arange(self.piece, device=device) + number * self.piece for number in self.numbers])


def attend(q: Tensor, k: Tensor, v: Tensor, context: Context | None) -> Tensor:
    """Causal attention of ``q [b, heads, t, head_dim]`` to ``k, v [b, kv_heads, t, head_dim]``. With ``context``, keys
    and values are gathered from its ranks (as Llama 3 did: with grouped queries they are small), and each of the two
    pieces of ``q`` attends to all that comes before it."""
    if context is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    keys, values = gathered(k, context.mesh), gathered(v, context.mesh)
    outs = []
    for query, number, mask in zip(q.chunk(2, dim=2), context.numbers, context.masks, strict=True):
        stop = (number + 1) * context.piece
        outs.append(
            F.scaled_dot_product_attention(query, keys[:, :, :stop], values[:, :, :stop], mask, enable_gqa=True)
        )
    return torch.cat(outs, dim=2)


def gathered(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The whole sequence, in order, from the two pieces that each rank has; its gradient is summed over the ranks."""
    sharded = DTensor.from_local(x, mesh, [Shard(2)], run_check=False)
    pieces: Tensor = sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    pieces = pieces.unflatten(2, (mesh.size(), 2, -1))  # type: ignore[no-untyped-call]
    return torch.cat((pieces[:, :, :, 0], pieces[:, :, :, 1].flip(2)), dim=2).flatten(2, 3)


class Mlp(nn.Module):
    """SwiGLU (Shazeer 2020): ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Attention and SwiGLU, each normalised first and added to the stream ``[b, t, dim]``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(shape.dim, eps=1e-5), nn.RMSNorm(shape.dim, eps=1e-5)
        self.attention, self.mlp = Attention(shape), Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Llama(nn.Module):
    """Logits ``[b, t, vocab]`` from tokens int64 ``[b, t]``.

    ``blocks``: only these of all the layers, a pipeline stage. The one with the first block has the embedding, that
    with the last one the head; the others take and give the stream ``[b, t, dim]``.
    """

    def __init__(self, shape: Shape, blocks: range | None = None) -> None:
        super().__init__()
        blocks = range(shape.layers) if blocks is None else blocks
        first, last = blocks.start == 0, blocks.stop == shape.layers
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.dim) if first else None
        self.blocks = nn.ModuleDict({str(index): Block(shape) for index in blocks})
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5) if last else None
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False) if last else None
        self.tie()

    def tie(self) -> None:
        """Make the head's weight the embedding's, if they are meant to be one. To be called again after anything that
        replaces parameters."""
        if self.shape.tied and self.embed is not None and self.head is not None:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in fp32 of ``logits [b, t, vocab]`` for ``labels [b, t]``."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def initialise(model: nn.Module, shape: Shape, seed: int) -> None:
    """Fill all parameters, each as a function of (seed, its name) alone, so that every way of spreading the model
    starts from the same weights.

    Each full tensor is drawn on every rank, and the rank keeps its part: drawing into a DTensor would not do, for on a
    CPU mesh all shards get the same numbers. One at a time, so that memory stays that of the largest tensor.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            if name.rpartition(".")[0].rpartition(".")[2].startswith("norm"):
                full.fill_(1.0)
            else:
                # GPT-2's: what is added to the stream is smaller the more often that is done.
                std = 0.02 if not name.endswith(("o.weight", "down.weight")) else 0.02 / (2 * shape.layers) ** 0.5
                draw = torch.Generator(parameter.device).manual_seed(xxhash.xxh3_64_intdigest(name.encode(), seed=seed))
                full.normal_(0.0, std, generator=draw)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                full = distribute_tensor(full, mesh, placements, src_data_rank=None)
            parameter.copy_(full)
