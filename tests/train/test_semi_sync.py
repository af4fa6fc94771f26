"""[semi_sync]: rounds of low communication by ``planaria train``."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from planaria.errors import UsageError
from planaria.train.config import load
from tests.train.harness import digests, lines, train, write_config

GROUPS = ("--fault_tolerance.enable=true", "--fault_tolerance.group_size=2")


def test_an_exact_run_of_two_groups_has_the_metrics_of_one_process(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    words = ("--semi_sync.method=diloco", "--semi_sync.sync_steps=2", "--semi_sync.exact=true")
    for name, more in (("alone", ("--fault_tolerance.shards=2",)), ("two", GROUPS)):
        done = train(config, tmp_path / name, *words, *more)
        assert done.returncode == 0, done.stderr
    alone = lines(tmp_path / "alone")
    assert [line["step"] for line in alone] == [1, 3, 5]
    assert all(math.isfinite(line["grad_norm"]) for line in alone)
    keep = ("step", "loss", "grad_norm", "lr")
    assert [[line[key] for key in keep] for line in lines(tmp_path / "two")] == [
        [line[key] for key in keep] for line in alone
    ]


def test_streaming_in_groups_of_two_ranks(tmp_path: Path) -> None:
    words = ("--semi_sync.method=streaming", "--semi_sync.sync_steps=6", "--semi_sync.num_fragments=2")
    more = ("--parallelism.data_parallel_shard_degree=2", "--training.device=cpu", "--validation.enable=true")
    out = tmp_path / "out"
    done = train(
        write_config(tmp_path), out, *words, *GROUPS, *more, "--validation.held_out=0.3", "--training.steps=12"
    )
    assert done.returncode == 0, done.stderr
    assert len(digests(out / "logs")) == 1
    last = lines(out)[-1]
    assert last["step"] == 11 and math.isfinite(last["validation_loss"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["sync_steps=0"], "sync_steps is '0'; it must be at least 1"),
        (["sync_steps=4"], "training.steps is 6; it must be a multiple of the 4 steps"),
        (["method=streaming", "sync_steps=3", "num_fragments=2"], "sync_steps is 3; it must be a multiple of the 2"),
        (["method=streaming", "sync_steps=2", "num_fragments=2"], "fragment_sync_delay is 1; it must be below the 1"),
        (["method=streaming", "sync_steps=2", "exact=true"], "cannot be had with streaming"),
        (["method=gossip"], "it must be one of none, local_sgd, diloco"),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_anything_starts(
    tmp_path: Path, words: list[str], sentence: str
) -> None:
    given = ["--semi_sync.method=diloco", *(f"--semi_sync.{word}" for word in words)]
    with pytest.raises(UsageError, match=sentence):
        load(write_config(tmp_path), given)
