"""The sizes that the reference Llama comes in, and what a token costs. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """``vocab`` 0: as the tokenizer needs it. ``tied``: the head's weight is the embedding's."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    tied: bool
    theta: float = 500_000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def parameters(self) -> int:
        """All of them, the embedding (and a head of its own) included."""
        attention = 2 * self.dim * (self.heads + self.kv_heads) * self.head_dim
        block = attention + 3 * self.dim * self.hidden + 2 * self.dim
        return self.layers * block + self.dim + self.vocab * self.dim * (1 if self.tied else 2)

    def flops_per_token(self, length: int) -> int:
        """Floating-point operations of forward and backward for one token of a sequence of ``length``:
        ``6 N + 12 L H Q T`` (PaLM, Chowdhery et al. 2022, arXiv 2204.02311, appendix B), N being the parameters that
        multiply (all but an embedding that is only looked up), L layers, H heads of size Q, T tokens. The causal mask
        does not count as a saving, nor activations that are computed again as work."""
        looked_up = 0 if self.tied else self.vocab * self.dim
        return 6 * (self.parameters - looked_up) + 12 * self.layers * self.heads * self.head_dim * length


# 1B and 8B are Llama 3.2 1B's and Llama 3 8B's (the models' params.json). debug is for tests and for CPUs, 3M for
# comparing methods on one machine.
SHAPES = {
    "debug": Shape(dim=96, layers=4, heads=4, kv_heads=2, hidden=192, vocab=0, tied=False),
    "3M": Shape(dim=256, layers=4, heads=8, kv_heads=4, hidden=640, vocab=0, tied=False),
    "1B": Shape(dim=2048, layers=16, heads=32, kv_heads=8, hidden=8192, vocab=128256, tied=True),
    "8B": Shape(dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336, vocab=128256, tied=False),
}

# Floating-point operations a second of one device in bfloat16 without sparsity, from the vendors' data sheets; the
# first name that is part of the device's counts. Others have no MFU.
PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "MI300X": 1307e12,
    "MI325X": 1307e12,
    "MI355X": 2517e12,
    "MI250X": 191.5e12,
}


def peak_of(device: str) -> float | None:
    """Of a device by its name, as torch.cuda.get_device_name gives it."""
    return next((peak for name, peak in PEAKS.items() if name in device), None)
