"""The lighthouse's memory: epochs only rise, lineages are kept whole, damage is named."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from planaria.core.messages import Member, QuorumId
from planaria.core.roster import LineageRecord, lineage_after
from planaria.errors import ProtocolError, UsageError
from planaria.lighthouse.store import KEPT, Store


def chain(job: str, epoch: int, count: int, lineage: str = "", start: int = 1) -> list[LineageRecord]:
    """``count`` quorums, each following the one before."""
    records = []
    for number in range(start, start + count):
        members = tuple(Member(group, number % 3) for group in range(1 + number % 4))
        lineage = lineage_after(lineage, QuorumId(epoch, number), members)
        records.append(LineageRecord(job, epoch, number, members, lineage, 10 * number))
    return records


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "lighthouse.db"


def reopened(path: Path, epoch_floor: int = 0) -> Store:
    return Store.open(path, epoch_floor)


def test_every_life_has_a_higher_epoch(path: Path) -> None:
    epochs = []
    for _ in range(4):
        store = Store.open(path)
        epochs.append(store.epoch)
        store.close()
    assert epochs == [1, 2, 3, 4]


def test_the_epoch_can_rise_within_a_life_and_above_a_floor(path: Path) -> None:
    store = Store.open(path, epoch_floor=41)
    assert store.epoch == 42
    assert store.bump_epoch() == 43 == store.epoch
    store.close()
    assert Store.open(path, epoch_floor=7).epoch == 44


def test_the_lineage_comes_back_as_it_was(path: Path) -> None:
    store = Store.open(path)
    ours, others = chain("a", 1, 5), chain("b", 1, 3)
    for record in [*ours, *others]:
        store.append(record)
    store.close()
    store = reopened(path)
    assert store.lineage("a") == ours and store.lineage("b") == others
    assert store.last("a") == ours[-1] and store.last("nobody") is None
    assert store.jobs() == ["a", "b"]
    assert store.lineage("a", 2) == ours[-2:]


def test_the_next_life_continues_the_lineage(path: Path) -> None:
    store = Store.open(path)
    first = chain("a", 1, 2)
    for record in first:
        store.append(record)
    store.close()
    store = reopened(path)
    second = chain("a", 2, 2, first[-1].lineage)
    for record in second:
        store.append(record)
    store.close()
    assert reopened(path).lineage("a") == first + second


def test_a_new_run_of_the_same_job_begins_a_new_lineage(path: Path) -> None:
    store = Store.open(path)
    records = [*chain("a", 1, 2), *chain("a", 2, 2)]
    for record in records:
        store.append(record)
    store.close()
    assert reopened(path).lineage("a") == records


def test_a_record_that_does_not_follow_is_refused(path: Path) -> None:
    store = Store.open(path)
    first, second = chain("a", 1, 2)
    with pytest.raises(ProtocolError, match=r"job a: quorum 1\.2 does not continue"):
        store.append(second)
    store.append(first)
    store.append(second)
    for stale in (first, second):
        with pytest.raises(ProtocolError, match="does not continue"):
            store.append(stale)
    assert store.lineage("a") == [first, second]


def test_old_quorums_are_forgotten_and_the_rest_can_still_be_verified(path: Path) -> None:
    store = Store.open(path)
    records = chain("a", 1, 2 * KEPT + 5)
    for record in [*records, *chain("b", 1, 2)]:
        store.append(record)
    store.close()
    store = reopened(path)
    kept = store.lineage("a", 10 * KEPT)
    assert kept == records[-len(kept) :]
    assert KEPT <= len(kept) < 2 * KEPT
    assert len(store.lineage("b")) == 2


def test_a_second_lighthouse_is_turned_away(path: Path) -> None:
    store = Store.open(path)
    with pytest.raises(UsageError, match="another lighthouse is using the store"):
        Store.open(path)
    store.append(chain("a", 1, 1)[0])  # and the first one never noticed
    store.close()
    assert reopened(path).epoch == 2


def test_what_was_appended_survives_a_kill(path: Path) -> None:
    script = (
        "import sys\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from test_lighthouse_store import chain\n"
        "from planaria.lighthouse.store import Store\n"
        "store = Store.open(sys.argv[1])\n"
        "for record in chain('a', store.epoch, 50):\n"
        "    store.append(record); print(record.number, flush=True)\n"
        "sys.stdin.read()\n"
    )
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", script, str(path), here]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    while process.stdout.readline().strip() != "50":
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stdin.close()
    store = reopened(path)
    assert store.epoch == 2
    assert store.lineage("a") == chain("a", 1, 50)


# --- damage -------------------------------------------------------------------------------------------------


def filled(path: Path) -> list[LineageRecord]:
    store = Store.open(path)
    records = chain("a", 1, 40)
    for record in records:
        store.append(record)
    store.close()
    return records


def edit(path: Path, sql: str) -> None:
    database = sqlite3.connect(path)
    with database:
        database.execute(sql)
    database.close()


def test_garbage_is_named_with_what_to_do(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"this is not a database, whatever its name says" * 100)
    with pytest.raises(UsageError, match=r"lighthouse.db is damaged .*--epoch-floor"):
        Store.open(path)


@pytest.mark.parametrize("at", [100, 4096, 8192])
def test_overwritten_pages_are_noticed(path: Path, at: int) -> None:
    filled(path)
    raw = bytearray(path.read_bytes())
    raw[at : at + 900] = os.urandom(900)
    path.write_bytes(raw)
    with pytest.raises(UsageError, match=r"lighthouse\.db"):
        Store.open(path)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE quorums SET members = '[[7, 7]]' WHERE number = 20",
        "UPDATE quorums SET lineage = 'abc' WHERE number = 20",
        "UPDATE quorums SET members = 'nonsense' WHERE number = 20",
        "UPDATE quorums SET number = 99 WHERE number = 20",
        "DELETE FROM quorums WHERE number = 20",
    ],
)
def test_a_broken_chain_is_noticed(path: Path, sql: str) -> None:
    filled(path)
    edit(path, sql)
    with pytest.raises(UsageError, match="is damaged"):
        Store.open(path)


def test_the_advice_for_a_damaged_store_works(path: Path) -> None:
    filled(path)
    path.write_bytes(b"garbage" * 1000)
    with pytest.raises(UsageError):
        Store.open(path)
    path.rename(path.with_suffix(".damaged"))
    assert Store.open(path, epoch_floor=1000).epoch == 1001


def test_another_programs_database_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    edit(path, "CREATE TABLE theirs (x)")
    before = path.read_bytes()
    with pytest.raises(UsageError, match="another program"):
        Store.open(path)
    assert path.read_bytes() == before


def test_a_store_of_another_version_is_named(path: Path) -> None:
    filled(path)
    edit(path, "PRAGMA user_version = 9")
    with pytest.raises(UsageError, match="has version 9, this release needs 2"):
        Store.open(path)


def test_a_path_that_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot open the lighthouse store"):
        Store.open(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot make the directory"):
        Store.open(tmp_path / "file" / "lighthouse.db")


def test_the_largest_epoch_is_the_last(path: Path) -> None:
    assert Store.open(path, epoch_floor=2**32 - 2).epoch == 2**32 - 1
    with pytest.raises(UsageError, match="would take epoch 4294967296"):
        Store.open(path.with_name("other.db"), epoch_floor=2**32 - 1)


def test_a_full_disk_is_told_as_one(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounts a small disk")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(tmp_path)]).returncode:
        pytest.skip("cannot mount")
    try:
        Store.open(tmp_path / "lighthouse.db").close()
        with (tmp_path / "rest").open("wb", buffering=0) as rest, pytest.raises(OSError, match="No space left"):
            while True:
                rest.write(bytes(4096))
        with pytest.raises(UsageError, match=r"lighthouse store .*: database or disk is full"):
            Store.open(tmp_path / "lighthouse.db")
        (tmp_path / "rest").unlink()
        store = Store.open(tmp_path / "lighthouse.db")
        assert store.epoch == 2
        store.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
