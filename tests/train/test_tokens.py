"""Text to tokens: what is in the file, that it is built once and whole, and what can be wrong with the text."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pytest
import tokenizers

from planaria.errors import UsageError
from planaria.train.tokens import Bytes, FromFile, SavedDataset, TextFiles, tokens_of
from tests.train.harness import PATIENCE

ROOT = Path(__file__).parents[2]


def texts(directory: Path, *contents: str) -> TextFiles:
    directory.mkdir(exist_ok=True)
    for index, content in enumerate(contents):
        (directory / f"{index}.txt").write_text(content)
    return TextFiles(str(directory / "*.txt"), "data.files")


def words(path: Path) -> Path:
    """A tokenizer.json whose tokens are words."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "one": 1, "two": 2, "</s>": 3}, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(path))
    return path


def test_bytes_with_an_end_after_every_document(tmp_path: Path) -> None:
    tokens = tokens_of(texts(tmp_path / "texts", "hé", "", "\r\nx"), Bytes(), tmp_path / "cache")
    assert tokens.ids.tolist() == [*"hé".encode(), 256, *b"\r\nx", 256]


def test_a_long_document_is_read_in_pieces_and_ends_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planaria.train.tokens._PIECE", 16)
    lines = "".join(f"line {number}\n" for number in range(100))
    tokens = tokens_of(texts(tmp_path / "texts", lines, "last"), Bytes(), tmp_path / "cache")
    assert tokens.ids.tolist() == [*lines.encode(), 256, *b"last", 256]


def test_a_tokenizer_from_a_file(tmp_path: Path) -> None:
    tokenizer = FromFile(words(tmp_path / "tokenizer.json"))
    tokens = tokens_of(texts(tmp_path / "texts", "one two three", "two"), tokenizer, tmp_path / "cache")
    assert tokens.ids.tolist() == [1, 2, 0, 3, 2, 3] and tokens.ids.dtype == np.uint16


def test_a_saved_dataset(tmp_path: Path) -> None:
    made = datasets.DatasetDict(
        train=datasets.Dataset.from_dict({"text": ["ab", "c"], "other": [1, 2]}),
        test=datasets.Dataset.from_dict({"text": ["never"], "other": [3]}),
    )
    made.save_to_disk(str(tmp_path / "saved"))
    source = SavedDataset(str(tmp_path / "saved"), "text")
    assert tokens_of(source, Bytes(), tmp_path / "cache").ids.tolist() == [*b"ab", 256, *b"c", 256]
    with pytest.raises(UsageError, match=r"data.text_column is 'body'; the columns of .* are text, other"):
        tokens_of(SavedDataset(str(tmp_path / "saved"), "body"), Bytes(), tmp_path / "cache")
    with pytest.raises(UsageError, match="cannot be loaded"):
        tokens_of(SavedDataset(str(tmp_path / "cache"), "text"), Bytes(), tmp_path / "cache")


def test_the_file_follows_text_and_tokenizer(tmp_path: Path) -> None:
    source, cache = texts(tmp_path / "texts", "one"), tmp_path / "cache"
    first = tokens_of(source, Bytes(), cache)
    assert tokens_of(source, FromFile(words(tmp_path / "tokenizer.json")), cache).ids.tolist() == [1, 3]
    (tmp_path / "texts" / "0.txt").write_text("two!")
    second = tokens_of(source, Bytes(), cache)
    assert second.ids.tolist() == [*b"two!", 256] and second.digest != first.digest


@pytest.mark.parametrize(
    ("pattern", "says"), [("nothing/*.txt", "no file matches 'nothing/"), ("empty.txt", "there is no text in it")]
)
def test_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    with pytest.raises(UsageError, match=f"data.files: .*{says}"):
        tokens_of(TextFiles(pattern, "data.files"), Bytes(), tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*.json"))


def test_a_tokenizer_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UsageError, match=r"is not a tokenizer.json"):
        FromFile(tmp_path / "bad.json")
    with pytest.raises(UsageError, match=r"cannot read .*No such file"):
        FromFile(tmp_path / "none.json")


SLOW = """
import sys, time
from pathlib import Path
from planaria.train import tokens

class Slow(tokens.Bytes):
    def encode(self, texts):
        Path(sys.argv[2], f"building-{sys.argv[3]}").touch()
        time.sleep(float(sys.argv[4]))
        return super().encode(texts)

made = tokens.tokens_of(tokens.TextFiles(sys.argv[1], "data.files"), Slow(), Path(sys.argv[2]))
print(bytes(made.ids.tolist()[:-1]).decode(), made.digest)
"""


def builder(pattern: str, cache: Path, name: str, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW, pattern, str(cache), name, str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_several_processes_build_it_once_and_a_killed_one_leaves_nothing(tmp_path: Path) -> None:
    source, cache = texts(tmp_path / "texts", "all of it"), tmp_path / "cache"
    cache.mkdir()
    killed = builder(source.pattern, cache, "killed", 3600)  # it cannot be through before it is killed
    deadline = time.monotonic() + PATIENCE
    while not (cache / "building-killed").exists():
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not list(cache.glob("*.json"))
    others = [builder(source.pattern, cache, str(number), 0.3) for number in range(3)]
    said = {process.communicate(timeout=PATIENCE)[0] for process in others}
    assert len(said) == 1 and said.pop().startswith("all of it ")
    assert len(list(cache.glob("building-[0-9]"))) == 1
    assert not list(cache.glob("*.draft")) and not list(cache.glob("*.partial"))
