"""Buddy copies: who keeps whose, which state is there when a rank is lost, and copies between real processes."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from planaria.core.messages import Member, Policy, QuorumId
from planaria.engines.local import hold_port
from planaria.rank.settings import Settings
from planaria.torch import buddies
from planaria.torch.buddies import Buddies, Key, buddy_of, newest_whole
from planaria.torch.state import ProtectedState
from planaria.torch.world import GroupWorld
from planaria.wire.page import Copies, ProgressPage

RANKS = 3
TRIALS = ("replaced", "two are lost", "damaged", "no room")
OLD, NEW = (4, QuorumId(1, 1)), (8, QuorumId(1, 2))


@given(nodes=st.integers(1, 8), per_node=st.integers(1, 8))
def test_everybody_has_one_buddy_and_is_one_and_no_node_takes_both(nodes: int, per_node: int) -> None:
    size = nodes * per_node
    found = [buddy_of(rank, size, per_node) for rank in range(size)]
    assert sorted(found) == list(range(size))
    for rank, buddy in enumerate(found):
        assert rank != buddy or size == 1
        assert rank // per_node != buddy // per_node or nodes == 1


@given(data=st.data(), size=st.integers(2, 6))
def test_at_whatever_moment_one_rank_is_lost_there_is_a_whole_copy(data: st.DataObject, size: int) -> None:
    """How far each rank is with the new copy: 0 not begun, 1 its own, 2 its ward's too, 3 it knows that all are."""
    around = [buddy_of(rank, size, size) for rank in range(size)]
    far = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    if min(far) < 2:  # then nobody has heard that all are
        far = [min(each, 2) for each in far]
    mine: list[frozenset[Key]] = [frozenset({OLD} if f < 3 else ()) | ({NEW} if f >= 1 else set()) for f in far]
    wards: list[frozenset[Key]] = [frozenset({OLD} if f < 3 else ()) | ({NEW} if f >= 2 else set()) for f in far]
    lost = data.draw(st.integers(0, size - 1))
    mine[lost] = wards[lost] = frozenset()
    best = newest_whole(list(zip(mine, wards, strict=True)), around)
    assert best == NEW if max(far) == 3 else best in (OLD, NEW)


def test_without_a_rank_and_its_buddy_there_is_none() -> None:
    full, nothing = (frozenset({OLD}), frozenset({OLD})), (frozenset[Key](), frozenset[Key]())
    assert newest_whole([full, nothing, nothing, full], [1, 2, 3, 0]) is None
    assert newest_whole([nothing, full, nothing, full], [1, 2, 3, 0]) == OLD


def _rank(rank: int, directory: Path, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    world = GroupWorld(rank, RANKS, torch.device("cpu"), None, "a test")
    for trial in TRIALS:  # in the same processes, for these take long to start
        with pytest.MonkeyPatch.context() as patch:
            try:
                _try(trial, world, directory, patch)
            except Exception as error:
                raise AssertionError(f"{trial}, rank {rank}") from error


def _try(trial: str, world: GroupWorld, directory: Path, patch: pytest.MonkeyPatch) -> None:
    rank = world.rank
    settings = Settings("job", Member(0, 0), 1, 1, 0, Policy.REDISTRIBUTE, "tree", "127.0.0.1", None, None, rank, RANKS)
    torch.manual_seed(rank)  # each has a part of its own
    model, facts = nn.Linear(40, 30 + rank), {"step": 0}
    state = ProtectedState(model=model, facts=facts)
    page = ProgressPage.create(directory / str(rank))
    page.guarded = True

    def lost(error: Exception) -> NoReturn:
        raise error

    made = Buddies(2, settings, world, state, page, world.gather, nullcontext, lost)
    digests: dict[int, str] = {}

    def commit(step: int) -> None:
        with torch.no_grad():
            model.weight += 0.1
        facts["step"] = step
        digests[step] = state.digest()
        made.committed(step, QuorumId(1, 1))
        made.wait()

    def goes_back(step: int) -> None:
        best = made.meet()
        assert best == (step, QuorumId(1, 1))
        state.restore(*made.take_back(best))
        assert state.digest() == digests[step] and facts["step"] == step

    commit(1)  # at once
    assert page.read().copies is Copies.WHOLE
    commit(2), commit(3)
    match trial:
        case "replaced":
            if rank == 1:  # another process in its place
                made._own.clear(), made._wards.clear()
            goes_back(2)
            assert page.read().copies is (Copies.NONE if rank == 1 else Copies.WHOLE)
            commit(3)  # again at once
            assert page.read().copies is Copies.WHOLE and len(made._own) == len(made._wards) == 1
            goes_back(3)
        case "two are lost":
            if rank != 0:
                made._own.clear(), made._wards.clear()
            assert made.meet() is None and page.read().copies is Copies.NONE
        case "damaged":
            if rank == 1:
                patch.setattr(buddies, "_sum", lambda block: 1)
            commit(4)
            goes_back(2)
        case "no room":
            if rank == 2:
                patch.setattr(buddies, "free_memory", lambda: 0)
            model.register_buffer("more", torch.zeros(1000))
            commit(4)
            assert page.read().copies is Copies.NO_ROOM and not made._own and not made._wards
            commit(6)
            assert made.meet() is None


def test_copies_between_ranks(tmp_path: Path) -> None:
    with hold_port() as held:  # it takes them seconds to start
        port = held.getsockname()[1]
        mp.start_processes(_rank, (tmp_path, port), nprocs=RANKS, start_method="spawn")
