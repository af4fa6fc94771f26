"""The progress page: what a rank writes is what the agent reads, at any moment and after any death."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_strategies import patient

from planaria.core.messages import NO_QUORUM, Link, Phase, QuorumId
from planaria.errors import ProtocolError
from planaria.wire.page import KEPT, LINKS, PAGE_BYTES, ProgressPage


def commit(page: ProgressPage, step: int, at_ns: int = 0, loss: float = 0.5) -> None:
    page.committed(step, QuorumId(1, 2), loss, at_ns, 3, 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "progress"


def test_a_new_page_shows_a_rank_that_starts(path: Path) -> None:
    ProgressPage.create(path)
    view = ProgressPage.open(path).read()
    assert (view.pid, view.phase, view.shard) == (os.getpid(), Phase.STARTING, -1)
    assert (view.step, view.quorum, view.committed_at_ns, view.step_seconds) == (0, NO_QUORUM, 0, 0.0)
    assert math.isnan(view.loss)


def test_the_reader_sees_each_write_at_once(path: Path) -> None:
    page, reader = ProgressPage.create(path, pid=77), ProgressPage.open(path)
    before = reader.read()
    page.set_phase(Phase.COMPUTING, shard=5)
    view = reader.read()
    assert (view.pid, view.phase, view.shard) == (77, Phase.COMPUTING, 5)
    assert view.beat > before.beat and view.phase_since_ns >= before.phase_since_ns
    page.quorum = QuorumId(2**32 - 1, 9)
    assert reader.quorum == page.quorum == reader.read().quorum == QuorumId(2**32 - 1, 9)
    assert (view.shard_seconds, view.slowness) == (0.0, 0.0)
    page.speed(0.125, 1.5)
    page.committed(11, QuorumId(3, 4), 0.25, 1_000, 6, 2)
    view = reader.read()
    assert (view.shard_seconds, view.slowness) == (0.125, 1.5)
    assert (view.step, view.quorum, view.loss, view.committed_at_ns) == (11, QuorumId(3, 4), 0.25, 1_000)
    assert (view.shards_computed, view.shards_recomputed) == (6, 2)


def test_the_two_threads_beat_apart(path: Path) -> None:
    page, reader = ProgressPage.create(path), ProgressPage.open(path)
    first = reader.read()
    page.control_beat()
    second = reader.read()
    assert second.control_beat != first.control_beat and second.beat == first.beat
    page.beat()
    assert reader.read().beat != second.beat


def test_every_kind_of_progress_is_a_sign_of_life(path: Path) -> None:
    page, reader = ProgressPage.create(path), ProgressPage.open(path)
    acts: list[Callable[[], None]] = [
        lambda: page.set_phase(Phase.PARKED),
        lambda: commit(page, 1),
        lambda: page.resumed(7),
    ]
    for act in acts:
        before = reader.read().beat
        act()
        assert reader.read().beat != before


def test_a_healed_rank_shows_the_step_that_it_was_given(path: Path) -> None:
    page, reader = ProgressPage.create(path), ProgressPage.open(path)
    page.resumed(40)
    assert reader.read().step == 40
    commit(page, 41)
    assert reader.read().step == 41
    page.resumed(20)  # it went back
    assert reader.read().step == 20
    commit(page, 21)
    assert reader.read().step == 21


def test_the_slowest_links_are_shown_and_the_ring_is_left_alone(path: Path) -> None:
    page, reader = ProgressPage.create(path), ProgressPage.open(path)
    commit(page, 1, at_ns=10)
    assert reader.read().links == ()
    links = [Link(group, 1e9 - group, 0.001 * group, 0.25) for group in range(LINKS + 5)]
    page.links(links)
    assert reader.read().links == tuple(links[5:])
    page.links(links[:2])
    assert reader.read().links == tuple(links[:2])
    assert reader.commits() == [(1, 10)]


@patient
@given(count=st.integers(0, 3 * KEPT))
def test_the_ring_keeps_the_last_commits(tmp_path_factory: pytest.TempPathFactory, count: int) -> None:
    path = tmp_path_factory.mktemp("page") / "progress"
    page, reader = ProgressPage.create(path), ProgressPage.open(path)
    for step in range(1, count + 1):
        commit(page, step, at_ns=step * 10)
    assert reader.commits() == [(step, step * 10) for step in range(max(1, count - KEPT + 1), count + 1)]


def test_step_seconds_is_the_median_and_forgets_gaps(path: Path) -> None:
    """A recovery is one outlier; a step that was skipped by healing is no step time at all."""
    page, reader = ProgressPage.create(path), ProgressPage.open(path)
    at = 0
    for step in range(1, 12):
        at += 50_000_000 if step != 6 else 9_000_000_000
        commit(page, step, at)
    assert reader.read().step_seconds == pytest.approx(0.05)
    commit(page, 100, at + 10**12)
    assert reader.read().step_seconds == pytest.approx(0.05)


@pytest.mark.parametrize("content", [b"", b"x" * 100, bytes(PAGE_BYTES), b"PLANPAGE" + bytes(PAGE_BYTES - 8)])
def test_a_wrong_file_is_a_protocol_error(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ProtocolError, match="not a progress page"):
        ProgressPage.open(path)


def test_a_senseless_phase_is_a_protocol_error(path: Path) -> None:
    ProgressPage.create(path)
    with path.open("r+b") as file:
        file.seek(3 * 8)
        file.write(b"\xee")
    with pytest.raises(ProtocolError, match="238 is not a valid Phase"):
        ProgressPage.open(path).read()


def test_a_page_that_is_not_there_yet_is_not_an_error_of_protocol(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ProgressPage.open(path)


def test_the_reader_cannot_write_and_close_releases_the_file(path: Path) -> None:
    ProgressPage.create(path).close()
    reader = ProgressPage.open(path)
    with pytest.raises(TypeError):
        reader.beat()
    reader.close()
    with pytest.raises(ValueError):
        reader.read()


def test_reading_while_another_process_writes_and_after_it_was_killed(path: Path) -> None:
    """The writer commits as fast as it can and is SIGKILLed at a random moment: every commit ever seen is
    whole."""
    script = (
        "import sys\n"
        "from planaria.core.messages import Phase, QuorumId\n"
        "from planaria.wire.page import ProgressPage\n"
        "page = ProgressPage.create(sys.argv[1]); step = 0\n"
        "print('up', flush=True)\n"
        "while True:\n"
        "    step += 1\n"
        "    page.set_phase(Phase.COMPUTING, step % 100)\n"
        "    page.committed(step, QuorumId(step, step), float(step), step * 7, step, step)\n"
    )

    def check(reader: ProgressPage) -> int:
        history = reader.history()
        for one in history:
            assert (one.at_ns, one.loss) == (one.step * 7, float(one.step))
            assert one.shards_computed == one.shards_recomputed == one.step
        steps = [one.step for one in history]
        assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else True
        quorum = reader.quorum
        assert quorum.epoch == quorum.number
        return steps[-1] if steps else 0

    last, looks = 0, 0
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
            reader = ProgressPage.open(path)
            while last < 3 * KEPT or looks < 100:
                newest = check(reader)
                assert newest >= last
                last, looks = newest, looks + 1
        finally:
            process.send_signal(signal.SIGKILL)
    final = check(reader)
    assert final >= last > 0
    assert len(reader.commits()) == KEPT
    assert reader.read().step == final and reader.read().pid == process.pid
