"""GPUs are found without a framework."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria.engines.devices import Gpus, Shares, find


def machine(dev: Path, *names: str) -> Path:
    for name in names:
        (dev / name).parent.mkdir(parents=True, exist_ok=True)
        (dev / name).touch()
    return dev


def test_nvidia(tmp_path: Path) -> None:
    dev = machine(
        tmp_path, "nvidia0", "nvidia3", "nvidia11", "nvidiactl", "nvidia-uvm", "nvidia-caps/x", "dri/renderD128"
    )
    assert find({}, dev) == Gpus(("0", "1", "2"), ("CUDA_VISIBLE_DEVICES",)), "as the driver numbers them"


def test_amd(tmp_path: Path) -> None:
    dev = machine(tmp_path, "kfd", "dri/renderD128", "dri/renderD129", "dri/card0")
    found = find({}, dev)
    assert found == Gpus(("0", "1"), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"))
    assert found.env(("1",)) == {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}
    assert find({"CUDA_VISIBLE_DEVICES": "1"}, dev).ids == ("1",)
    assert find({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0,1"}, dev).ids == ("0", "1")


def test_standbys_bring_their_own_gpu() -> None:
    shares = Shares(Gpus(("0", "1", "2", "3", "4", "5")), 2, standbys=2)
    assert [shares.env(group, ()) for group in (0, 1)] == [{"CUDA_VISIBLE_DEVICES": ids} for ids in ("0,1", "2,3")]
    assert shares.env(2, (0, 1)) is None  # the last two are not for groups
    assert shares.lend(0) == {"CUDA_VISIBLE_DEVICES": "4"} and shares.lend(1) == {"CUDA_VISIBLE_DEVICES": "5"}
    assert shares.lend(2) is None
    assert shares.give(0, 1, standby=1) == {"CUDA_VISIBLE_DEVICES": "0,5"}
    assert shares.env(0, (1,)) == {"CUDA_VISIBLE_DEVICES": "0,5"}  # so it stays from life to life
    assert shares.lend(2) == {"CUDA_VISIBLE_DEVICES": "1"}  # that of the rank which was lost
    shares.take_back(0)
    shares.take_back(0)
    assert shares.lend(3) == {"CUDA_VISIBLE_DEVICES": "4"} and shares.lend(4) is None


def test_a_group_that_comes_from_another_node_has_the_gpu_of_its_standby() -> None:
    shares = Shares(Gpus(("0", "1")), 1, standbys=1)
    assert shares.env(2, ()) == {"CUDA_VISIBLE_DEVICES": "0"} and shares.lend(0) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert shares.give(0, 0, standby=0) == {"CUDA_VISIBLE_DEVICES": "1"} == shares.env(0, (2,))
    assert shares.lend(1) is None and shares.of(2) == ("0",)


def test_nobody_is_given_a_gpu_that_is_closed() -> None:
    shares = Shares(Gpus(("0", "1", "2", "3", "4")), 2, standbys=1)
    assert shares.env(0, ()) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    shares.closed = frozenset({"1", "4"})
    assert shares.lend(0) is None
    assert shares.env(0, (0,)) == {"CUDA_VISIBLE_DEVICES": "0,1"}, "ranks that live hold theirs"
    assert shares.env(0, ()) == {"CUDA_VISIBLE_DEVICES": "2,3"}, "it has left, and comes back on others"
    assert not shares.has_place(1, (0,)) and shares.env(1, (0,)) is None
    shares.closed = frozenset()
    assert shares.has_place(1, (0,)) and shares.lend(0) == {"CUDA_VISIBLE_DEVICES": "4"}


def test_none(tmp_path: Path) -> None:
    assert find({}, tmp_path).ids == () == find({}, machine(tmp_path, "dri/renderD128")).ids
    assert Shares(Gpus(), 2).env(0, ()) == {}


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("3, 1", ("3", "1")),
        ("GPU-8932f937,MIG-1/2/3", ("GPU-8932f937", "MIG-1/2/3")),
        ("2,-1,0", ("2",)),
    ],
)
def test_the_environment_comes_first(tmp_path: Path, value: str, ids: tuple[str, ...]) -> None:
    assert find({"CUDA_VISIBLE_DEVICES": value}, machine(tmp_path, "nvidia0")).ids == ids


def test_a_group_keeps_its_share_unless_it_is_not_well_and_another_is_free() -> None:
    shares = Shares(Gpus(("0", "1", "2", "3", "4", "5")), 2)

    def given(group: int, *living: int) -> str:
        env = shares.env(group, living)
        assert env is not None
        return env["CUDA_VISIBLE_DEVICES"]

    assert (given(0), given(1, 0), shares.of(1), shares.of(2)) == ("0,1", "2,3", ("2", "3"), ())
    assert shares.better(0, (0, 1))
    shares.avoided = frozenset({"1"})
    assert given(0, 0, 1) == "0,1", "who lives cannot be given others"
    assert given(0, 1) == "4,5" and given(0, 1) == "4,5"
    assert not shares.better(1, (0, 1)), "what is left is not well"
    assert given(2, 0, 1) == "0,1", "but better than nothing"
    shares.avoided = frozenset({"3", "0"})
    assert given(1, 0, 2) == "2,3", "its own is as good as any"
    shares.avoided = frozenset({"3"})
    assert given(1, 0, 2) == "2,3", "the better one is taken"
    assert given(1, 0) == "0,1", "until its owner is gone"
