"""A decoder-only transformer and its tokens, for what must be measured on a model of real make: bf16 autocast, fp32
parameters, fused AdamW.

Deliberately plain: what costs time here costs time in any model of this kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EMBEDDINGS = ("embedding", "index", "one-hot")  # how the gradient of the token table is made: see OneHot


@dataclass(frozen=True)
class Shape:
    """``batch``: sequences of a shard. ``length``: tokens of a sequence."""

    dim: int
    layers: int
    heads: int
    hidden: int
    vocab: int
    length: int
    batch: int

    @property
    def parameters(self) -> int:
        layer = 4 * self.dim**2 + 3 * self.dim * self.hidden + 2 * self.dim
        return self.layers * layer + 2 * self.vocab * self.dim + self.dim


# Prefixed, so that they share one list of names with the networks of bench/workload.py. 0.8B: about 140 ms a step on
# one H100, 8192 tokens.
SHAPES = {
    "llm-tiny": Shape(64, 2, 2, 128, 256, 32, 2),
    "llm-20M": Shape(512, 4, 8, 1408, 8192, 256, 4),
    "llm-0.8B": Shape(2048, 14, 16, 5504, 32000, 1024, 8),
}


class OneHot(torch.autograd.Function):
    """Rows of a table. The table's gradient is one product of matrices, which adds in a fixed order: what a sort of
    the tokens, or atomic additions, do in the kernels of torch."""

    @staticmethod
    def forward(ctx, table: Tensor, tokens: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(tokens)
        ctx.rows = table.shape[0]
        return table[tokens]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        (tokens,) = ctx.saved_tensors
        # Not scatter_: with deterministic algorithms it sorts too.
        rows = torch.arange(ctx.rows, device=grad.device)
        choice = (rows[:, None] == tokens.flatten()).to(torch.bfloat16)
        table = choice @ grad.flatten(0, -2).to(torch.bfloat16)
        return table.to(grad.dtype), None


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d = shape.dim
        self.heads = shape.heads
        self.before_attention, self.before_mlp = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
        self.q, self.k, self.v, self.out = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(d, shape.hidden, bias=False), nn.Linear(d, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, d, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """``x`` [batch, length, dim]."""
        y = self.before_attention(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotated(q, turn), rotated(k, turn), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.before_mlp(x)
        added: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return added


def rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions. ``x`` [batch, heads, length, width], ``turn``: cosines and sines [length, width / 2]."""
    cos, sin = (each.to(x.dtype) for each in turn)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Transformer(nn.Module):
    """Made under ``torch.device(...)``: there it stays."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab, shape.dim)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=1e-6)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        width = shape.dim // shape.heads
        angles = torch.outer(torch.arange(shape.length), 10000.0 ** (-torch.arange(0, width, 2) / width))
        self.turn = (angles.cos(), angles.sin())  # no buffers: DDP would send those in every step
        self.embedding = EMBEDDINGS[0]

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [batch, length] to logits [batch, length, vocab]."""
        match self.embedding:
            case "index":
                y = self.tokens.weight[x]
            case "one-hot":
                y = OneHot.apply(self.tokens.weight, x)
            case _:
                y = self.tokens(x)
        for block in self.blocks:
            y = block(y, self.turn)
        logits: Tensor = self.head(self.norm(y))
        return logits


def loss_of(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy, computed as such models are trained: bf16 autocast."""
    x, y = batch
    with torch.autocast(x.device.type, torch.bfloat16):
        return F.cross_entropy(net(x).flatten(0, 1).float(), y.flatten())
