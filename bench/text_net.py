"""What is trained over slow links: a byte-level language model (Bengio et al. 2003, JMLR 3) on this repository's own
text. Real data and a real loss, 2.9 M parameters, and inner steps of some 20 ms, so that links are what counts."""

from __future__ import annotations

import json
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

REPOSITORY = Path(__file__).resolve().parent.parent
CONTEXT = 16  # bytes from which the next one is told
BATCH = 32  # of a group in an inner step: one token each
LR = 1e-3


@cache
def text() -> Tensor:
    """All of it, as one uint8 tensor."""
    paths = sorted(
        [*REPOSITORY.glob("planaria/**/*.py"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("bench/*.py")]
    )
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8)


class Windows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Every stretch of CONTEXT bytes with the byte that follows, of the first 19 parts of 20; the last is held out."""

    def __init__(self, held_out: bool = False) -> None:
        whole = text().long()
        split = len(whole) * 19 // 20
        self._text = whole[split:] if held_out else whole[:split]

    def __len__(self) -> int:
        return len(self._text) - CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._text[index : index + CONTEXT], self._text[index + CONTEXT]


def make_net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(256, 64),
        nn.Flatten(),
        nn.Linear(CONTEXT * 64, 1472),
        nn.Tanh(),
        nn.Linear(1472, 768),
        nn.Tanh(),
        nn.Linear(768, 256),
    )


def fragments(net: nn.Sequential) -> list[nn.Module]:
    """Two, of about half of the parameters each."""
    return [nn.Sequential(*net[:4]), nn.Sequential(*net[4:])]


def held_out_loss(net: nn.Module) -> float:
    """In nats per byte, over every seventh position that is held out."""
    data = Windows(held_out=True)
    chosen = range(0, len(data), 7)
    with torch.no_grad():
        total = 0.0
        for start in range(0, len(chosen), 512):
            pairs = [data[i] for i in chosen[start : start + 512]]
            x, y = (torch.stack(each) for each in zip(*pairs, strict=True))
            total += float(nn.functional.cross_entropy(net(x), y, reduction="sum"))
    return total / len(chosen)


class Log:
    """A line of JSON for every exchange that was committed, and for other facts. Bench only reads it."""

    def __init__(self) -> None:
        directory = Path(os.environ["BENCH_LOG"])
        self._file = (directory / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def write(self, **facts: Any) -> None:
        self._file.write(json.dumps({"at": time.time(), **facts}) + "\n")
