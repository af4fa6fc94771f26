"""Samples out of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planaria.errors import UsageError
from planaria.train.config import load
from planaria.train.data import samples_of
from planaria.train.tokens import Bytes
from tests.train.harness import write_config


def test_samples_are_the_text_in_order_and_labels_are_what_follows(tmp_path: Path) -> None:
    config = load(write_config(tmp_path), [f"--job.dump_folder={tmp_path}"])
    samples, held_out, _ = samples_of(config, Bytes())
    text = (tmp_path / "texts" / "page.txt").read_bytes()
    assert held_out is None and len(samples) == len(text) // 32
    joined = torch.cat([samples[index][0] for index in range(len(samples))])
    assert bytes(joined.tolist()) == text[: len(joined)]
    for x, y in (samples[0], samples[len(samples) - 1]):
        assert torch.equal(x[1:], y[:-1]) and x.dtype == torch.int64


@pytest.mark.parametrize("source", ["files", "mock"])
def test_what_is_held_out_is_not_trained_on(tmp_path: Path, source: str) -> None:
    path = write_config(tmp_path)
    if source == "mock":
        path.write_text("[training]\nseq_len = 32\n[data]\nmock = true\n")
    words = [f"--job.dump_folder={tmp_path}", "--validation.enable", "--validation.held_out=0.25"]
    whole, _, digest = samples_of(load(path, words[:1]), Bytes())
    trained, held_out, same = samples_of(load(path, words), Bytes())
    assert held_out is not None and len(trained) + len(held_out) == len(whole) and digest == same
    assert len(held_out) == round(len(whole) / 4)
    assert torch.equal(held_out[0][0], whole[len(trained)][0])
    assert torch.equal(trained[len(trained) - 1][0], whole[len(trained) - 1][0])


def test_text_of_its_own_for_validation(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("Something else altogether. " * 20)
    words = [f"--job.dump_folder={tmp_path}", "--validation.enable", f"--validation.files={tmp_path}/other.txt"]
    _, held_out, digest = samples_of(load(write_config(tmp_path), words), Bytes())
    assert held_out is not None and bytes(held_out[0][0].tolist()).startswith(b"Something else")
    assert digest != samples_of(load(write_config(tmp_path), words[:1]), Bytes())[2]


def test_too_little_text(tmp_path: Path) -> None:
    words = [f"--job.dump_folder={tmp_path}", "--training.seq_len=100000"]
    with pytest.raises(UsageError, match=r"data.files has \d+ tokens; two samples .* 100000 need 200001"):
        samples_of(load(write_config(tmp_path), words), Bytes())
