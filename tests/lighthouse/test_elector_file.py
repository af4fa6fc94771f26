"""The elector that is only a directory: whoever stands still, dies or comes late must not be in anybody's way."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_electors import lead, quorum

from planaria.core.leadership import Granted, Held, Lost
from planaria.core.messages import QuorumId
from planaria.lighthouse.elector import Deposed, Elector, StoreAway, open_elector

# Leads, and changes the store all the time; what was taken goes to stdout.
BUSY = """
import sys
from test_electors import lead, quorum
from planaria.lighthouse.elector import open_elector
elector = open_elector(sys.argv[1], 2.0, None)
epoch = lead(elector)
number, lineage = 0, ""
while True:
    number += 1
    record = quorum("job", epoch, number, lineage)
    elector.append(record)
    elector.renew()
    lineage = record.lineage
    print(number, flush=True)
"""

# Takes the lead from whoever has it, again and again, and adds to the lineage; every step that was taken is told.
GREEDY = """
import sys
from test_electors import quorum
from planaria.core.leadership import Granted, Held
from planaria.lighthouse.elector import Deposed, StoreAway, open_elector
elector, most = open_elector(sys.argv[1], 2.0, None), int(sys.argv[2])
taken, over = 0, ""
while taken < most:
    try:
        answer = elector.acquire("x:1", 0, over)
        over = answer.stamp if isinstance(answer, Held) else ""
        if not isinstance(answer, Granted):
            continue
        print("epoch", answer.epoch, flush=True)
        for number in range(1, 4):
            last = elector.last("job")
            record = quorum("job", answer.epoch, number, last.lineage if last else "")
            elector.append(record)
            taken += 1
            print("step", last.lineage if last else "", record.lineage, flush=True)
    except (Deposed, StoreAway):  # away: what was being read has been cleared away
        pass
"""


@pytest.fixture
def where(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'leader'}"


def candidate(where: str) -> Elector:
    return open_elector(where, 2.0, None)


def usurped(elector: Elector) -> int:
    """Lead as if the lease of whoever leads had lapsed."""
    answer = elector.acquire("y:2", 0, "")
    while isinstance(answer, Held):
        answer = elector.acquire("y:2", 0, answer.stamp)
    return answer.epoch


@contextmanager
def started(code: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True, env=env)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_leader_that_is_stopped_in_the_midst_of_a_write_is_in_nobodys_way(where: str) -> None:
    """With a lock in a file (SQLite's) every third of these stops kept all others from leading until it woke."""
    rng = random.Random(0)
    for _ in range(6):
        with started(BUSY, where) as busy:
            assert busy.stdout is not None and busy.stdout.readline()
            for _ in range(rng.randrange(40)):
                busy.stdout.readline()
            busy.send_signal(signal.SIGSTOP)
            other = candidate(where)
            epoch = usurped(other)
            newest = other.last("job")
            assert newest is not None and newest.epoch < epoch
            busy.send_signal(signal.SIGCONT)
            done, _ = busy.communicate(timeout=60)  # Deposed, and said so
            told = [int(line) for line in done.split()]
            assert busy.returncode != 0 and (not told or told[-1] <= newest.number), (
                "it had been told of no other leader"
            )
            assert other.last("job") == newest
            other.release()


def test_whoever_takes_the_lead_at_whatever_moment_the_lineage_never_forks(where: str) -> None:
    with started(GREEDY, where, "60") as a, started(GREEDY, where, "60") as b, started(GREEDY, where, "60") as c:
        told = [line.split(" ") for each in (a, b, c) for line in each.communicate(timeout=120)[0].splitlines()]
        assert [each.returncode for each in (a, b, c)] == [0, 0, 0]
    epochs = [int(line[1]) for line in told if line[0] == "epoch"]
    assert len(epochs) == len(set(epochs)), "an epoch of two leaders"
    before = [line[1] for line in told if line[0] == "step"]
    assert len(before) >= 180 and len(before) == len(set(before)), "two quorums that follow the same one"


def test_one_that_slept_while_its_number_was_cleared_away_adds_nothing(where: str, tmp_path: Path) -> None:
    a, b = candidate(where), candidate(where)
    first = lead(a)
    usurped(b)
    lineage = ""
    for number in range(1, 100):
        b.append(record := quorum("job", b.epoch, number, lineage))
        lineage = record.lineage
    assert len(list((tmp_path / "leader").glob("0*"))) < 20
    for _ in range(2):
        with pytest.raises(Deposed):
            a.append(quorum("job", first, 1))
        with pytest.raises(Deposed):
            a.last("job")
        assert isinstance(a.renew(), Lost)
    assert b.last("job") == record
    a.close(), b.close()
    assert len(list((tmp_path / "leader").iterdir())) < 25, "nothing stays of those that led once"


def test_a_directory_that_went_back_in_time_or_away_leads_nobody(where: str, tmp_path: Path) -> None:
    a = candidate(where)
    lead(a)
    shutil.copytree(tmp_path / "leader", tmp_path / "old")
    a.bump_epoch()
    shutil.rmtree(tmp_path / "leader")
    with pytest.raises(StoreAway, match="cannot be used"):
        a.renew()
    shutil.copytree(tmp_path / "old", tmp_path / "leader")
    with pytest.raises(StoreAway, match="replaced"):
        a.append(quorum("job", 1, 1))


def test_a_state_that_cannot_be_read_is_not_taken_for_none(where: str, tmp_path: Path) -> None:
    a = candidate(where)
    lead(a)
    newest = max((tmp_path / "leader").glob("0*"))
    for content in ("", "{}", "[]", '{"jobs": 3}', "\x00" * 40):
        newest.write_text(content)
        with pytest.raises(StoreAway, match="unreadable"):
            candidate(where).acquire("x:1", 0, "")


def test_a_disk_that_is_full_costs_the_lead_and_nothing_else(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = candidate(where)
    lead(a)
    a.append(one := quorum("job", a.epoch, 1))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StoreAway, match="No space left"):
            a.append(quorum("job", a.epoch, 2, one.lineage))
    assert not list((tmp_path / "leader").glob("draft-*"))
    assert lead(a) > one.epoch
    assert a.last("job") == one


def test_a_state_with_a_second_name_is_neither_another_s_nor_written_to(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a backup that makes links, or because the name under which it was made could not be removed."""
    a, b = candidate(where), candidate(where)
    lead(a)
    a.append(one := quorum("job", a.epoch, 1))
    link, backup = os.link, tmp_path / "backup"
    backup.mkdir()

    def just_then(draft: Path, state: Path) -> None:
        if "b-is-faster" not in done:
            done.append("b-is-faster")
            link(draft, backup / "draft")
            shutil.copy(max((tmp_path / "leader").glob("0*")), state)
        link(draft, state)

    done: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(os, "link", just_then)
        with pytest.raises(Deposed):
            a.append(quorum("job", a.epoch, 2, one.lineage))
    usurped(b)
    assert b.last("job") == one
    unlink = Path.unlink

    def stays(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith("draft-") and path.exists() and not done.count("stays"):
            done.append("stays")
            raise OSError(5, "Input/output error")
        unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", stays)
        b.append(two := quorum("job", b.epoch, 2, one.lineage))
    state = max((tmp_path / "leader").glob("0*"))
    content = state.read_bytes()
    b.append(quorum("job", b.epoch, 3, two.lineage))
    assert state.read_bytes() == content and done.count("stays") == 1


def test_a_former_leader_that_cannot_write_any_more_lets_its_lease_lapse(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full for it alone (a quota), but its beat needs no room."""
    a, b = candidate(where), candidate(where)
    lead(a)
    a.renew()
    stamp = b.acquire("y:2", 0, "").stamp  # type: ignore[union-attr]

    def full(_: int) -> None:
        raise OSError(122, "Disk quota exceeded")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        for _ in range(3):
            with pytest.raises(StoreAway, match="quota"):
                a.acquire("x:1", 0, "")
    assert isinstance(b.acquire("y:2", 0, stamp), Granted)


def test_a_directory_in_another_s_place_is_seen_although_the_numbers_fit(where: str, tmp_path: Path) -> None:
    a = candidate(where)
    lead(a)
    a.release()
    shutil.copytree(tmp_path / "leader", tmp_path / "old")
    lead(a)
    shutil.move(tmp_path / "leader", tmp_path / "away")
    shutil.move(tmp_path / "old", tmp_path / "leader")
    lead(b := candidate(where))
    assert b.epoch == a.epoch
    assert isinstance(a.renew(), Lost)
    with pytest.raises(Deposed):
        a.append(quorum("job", a.epoch, 1))
    b.append(quorum("job", b.epoch, 1))


def test_a_disk_that_is_full_when_a_lighthouse_starts_is_waited_for(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", full)
        a = candidate(where)
        with pytest.raises(StoreAway, match="No space left"):
            a.acquire("x:1", 0, "")
    assert lead(a) == 1


def test_nothing_is_left_but_states(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link
    for _ in range(3):
        a, b = candidate(where), candidate(where)

        def b_is_faster(draft: Path, state: Path) -> None:
            monkeypatch.setattr(os, "link", link)
            usurped(b)  # noqa: B023
            link(draft, state)

        monkeypatch.setattr(os, "link", b_is_faster)
        assert isinstance(a.acquire("x:1", 0, ""), Held)
        b.renew()
        b.release()
        for each in (a, b):
            each.close()
    assert all(name.isdecimal() for name in os.listdir(tmp_path / "leader"))


def test_jobs_that_ended_long_ago_are_forgotten_and_no_other(where: str, tmp_path: Path) -> None:
    a = candidate(where)
    lead(a)
    first = max((tmp_path / "leader").glob("0*"))
    state = json.loads(first.read_text())

    def kept(job: str, members: list[list[int]], run: list[int]) -> None:
        record = {"epoch": 1, "number": 2, "members": members, "lineage": "x", "step": 3, "run": run}
        state["jobs"][job] = json.dumps(record)

    kept("runs", [[0, 0]], [1, 1])
    kept("begins again", [], [1, 2])
    for number in range(400):
        kept(f"ended {number}", [], [1, 1])
    first.write_text(json.dumps(state))
    b = candidate(where)
    usurped(b)
    b.append(quorum("new", b.epoch, 1))
    assert b.last("runs") is not None and b.last("begins again") is not None and b.last("new") is not None
    assert b.last("ended 0") is None and b.last("ended 399") is not None
    assert b.last("begins again").run == QuorumId(1, 2)  # type: ignore[union-attr]


def test_granted_is_told_once_for_each_epoch(where: str) -> None:
    a, b = candidate(where), candidate(where)
    answers = [a.acquire("x:1", 0, ""), b.acquire("y:2", 0, "")]
    assert isinstance(answers[0], Granted) and isinstance(answers[1], Held)
    assert answers[1].address == "x:1" and answers[1].seconds == 2.0
