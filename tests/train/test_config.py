"""Configurations: what is read, what the command line replaces, and one sentence for everything that cannot be."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.errors import UsageError
from planaria.train.config import Config, keys, load

MOCK = "[data]\nmock = true\n"


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "config.toml"
        path.write_text(text)
        return path

    return write


def test_the_file_and_the_command_line_over_it(write) -> None:
    path = write(MOCK + "[training]\nsteps = 7\nseq_len = 16\n[optimizer]\nlr = 1\n")
    words = ["--training.seq-len", "32", "--training.global_batch_size=-1", "--compile.enable", "--job.description=a=b"]
    config = load(path, words)
    assert (config.training.steps, config.training.seq_len, config.training.global_batch_size) == (7, 32, -1)
    assert config.optimizer.lr == 1.0 and type(config.optimizer.lr) is float
    assert config.compile.enable and config.job.description == "a=b"
    assert not load(path, ["--compile.enable", "false", "--data.mock"]).compile.enable


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        ("training = 3", [], "training stands outside of a section"),
        ("[training", [], "is not a TOML file"),
        (MOCK + "[trainin]\nsteps = 3", [], "there is no section [trainin]; sections are job, model, data"),
        (MOCK + "[training]\nstep = 3", [], "there is no key training.step; keys of [training] are steps,"),
        (MOCK + '[training]\nsteps = "3"', [], "training.steps is '3'; it must be a whole number"),
        (MOCK + "[training]\nsteps = true", [], "training.steps is true; it must be a whole number"),
        (MOCK + "[training]\nsteps = 0", [], "training.steps is 0; it must be at least 1"),
        (MOCK, ["--training.steps", "many"], "training.steps is 'many'; it must be a whole number"),
        (MOCK, ["--training.steps"], "training.steps is true; it must be a whole number"),
        (MOCK, ["--optimizer.beta1=1.5"], "optimizer.beta1 is '1.5'; it must be between 0 and 1"),
        (MOCK, ["--model.flavor", "2B"], "model.flavor is '2B'; it must be one of debug, 3M, 1B, 8B"),
        (MOCK, ["--compile.enable", "maybe"], "compile.enable is 'maybe'; it must be true or false"),
        (MOCK, ["--steps", "3"], "'--steps' is not understood"),
        (MOCK, ["steps"], "'steps' is not understood"),
        ("", [], "[data] needs exactly one of files, dataset_path and mock; given: none"),
        (MOCK, ["--data.files", "x"], "given: files, mock"),
        (MOCK, ["--training.global_batch_size", "12"], "training.global_batch_size is 12; it must be a multiple of 8"),
        (
            MOCK,
            ["--fault_tolerance.group_size=2", "--fault_tolerance.shards=1"],
            "shards is 1; it must be 0 or at least",
        ),
        (MOCK, ["--fault_tolerance.replica_id=0"], "it needs fault_tolerance.enable"),
        (MOCK, ["--parallelism.tensor_parallel_degree=3"], "it must divide the 2 key heads of debug"),
        (MOCK, ["--parallelism.context_parallel_degree=3"], "it must be a multiple of 6"),
        (MOCK, ["--parallelism.pipeline_parallel_degree=8"], "makes 8 stages of it, but debug has only 4 layers"),
        (MOCK, ["--model.flavor=1B", "--parallelism.pipeline_parallel_degree=2"], "it must be 1 for 1B"),
        (MOCK, ["--parallelism.pipeline_parallel_degree=2"], "a pipeline of 2 ranks needs a multiple of 2 of them"),
    ],
)
def test_bad_input_is_one_sentence(write, text: str, words: list[str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        config = load(write(text), words)
        config.micro_batches(config.shards)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*nowhere.toml: No such file"):
        load(tmp_path / "nowhere.toml")


def test_a_mesh_that_does_not_fit(write) -> None:
    config = load(write(MOCK), ["--parallelism.tensor_parallel_degree=2"])
    assert config.degrees(8) == {"pp": 1, "fsdp": 4, "cp": 1, "tp": 2}
    assert config.degrees() == {"pp": 1, "fsdp": 1, "cp": 1, "tp": 2}
    with pytest.raises(UsageError, match="a group of 3 processes cannot be data_parallel_shard_degree 1 x"):
        config.degrees(3)


@given(st.integers(1, 8), st.integers(1, 8), st.sampled_from([1, 2, 4]), st.integers(1, 6))
def test_a_step_is_always_the_global_batch(shards: int, local: int, ranks: int, times: int) -> None:
    made = dataclasses.replace(
        Config(),
        training=dataclasses.replace(
            Config().training, local_batch_size=local, global_batch_size=shards * local * ranks * times
        ),
    )
    assert (
        made.micro_batches(shards, ranks) * shards * local * ranks
        == made.training.global_batch_size
        == (shards * local * ranks * times)
    )


def test_every_default_is_allowed_and_told() -> None:
    """A default outside of its own limits would make an override back to it fail."""
    told = keys()
    for section, kind in get_type_hints(Config).items():
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            assert f"--{section}.{field.name} = " in told
            least, most = field.metadata["least"], field.metadata["most"]
            assert least is None or least <= field.default <= (field.default if most is None else most)
            if get_origin(hints[field.name]) is not None:
                assert field.default in get_args(hints[field.name])
