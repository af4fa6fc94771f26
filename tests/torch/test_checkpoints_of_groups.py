"""Checkpoints of groups of several ranks: every rank saves its part, and another layout takes up what fits it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from planaria.errors import UsageError
from planaria.torch.checkpoint_files import Checkpoint
from planaria.torch.checkpoint_io import CheckpointReader
from planaria.torch.checkpoint_layout import LoadPlanner, Piece
from tests.torch.checkpointing import names
from tests.torch.pretend_agent import PretendAgent

# Says so for a group of one rank, which is what is meant; in a rank it is not shown.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
PARALLEL = Path(__file__).resolve().parents[1] / "e2e" / "scripts" / "parallel.py"


def whole(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint, put together; those that each rank has for itself are alike."""
    checkpoint = Checkpoint.read(directory / "step-00000020")
    pieces = {
        key: Piece(torch.empty(meta.size, dtype=meta.properties.dtype), meta.size, torch.Size([0] * len(meta.size)))
        for key, meta in checkpoint.tensors.items()
    }
    load(pieces, storage_reader=CheckpointReader(checkpoint), planner=LoadPlanner(), no_dist=True)
    found: dict[str, torch.Tensor] = {}
    for key, piece in pieces.items():
        name = key.partition("@")[0]
        assert torch.equal(found.setdefault(name, piece.tensor), piece.tensor), key
    return found


@pytest.mark.parametrize("layout", ["fsdp", "tp", "pp"])
def test_a_group_of_ranks_goes_on_from_its_checkpoint_with_the_same_bits(tmp_path: Path, layout: str) -> None:
    where = {"PLANARIA_CHECKPOINT": str(tmp_path / "c"), "PLANARIA_CHECKPOINT_EVERY": "5"}
    with PretendAgent(PARALLEL, 1, 4, tmp_path, ranks=2, words=[layout, "--steps", "12"]) as agent:
        quiet = agent.alone(**where)
        shutil.rmtree(tmp_path / "c" / "step-00000012")
        shutil.rmtree(tmp_path / "c" / "step-00000010")
        assert agent.alone(**where) == quiet
        assert names(tmp_path / "c") == ["step-00000005", "step-00000010", "step-00000012"]


def test_another_layout_takes_the_same_state_up(tmp_path: Path) -> None:
    """Around through all layouts, each of which cuts tensors in its own way, and back to where it began."""
    tour = [("plain", 1), ("fsdp", 2), ("tp", 2), ("fsdp-tp", 4), ("plain", 1)]
    source = ""
    for turn, (layout, ranks) in enumerate(tour):
        target = str(tmp_path / f"{turn}-{layout}")
        with PretendAgent("relaid.py", 1, 4, tmp_path, ranks=ranks) as agent:
            agent.alone(LAYOUT=layout, FROM=source, TO=target)
        source = target
    first = whole(tmp_path / "0-plain")
    for name in ("0.weight", "3.weight", "odd[4]_x].bias"):
        of = 0 if name == "0.weight" else 1
        assert {f"model[0].a.b.{name}", f"facts.means[0].{name}"} <= first.keys()
        assert f"optimizer[{of}].state[model[0].a.b.{name}].exp_avg_sq" in first
    for turn, (layout, _) in enumerate(tour[1:], 1):
        again = whole(tmp_path / f"{turn}-{layout}")
        assert again.keys() == first.keys()
        assert all(torch.equal(again[name], first[name]) for name in first), layout


def test_what_each_rank_has_of_its_own_stays_its_own(tmp_path: Path) -> None:
    one, two, three = (str(tmp_path / name) for name in ("one", "two", "three"))
    with PretendAgent("relaid.py", 1, 4, tmp_path, ranks=2) as agent:
        agent.alone(LAYOUT="fsdp", FROM="", TO=one, OWN="5")
        agent.alone(LAYOUT="tp", FROM=one, TO=two, OWN="5")
    with PretendAgent("relaid.py", 1, 4, tmp_path) as agent, pytest.raises(AssertionError):
        agent.alone(LAYOUT="plain", FROM=two, TO=three, OWN="5")  # whose should it take?
    assert not (tmp_path / "three").exists()


def test_stages_of_a_pipeline_are_for_as_many_ranks(tmp_path: Path) -> None:
    from tests.torch.checkpointing import Thing

    with PretendAgent(PARALLEL, 1, 4, tmp_path, ranks=2, words=["pp", "--steps", "2"]) as agent:
        agent.alone(PLANARIA_CHECKPOINT=str(tmp_path / "c"))
    with pytest.raises(UsageError, match=r"written by groups of 2 ranks that do not all hold the same objects"):
        Thing().checkpoints(tmp_path / "c", seed=3).resume()
