"""torchtitan's trainer under Planaria: the same training as by itself, whatever is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

from planaria.errors import UsageError
from planaria.train.titan import configurations
from tests.titan import runs
from tests.titan.on_cpu import prepare
from tests.titan.runs import SMALL

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
DEBUG = (*SMALL, "--config", "llama3_debugmodel", "--training.steps", "24")


@pytest.fixture(scope="module")
def quiet(here: Path) -> Path:
    """What a run of two shards left behind that nothing happened to."""
    runs.alone(here / "quiet", *DEBUG)
    return here / "quiet"


def test_two_shards_are_two_replicas_of_torchtitan_bit_for_bit(here: Path, quiet: Path) -> None:
    runs.stock(here / "stock", *DEBUG)
    ours, theirs = runs.weights(quiet), runs.weights(here / "stock")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize(("model", "config"), [("llama3", "sft_debugmodel"), ("qwen3", "qwen3_debugmodel")])
def test_losses_and_norms_are_those_of_torchtitan(here: Path, model: str, config: str) -> None:
    """In conversations few tokens are trained on, and not equally many in every shard; all weigh the same. qwen3's
    embedding is its output layer, too."""
    args = (*SMALL, "--config", config, "--training.steps", "3")
    ours = runs.shown(runs.alone(here / "ours" / config, *args, model=model))
    theirs = runs.shown(runs.stock(here / "theirs" / config, *args, model=model))
    assert len(ours) == 6
    assert ours == pytest.approx(theirs, abs=2e-4)  # the last digits shown; rounded at another place


def test_a_killed_group_heals_and_the_curve_is_that_of_the_quiet_run(
    here: Path, quiet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Time for the killed group to be back before the end. No --checkpoint.enable, as in torchtitan's instructions.
    monkeypatch.setenv("TITAN_PAUSE", "0.5")
    with runs.run(here / "killed", *DEBUG) as run:
        run.step(3)
        run.signal(1)
        run.incarnation(1, 1)
        assert run.end() == 0, run.log()
        assert run.digests() == {runs.digest(quiet)}, run.log()
    expected = runs.losses(quiet)
    lives = runs.lives(here / "killed")
    # The survivor lives through it, though the other heals while it trains.
    assert lives.keys() == {"rg0i0", "rg1i0", "rg1i1"}
    assert lives["rg0i0"] == expected
    # The joiner takes part before the end, and never trains by itself from weights of its own.
    assert 3 <= min(lives["rg1i1"]) < max(lives["rg1i1"]) == 23
    assert all(loss == expected[step] for step, loss in lives["rg1i1"].items())


def test_ranks_that_share_their_group_s_model_heal_it_together(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 in groups of two ranks. This loss and the validation leave parameters gathered at the end of a step, when
    the state is taken; taking it is no collective, so a rank of one group waits for none of another."""
    args = (*SMALL, "--config", "llama3_debugmodel_ce_loss", "--training.steps", "16")
    validated = ("--validator.enable", "--validator.freq", "1", "--validator.steps", "1")
    args = (*args, *validated, "--validator.dataloader.dataset", "c4_test")
    with runs.run(here / "fsdp quiet", *args, groups=1, ranks=2) as quiet:
        assert quiet.end() == 0, quiet.log()
    monkeypatch.setenv("TITAN_PAUSE", "0.5")
    with runs.run(here / "fsdp killed", *args, ranks=2) as run:
        run.step(2)
        run.signal(1, rank=1)
        run.incarnation(1, 1)
        assert run.end() == 0, run.log()
    assert run.digests() == quiet.digests()
    lives = runs.lives(here / "fsdp killed")
    assert lives.keys() == {"rg0i0", "rg1i0", "rg1i1"}
    assert lives["rg0i0"] == runs.losses(here / "fsdp quiet" / "rg0" / "i0")
    assert lives["rg1i1"]


def test_when_all_are_killed_the_job_goes_on_from_its_checkpoint_and_exports_the_same_weights(
    here: Path, quiet: Path
) -> None:
    with runs.run(here / "all killed", *DEBUG, "--checkpoint.enable", "--checkpoint.interval", "4") as run:
        run.step(4)
        run.until(lambda: run.events("saved"), "a checkpoint")
        for group in (0, 1):
            run.signal(group)
        assert run.end() == 0, run.log()
    assert run.digests() == {runs.digest(quiet)}
    lives = runs.lives(here / "all killed")
    assert min(step for name, life in lives.items() if not name.endswith("i0") for step in life) >= 4
    # torchtitan's own format, by torchtitan's own code, from one of the groups.
    name = "tok_embeddings.weight"
    expected = runs.weights(quiet)[name]
    exported = {name: torch.empty_like(expected)}
    place = here / "all killed" / "dump" / "checkpoint" / "step-24"
    torch.distributed.checkpoint.load(exported, checkpoint_id=place, no_dist=True)
    assert torch.equal(exported[name], expected)


def test_a_batch_that_cannot_be_shared_ends_the_job_with_one_sentence(here: Path) -> None:
    with runs.run(here / "bad", *DEBUG, "--training.global_batch_size", "3") as run:
        assert run.end() == 2
        assert "so it must be a multiple of the number of shards, 2" in run.log()
        assert "Traceback" not in run.log()


@pytest.mark.parametrize(
    ("section", "option", "value", "sentence"),
    [
        ("parallelism", "data_parallel_replicate_degree", 2, "groups are the replicas"),
        ("training", "disable_cuda_graphs", False, "leave CUDA graphs off"),
        ("checkpoint", "load_step", 3, "goes on from the newest of its own checkpoints"),
    ],
)
def test_options_that_cannot_be_are_refused(section: str, option: str, value: object, sentence: str) -> None:
    prepare()
    config = configurations("llama3")["llama3_debugmodel"]()
    config.checkpoint.enable = True
    setattr(getattr(config, section), option, value)
    with pytest.raises(UsageError, match=sentence):
        config.build()
