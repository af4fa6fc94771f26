"""The promise on GPUs: one rank per group, each on a GPU of its own, with deterministic kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.harness import Run
from tests.e2e.test_buddies_e2e import at_work, begins
from tests.e2e.test_lost_ranks_e2e import pids
from tests.e2e.test_standbys_e2e import warm

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SCRIPT = Path(__file__).parent / "scripts" / "parallel.py"


@pytest.mark.parametrize("layout", ["plain", "fsdp"])
def test_a_group_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setenv("PLANARIA_EXACT", "bits")
    words = (layout, "--device", "cuda")
    with Run(tmp_path / "quiet", *words, groups=1, script=SCRIPT) as run:
        assert run.end() == 0, run.log()
        quiet = run.digests()
    with Run(tmp_path / "run", *words, "--pause", "0.02", groups=2, script=SCRIPT) as run:
        for group in (1, 0):
            run.settled(2)
            run.step(5)
            run.signal(group)
            run.incarnation(group, 1)
        assert run.end() == 0, run.log()
        assert run.digests() == quiet, run.log()


@pytest.mark.parametrize("reduction", ["tree", "int8"])
def test_low_communication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reduction: str) -> None:
    """DiLoCo, the lost group's inner steps made again."""
    monkeypatch.setenv("PLANARIA_EXACT", "bits")
    options = ("--device", "cuda", "--reduction", reduction)
    words, script = ("--exact", "--shards", "2", "--pause", "0.02"), SCRIPT.with_name("low_comm.py")
    with Run(tmp_path / "quiet", *words, groups=1, script=script, options=options) as run:
        assert run.end() == 0, run.log()
        quiet = run.digests()
    with Run(tmp_path / "run", *words, groups=2, script=script, options=options) as run:
        run.settled(2)
        run.signal(1)
        run.incarnation(1, 1)
        assert run.end() == 0, run.log()
        assert run.digests() == quiet, run.log()


def test_the_only_group_goes_back_to_its_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANARIA_EXACT", "bits")
    options = ("--nproc-per-group", "2", "--buddy", "3")
    words = ("fsdp", "--device", "cuda")
    with Run(tmp_path / "quiet", *words, groups=1, script=SCRIPT, options=options[:2]) as run:
        assert run.end() == 0, run.log()
        quiet = run.digests()
    with Run(tmp_path / "run", *words, "--guard", "--pause", "0.02", groups=1, script=SCRIPT, options=options) as run:
        before = at_work(run, 0, 2)
        run.signal(0, rank=1)
        after = at_work(run, 1, 2)
        assert {who for who in before if before[who] != after[who]} == {(0, 1)}, run.log()
        assert run.end() == 0, run.log()
        assert run.digests() == quiet, run.log()
        assert begins(run), run.log()


# Two groups of two ranks on two GPUs: every communicator has one rank on each of them. A standby's is the first.
CROSSED = "0,1,1,0"


def crossed(directory: Path, *words: str, groups: int = 2, standbys: int = 0) -> Run:
    options = ("--nproc-per-group", "2", "--standbys", str(standbys))
    return Run(directory, *words, "--device", "cuda", groups=groups, options=options, script=SCRIPT)


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_lost_ranks_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setenv("PLANARIA_EXACT", "bits")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", CROSSED)
    with crossed(tmp_path / "quiet", layout, groups=1) as run:
        assert run.end() == 0, run.log()
        quiet = run.digests()
    with crossed(tmp_path / "run", layout, "--guard", "--pause", "0.02") as run:
        for group, lost in ((1, 1), (0, 0)):
            before = pids(run, group, 0, 2)
            run.signal(group, rank=lost)
            after = pids(run, group, 1, 2)
            assert {rank for rank in before if before[rank] == after[rank]} == {1 - lost}, run.log()
        assert run.end() == 0, run.log()
        assert run.digests() == quiet, run.log()


def test_standbys_take_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANARIA_EXACT", "bits")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{CROSSED},0")
    with crossed(tmp_path / "quiet", "fsdp", groups=1) as run:
        assert run.end() == 0, run.log()
        quiet = run.digests()
    with crossed(tmp_path / "run", "fsdp", "--guard", "--pause", "0.02", standbys=1) as run:
        # Both are on the first GPU, as the standbys are. The first tries itself as rank 0, the second must begin again.
        for count, (group, lost) in enumerate([(0, 0), (1, 1)]):
            before = pids(run, group, 0, 2)
            standby = warm(run, count + 1)
            run.signal(group, rank=lost)
            assert pids(run, group, 1, 2) == {**before, lost: standby}, run.log()
        assert run.end() == 0, run.log()
        assert run.digests() == quiet, run.log()
