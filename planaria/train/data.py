"""Samples of fixed length out of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from planaria.errors import UsageError
from planaria.train.config import Config
from planaria.train.tokens import Source, Tokenizer, Tokens, sources_of, tokens_of

Sample = tuple[Tensor, Tensor]
# Of mock data: enough that no small job repeats one.
_MOCK_SAMPLES = 1 << 16


@dataclass(frozen=True, slots=True)
class Packed:
    """Documents one after the other, cut into samples ``(x, y)``, int64 ``[length]`` each: ``y[t]`` is the token that
    follows ``x[t]``. Samples ``first`` to ``stop`` - 1 of all that there are."""

    tokens: Tokens
    length: int
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first

    def __getitem__(self, index: int) -> Sample:
        start = (self.first + index) * self.length
        piece = torch.from_numpy(self.tokens.ids[start : start + self.length + 1].astype("int64"))
        return piece[:-1], piece[1:]


@dataclass(frozen=True, slots=True)
class Mock:
    """Random tokens, the same for the same index."""

    vocab: int
    length: int
    first: int = 0
    stop: int = _MOCK_SAMPLES

    def __len__(self) -> int:
        return self.stop - self.first

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(self.first + index)
        piece = torch.randint(self.vocab, (self.length + 1,), generator=generator)
        return piece[:-1], piece[1:]


Samples = Packed | Mock


def samples_of(config: Config, tokenizer: Tokenizer) -> tuple[Samples, Samples | None, str]:
    """What is trained on, what is only measured (None without validation), and a digest of both, equal on all groups.
    Raises UsageError if there is too little text."""
    length = config.training.seq_len
    training, measured = sources_of(config)
    digest = f"mock {tokenizer.size}"
    whole: Samples = Mock(tokenizer.size, length)
    if training is not None:
        whole, digest = _packed(training, tokenizer, config)
    if not config.validation.enable:
        return whole, None, digest
    if measured is not None:
        apart, more = _packed(measured, tokenizer, config)
        return whole, apart, f"{digest} {more}"
    split = len(whole) - max(1, round(len(whole) * config.validation.held_out))
    return replace(whole, stop=split), replace(whole, first=split), digest


def _packed(source: Source, tokenizer: Tokenizer, config: Config) -> tuple[Packed, str]:
    length, tokens = config.training.seq_len, tokens_of(source, tokenizer, config.cache)
    count = (len(tokens.ids) - 1) // length
    if count < 2:
        raise UsageError(
            f"{source.name} has {len(tokens.ids)} tokens; two samples of training.seq_len {length} need "
            f"{2 * length + 1}"
        )
    return Packed(tokens, length, 0, count), tokens.digest
