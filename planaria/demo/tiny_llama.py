"""A byte-level language model of the Llama family in plain PyTorch, and text to train it on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planaria.demo.files import text_files

BYTES = 256  # the vocabulary


class Text:
    """All files that match ``pattern``, one after the other, as pairs of byte sequences.

    Sample ``i`` is ``(x, y)``, both int64 ``[length]``: ``y[t]`` is the byte that follows ``x[t]``. Without
    a pattern the text is the source code of Python's own standard library. Raises UsageError if nothing
    matches, or not enough for a sample.
    """

    def __init__(self, pattern: str | None = None, length: int = 64) -> None:
        text = b"".join(path.read_bytes() for path in text_files(pattern, length))
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.text[index * self.length : (index + 1) * self.length + 1].long()
        return piece[:-1], piece[1:]


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotary position embedding: turn each pair ``(x[i], x[i + half])`` by its angle. x ``[..., t,
    head]``, angle ``[t, head / 2]``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


class Block(nn.Module):
    """Causal attention and a SwiGLU network, each normalised first and added to the stream ``[b, t,
    width]``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 6 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(rotate(q, angle), rotate(k, angle), v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


class TinyLlama(nn.Module):
    """Logits ``[b, t, 256]`` for the next byte from bytes int64 ``[b, t]``. 0.4 million parameters by
    default."""

    frequency: Tensor

    def __init__(self, width: int = 96, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        half = width // heads // 2
        self.register_buffer("frequency", 10000.0 ** (-torch.arange(half) / half))
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(x.shape[1]).float(), self.frequency)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, angle)
        logits: Tensor = self.head(self.norm(x))
        return logits
