"""Copies in memory that outlives its process: what is whole is found again, everything else is refused."""

from __future__ import annotations

import itertools
import os
import resource
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planaria.core.messages import QuorumId
from planaria.engines.keeping import Keeping
from planaria.torch.kept import Kept, age
from planaria.torch.parts import spec_of, wire_form

WHOSE = b"job 1 0"


def write_to(kept: Kept, step: int, numel: int, number: int | None = None) -> bool:
    tensors = [torch.full((numel,), float(step)), torch.zeros(0), torch.arange(6).reshape(2, 3).t()]
    specs, wires = [spec_of(each) for each in tensors], [wire_form(each) for each in tensors]
    return kept.write((step, QuorumId(1, step if number is None else number)), {"step": step}, wires, specs)


def write(kept: Kept, step: int, numel: int = 1000, number: int | None = None) -> None:
    assert write_to(kept, step, numel, number)


def steps(paths: list[Path], whose: bytes = WHOSE) -> list[int]:
    return sorted(step for step, _ in Kept(paths, whose).whole())


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "a", tmp_path / "b"]
    for each in found:
        each.touch()
    return found


def test_the_two_newest_are_there_for_the_next_process(paths: list[Path]) -> None:
    kept = Kept(paths, WHOSE)
    assert kept.whole() == []
    for step in (1, 2, 3):
        write(kept, step, 1000 * step)
        assert steps(paths) == [step - 1, step][step == 1 :]
    write(Kept(paths, WHOSE), 4, 10)  # a process that has not looked writes over anything, the next looks first
    newer = Kept(paths, WHOSE)
    body, tensors, specs = newer.read((4, QuorumId(1, 4))) or pytest.fail("it is gone")
    assert body == {"step": 4}
    assert torch.equal(tensors[0], torch.full((10,), 4.0)) and tensors[1].numel() == 0
    assert torch.equal(tensors[2], torch.arange(6).reshape(2, 3).t()) and specs[2].stride == (1, 3)
    assert newer.read((4, QuorumId(1, 5))) is None
    assert steps(paths, b"job 1 1") == []  # another rank's, or another job's


def test_a_later_step_of_a_branch_that_was_given_up_is_older(paths: list[Path]) -> None:
    """The last copy is never written over before another is whole."""
    kept = Kept(paths, WHOSE)
    for step, number in ((8, 1), (9, 1), (7, 2), (8, 2), (9, 2)):
        write(kept, step, number=number)
        newest, key = max(kept.whole(), key=age), (step, QuorumId(1, number))
        assert newest == key and kept.read(key) is not None
    assert sorted(kept.whole()) == [(8, QuorumId(1, 2)), (9, QuorumId(1, 2))]


def test_nothing_is_kept_where_the_system_gives_no_memory(paths: list[Path]) -> None:
    """A limit on files holds for this memory too. What is there stays."""
    kept = Kept(paths, WHOSE)
    write(kept, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        assert not write_to(kept, 2, 1 << 16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert steps(paths) == [1]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_copy_that_is_damaged_anywhere_is_none(paths: list[Path], data: st.DataObject) -> None:
    for each in paths:
        each.write_bytes(b"")
    kept = Kept(paths, WHOSE)
    write(kept, 1, 40)
    write(kept, 2, 40)
    whole = {path: path.read_bytes() for path in paths}
    newest = next(path for path, other in itertools.permutations(paths) if path.stat().st_mtime_ns and _has(path, 2))
    at = data.draw(st.integers(0, len(whole[newest]) - 1))
    if data.draw(st.booleans()):
        newest.write_bytes(whole[newest][:at])
    else:
        newest.write_bytes(whole[newest][:at] + bytes([whole[newest][at] ^ 1]) + whole[newest][at + 1 :])
    found = steps(paths)
    # Nothing depends on the gaps between what is kept.
    assert found == [1] or (found == [1, 2] and Kept(paths, WHOSE).read((2, QuorumId(1, 2))) is not None)


def _has(path: Path, step: int) -> bool:
    return steps([path]) == [step]


def test_who_has_no_descriptors_left_keeps_nothing() -> None:
    keeping, (soft, hard) = Keeping(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        found = keeping.paths(3, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == "" and keeping.paths(3, 0)
    keeping.close()


def test_the_memory_is_gone_with_whoever_gave_it() -> None:
    keeping = Keeping()
    one = keeping.paths(3, 0)
    assert keeping.paths(3, 0) == one != keeping.paths(3, 1)
    paths = [Path(each) for each in one.split(":")]
    write(Kept(paths, WHOSE), 5)
    other = [Path(each) for each in keeping.paths(4, 0).split(":")]
    write(Kept(other, WHOSE), 6)
    assert steps(paths) == [5]
    keeping.empty(3)  # its group was drained
    assert (steps(paths), steps(other)) == ([], [6]) and not any(each.stat().st_size for each in paths)
    assert keeping.paths(3, 0) == one
    write(Kept(paths, WHOSE), 7)
    assert steps(paths) == [7]
    keeping.close()
    assert not any(os.path.exists(each) for each in paths)
