"""The ranks of a group: who takes which part of a batch, and meshes that do not fit."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from planaria.errors import PlanariaError, UsageError
from planaria.exchange.waiting import Bell
from planaria.torch import ingroup
from planaria.torch.world import GroupWorld, choose_device, part_of

CPU = torch.device("cpu")


def parts(**shape: int) -> list[tuple[int, int]]:
    return [part_of(rank, shape) for rank in range(math.prod(shape.values()))]


def test_parts_of_a_batch() -> None:
    assert parts(fsdp=4) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert parts(tp=4) == [(0, 1)] * 4
    # The mesh is laid out with its last dimension running fastest, as DeviceMesh has it.
    assert parts(fsdp=2, tp=2) == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert parts(pp=2, dp=2, cp=1) == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert parts(dp=2, fsdp=2) == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_a_group_ends_before_earlier_lives_have_used_up_all_files(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("resource.getrlimit", lambda _: (opened, opened))
    with pytest.raises(PlanariaError, match="the group is started again"):
        ingroup.registered().renew(1, "group 1", CPU, Bell(), lambda: False)


def test_earlier_lives_leave_nothing_behind(tmp_path: Path) -> None:
    # A month of training has thousands of them.
    script, lives = Path(__file__).parent / "scripts" / "regrouping.py", 12
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(lives)],
            env={**os.environ, "RANK": str(rank), "TORCH_CPP_LOG_LEVEL": "ERROR"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for each in ranks:
        told = [[int(word) for word in line.split()] for line in each.communicate()[0].splitlines()]
        assert each.returncode == 0 and len(told) == lives
        # Each used to leave 13 files and 9 threads. What a peer does a moment later may be seen or not.
        early, late = told[lives // 4], told[-1]
        assert late[0] - early[0] < lives / 2 and late[1] - early[1] < lives / 2, told


def test_one_rank_alone_needs_no_torch_world() -> None:
    world = GroupWorld(0, 1, CPU, None, "here")
    assert (world.part, world.layout) == ((0, 1), "1")
    assert world.gather(b"x") == [b"x"]
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("shape", [{"fsdp": 2}, {"tp": -1, "pp": -1}, {"fsdp": 0}, {"fsdp": -2}])
def test_a_mesh_that_does_not_fit(shape: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="does not fit the 1 rank of a group"):
        GroupWorld(0, 1, CPU, shape, "here")


def test_what_is_left_is_filled_in() -> None:
    assert GroupWorld(0, 1, CPU, {"fsdp": 1, "tp": -1}, "here").shape == {"fsdp": 1, "tp": 1}


def test_devices() -> None:
    assert choose_device("cpu", 3, "here") == CPU
    with pytest.raises(UsageError, match="unknown device 'tpu'"):
        choose_device("tpu", 0, "here")
    if not torch.cuda.is_available():
        assert choose_device(None, 0, "here") == CPU
        with pytest.raises(UsageError, match="no GPU of its own"):
            choose_device("cuda", 0, "here")
