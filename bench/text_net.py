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
    """Every stretch of CONTEXT bytes with the byte that follows."""

    def __init__(self) -> None:
        self._text = text().long()

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


class Log:
    """A line of JSON for every exchange that was committed, and for other facts. Bench only reads it."""

    def __init__(self) -> None:
        directory = Path(os.environ["BENCH_LOG"])
        self._file = (directory / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def write(self, **facts: Any) -> None:
        self._file.write(json.dumps({"at": time.time(), **facts}) + "\n")
