"""Text to tokens, once: the tokens of all documents stand in one file that every rank maps into its memory.

No torch, so that ``planaria train`` can build the file before any rank starts; ranks that find none build it
themselves, one of them while the others wait.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from planaria.errors import UsageError
from planaria.files import one_at_a_time, write_whole
from planaria.train.config import Config

# Characters of a file that are taken at once: bounds memory, and is far beyond what a tokenizer merges.
_PIECE = 1 << 20
# Pieces that a tokenizer gets at once, to work on in parallel.
_BATCH = 256


class Tokenizer(Protocol):
    @property
    def size(self) -> int:
        """Tokens are below it."""

    @property
    def end(self) -> int | None:
        """Stands after every document."""

    @property
    def identity(self) -> str:
        """Equal for tokenizers that give equal tokens."""

    def encode(self, texts: Sequence[str]) -> list[Any]:
        """The tokens of each text, without any that mark a beginning or an end."""


class Bytes:
    """UTF-8, and one more token for the end of a document."""

    size, end, identity = 257, 256, "bytes"

    def encode(self, texts: Sequence[str]) -> list[Any]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


class FromFile:
    """Any tokenizer.json of the ``tokenizers`` library. Raises UsageError."""

    # How common models call the end of a document.
    _ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[SEP]")

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError:
            raise UsageError(
                "model.tokenizer_path needs the tokenizers library: pip install 'planaria[train]'"
            ) from None
        try:
            text = path.read_text()
            self._loaded = Loaded.from_str(text)
        except OSError as error:
            raise UsageError(f"model.tokenizer_path: cannot read {path}: {error.strerror}") from None
        except Exception as error:  # the library raises no narrower one
            raise UsageError(f"model.tokenizer_path: {path} is not a tokenizer.json: {error}") from None
        self.size = self._loaded.get_vocab_size()
        found = (self._loaded.token_to_id(name) for name in self._ENDS)
        self.end = next((number for number in found if number is not None), None)
        self.identity = xxhash.xxh3_128_hexdigest(text.encode())

    def encode(self, texts: Sequence[str]) -> list[Any]:
        return [item.ids for item in self._loaded.encode_batch(list(texts), add_special_tokens=False)]


def tokenizer_of(path: str) -> Tokenizer:
    return FromFile(Path(path)) if path else Bytes()


# --- sources --------------------------------------------------------------------------------------------------


class Source(Protocol):
    """Documents somewhere on disk."""

    @property
    def name(self) -> str:
        """The key that names it, for messages."""

    def files(self) -> list[Path]:
        """What it consists of, sorted. Raises UsageError if there is nothing."""

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """(text, whether it ends a document), in order."""


@dataclass(frozen=True, slots=True)
class TextFiles:
    pattern: str
    name: str

    def files(self) -> list[Path]:
        found = [path for text in sorted(glob(self.pattern, recursive=True)) if (path := Path(text)).is_file()]
        if not found:
            raise UsageError(f"{self.name}: no file matches {self.pattern!r}; give a pattern such as 'texts/**/*.txt'")
        return found

    def pieces(self) -> Iterator[tuple[str, bool]]:
        for path in self.files():
            with open(path, encoding="utf-8", errors="replace", newline="") as file:
                text = "".join(file.readlines(_PIECE))
                while text:
                    after = "".join(file.readlines(_PIECE))
                    yield text, not after
                    text = after


@dataclass(frozen=True, slots=True)
class SavedDataset:
    """What ``datasets`` has saved with ``save_to_disk``; of several splits, ``train``."""

    path: str
    column: str
    name: str = "data.dataset_path"

    def files(self) -> list[Path]:
        found = sorted(path for path in Path(self.path).glob("**/*") if path.is_file())
        if not found:
            raise UsageError(f"{self.name}: there is no dataset at {self.path}; write one with save_to_disk")
        return found

    def pieces(self) -> Iterator[tuple[str, bool]]:
        try:
            import datasets
        except ImportError:
            raise UsageError(f"{self.name} needs the datasets library: pip install 'planaria[datasets]'") from None
        try:
            dataset = datasets.load_from_disk(self.path)
        except Exception as error:  # the library's own are of many kinds
            raise UsageError(f"{self.name}: {self.path} cannot be loaded: {error}") from None
        if isinstance(dataset, datasets.DatasetDict):
            if "train" not in dataset:
                raise UsageError(f"{self.name}: {self.path} has no split `train`; name one of {', '.join(dataset)}")
            dataset = dataset["train"]
        if self.column not in dataset.column_names:
            raise UsageError(
                f"data.text_column is {self.column!r}; the columns of {self.path} are {', '.join(dataset.column_names)}"
            )
        for row in dataset.select_columns([self.column]):
            yield row[self.column], True


def sources_of(config: Config) -> tuple[Source | None, Source | None]:
    """(what is trained on, None for mock data; what is only measured, None if it is a part of the first)."""
    data, validation = config.data, config.validation
    training: Source | None = TextFiles(data.files, "data.files") if data.files else None
    if data.dataset_path:
        training = SavedDataset(data.dataset_path, data.text_column)
    measured = validation.enable and validation.files
    return training, TextFiles(validation.files, "validation.files") if measured else None


# --- the file -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tokens:
    """``ids``: uint16 or uint32, mapped from the file. ``digest``: of all of them, equal for equal tokens."""

    ids: np.ndarray[Any, Any]
    digest: str


def tokens_of(source: Source, tokenizer: Tokenizer, cache: Path) -> Tokens:
    """The source's tokens, from ``cache`` if they are there. May be called by several processes at once; one that is
    killed while it builds leaves nothing that would be taken for the whole. Raises UsageError."""
    kind = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
    stats = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in source.files()]
    key = xxhash.xxh3_64_hexdigest(json.dumps([stats, repr(source), tokenizer.identity]).encode())
    path, note = cache / f"{key}.{kind.name}", cache / f"{key}.json"
    if not note.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with one_at_a_time(cache / f"{key}.lock"):
                if not note.exists():
                    _build(source, tokenizer, path, note, kind)
        except OSError as error:
            raise UsageError(f"cannot write tokens into {cache}: {error.strerror}; see data.cache_folder") from None
    return Tokens(np.memmap(path, kind, mode="r"), json.loads(note.read_text())["digest"])


def _build(source: Source, tokenizer: Tokenizer, path: Path, note: Path, kind: np.dtype[Any]) -> None:
    hasher, count, pieces = xxhash.xxh3_128(), 0, source.pieces()
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        while batch := list(islice(pieces, _BATCH)):
            for ids, (_, ends) in zip(tokenizer.encode([text for text, _ in batch]), batch, strict=True):
                tail = [tokenizer.end] if ends and tokenizer.end is not None else []
                block = np.concatenate([np.asarray(ids, kind), np.asarray(tail, kind)]).tobytes()
                file.write(block)
                hasher.update(block)
                count += len(block) // kind.itemsize
        if not count:
            raise UsageError(f"{source.name}: there is no text in it")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    # Written last: who finds it finds the tokens.
    about = {"tokens": count, "digest": hasher.hexdigest(), "source": repr(source)}
    write_whole(note, json.dumps(about) + "\n")


def prepare(config: Config) -> None:
    """Build all files of tokens that a run of ``config`` needs. Raises UsageError."""
    tokenizer = tokenizer_of(config.model.tokenizer_path)
    for source in sources_of(config):
        if source is not None:
            tokens_of(source, tokenizer, config.cache)
