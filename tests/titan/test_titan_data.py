"""Positions in torchtitan's data: opened anywhere, a shard goes on as if it had been read from the start."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.errors import UsageError

SEQUENCE, BATCH = 64, 2


def loader(here: Path, kind: str = "text", shards: int = 2) -> Any:
    """As torchtitan's Trainer builds it, in a group of one rank, below the assets."""
    from datasets import load_dataset
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS, ChatDataLoader, HuggingFaceTextDataLoader

    from planaria.train.titan.v0_3_data import ShardedLoader

    DATASETS["streamed"] = DatasetConfig(
        path="tests/assets/c4_test",
        loader=lambda path: load_dataset(path, split="train", streaming=True),
        sample_processor=lambda sample: sample["text"],
    )
    text = HuggingFaceTextDataLoader.Config(dataset="streamed" if kind == "streaming" else "c4_test")
    chat = ChatDataLoader.Config(
        dataset_path="json",
        load_dataset_kwargs={"data_files": "tests/assets/sft_test/data.json", "split": "train"},
        sample_processor=lambda sample: [
            {"role": "user", "content": sample["question"]},
            {"role": "assistant", "content": sample["answer"]},
        ],
    )
    config = ShardedLoader.Config(inner=chat if kind == "chat" else text, shards=shards)
    made = config.build(
        dp_world_size=1,
        dp_rank=0,
        tokenizer=HuggingFaceTokenizer(tokenizer_path="tests/assets/tokenizer"),
        seq_len=SEQUENCE,
        local_batch_size=BATCH,
        snapshot_every_n_steps=None,
    )
    made.bind(shards)
    return made


def rows(batch: list[Any]) -> torch.Tensor:
    """Inputs, positions and labels of a batch as one tensor."""
    ((inputs, labels),) = batch
    return torch.stack([inputs["input"], inputs["positions"], labels])


def straight(source: Any, shard: int, steps: int) -> tuple[list[int], list[torch.Tensor]]:
    """Read from the start, with the cursor before every batch."""
    cursors, batches = [0], []
    for step in range(steps):
        batches += map(rows, source.batches(step, shard))
        cursors.append(source.cursor_after(shard))
        source.commit({shard: cursors[-1]})
    return cursors, batches


@pytest.mark.parametrize(("kind", "steps"), [("text", 400), ("streaming", 400), ("chat", 60)])
def test_a_shard_opened_at_any_position_goes_on_as_torchtitans_loader_does(here: Path, kind: str, steps: int) -> None:
    source = loader(here, kind)
    cursors, batches = straight(source, 1, steps)
    if kind == "text":
        assert cursors[-1] >> 55 >= 2, "ends of epochs were to be among the positions"
    theirs = itertools.islice(source.loader(1, 2), steps)
    assert all(torch.equal(rows([batch]), batch_read) for batch, batch_read in zip(theirs, batches, strict=True))
    opened = loader(here, kind)  # that has read nothing: positions come to it as state from peers
    for step in random.Random(0).sample(range(steps), 40):
        opened.load_state_dict({"cursors": [0, cursors[step]]})
        assert torch.equal(rows(next(opened.batches(step, 1))), batches[step]), f"step {step}"


def test_positions_are_read_again_by_whoever_takes_a_shard_over(here: Path) -> None:
    mine, theirs = loader(here), loader(here)
    first = [rows(batch) for batch in mine.batches(0, 0)]
    assert all(map(torch.equal, first, map(rows, theirs.batches(0, 0))))
    # Not committed: read once more, though the stream itself has gone on.
    assert all(map(torch.equal, first, map(rows, mine.batches(0, 0))))
    mine.commit({0: theirs.cursor_after(0), 1: 0})
    assert not torch.equal(first[0], rows(next(mine.batches(1, 0))))


def test_time_spent_reading_is_told(here: Path) -> None:
    source = loader(here)
    list(source.batches(0, 0))
    assert len(source.seconds) == 1
    assert source.seconds[0] > 0


def test_more_shards_than_documents_are_refused(here: Path) -> None:
    with pytest.raises(UsageError, match="200 documents are too few for 300 shards"):
        next(loader(here, shards=300).batches(0, 250))
