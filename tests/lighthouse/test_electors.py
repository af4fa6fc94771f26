"""What every elector promises, against the real stores."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import elector_stores as stores
import pytest
from elector_stores import LEASE, LONG, Store

from planaria.core.leadership import Granted, Held, Lost, Renewed
from planaria.core.messages import Member, QuorumId
from planaria.core.roster import LineageRecord, lineage_after
from planaria.errors import UsageError
from planaria.lighthouse.elector import Deposed, Elector, StoreAway, open_elector
from planaria.wire.checks import MAX_NUMBER
from tests.ports import free_ports

KINDS = ("file", "etcd", "etcd with TLS", "Lease", "Lease, stand-in")


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    match request.param:
        case "file":
            made = stores.file_store(tmp_path)
        case "etcd":
            made = stores.etcd_store(tmp_path)
        case "etcd with TLS":
            made = stores.etcd_tls_store(tmp_path)
        case "Lease":
            made = stores.kubernetes_store(tmp_path, monkeypatch)
        case _:
            made = stores.stand_in_store(tmp_path, monkeypatch)
    yield made
    made.close()


def quorum(job: str, epoch: int, number: int, previous: str = "") -> LineageRecord:
    members = (Member(0, 0), Member(1, 3))
    lineage = lineage_after(previous, QuorumId(epoch, number), members)
    return LineageRecord(job, epoch, number, members, lineage, 5, QuorumId(epoch, 1))


def held(answer: object) -> Held:
    assert isinstance(answer, Held)
    return answer


def lead(elector: Elector, floor: int = 0) -> int:
    answer = elector.acquire("x:1", floor, "")
    assert isinstance(answer, Granted), answer
    assert answer.epoch == elector.epoch
    return answer.epoch


def test_one_leads_and_its_epoch_is_above_all_before(store: Store) -> None:
    a, b = store.candidate(LONG), store.candidate(LONG)
    first = lead(a)
    assert held(b.acquire("y:2", 0, "")).address == "x:1"
    assert a.renew() == Renewed()
    bumped = a.bump_epoch()
    a.release()
    second = lead(b)
    assert first < bumped < second
    assert lead(b, floor=second + 10) > second + 10, "the one that leads may take a newer epoch"
    assert isinstance(a.renew(), Lost) and isinstance(a.acquire("x:1", 0, ""), Held)


def test_the_next_leader_knows_the_newest_quorum_and_the_former_adds_none(store: Store) -> None:
    a, b = store.candidate(LONG), store.candidate(LONG)
    lead(a)
    for job in ("job", "another/job: é"):
        assert a.last(job) is None
        one = quorum(job, a.epoch, 1)
        two = quorum(job, a.epoch, 2, one.lineage)
        a.append(one)
        a.append(two)
        assert a.last(job) == two
    a.release()
    lead(b)
    assert b.last("job") == quorum("job", a.epoch, 2, quorum("job", a.epoch, 1).lineage)
    assert b.last("another/job: é") is not None
    three = quorum("job", a.epoch, 3, b.last("job").lineage)  # type: ignore[union-attr]
    with pytest.raises(Deposed):
        a.append(three)
    with pytest.raises(Deposed):
        a.bump_epoch()
    assert b.last("job") != three


def test_no_epoch_is_taken_that_nobody_could_be_told(store: Store) -> None:
    a = store.candidate(LONG)
    with pytest.raises(StoreAway, match="epoch 4294967296, above"):
        a.acquire("x:1", MAX_NUMBER, "")
    assert lead(a, MAX_NUMBER - 1) == MAX_NUMBER
    with pytest.raises(StoreAway, match="above"):
        a.bump_epoch()
    assert a.epoch == MAX_NUMBER and a.renew() == Renewed()


def test_a_lease_that_is_not_renewed_lapses_and_one_that_is_does_not(store: Store) -> None:
    """Without a release: the leader was killed. The candidates here are as patient as ``core.leadership`` is."""
    seconds = LEASE if store.where.startswith("etcd:") else LONG  # which waits for its end itself
    a, b = store.candidate(seconds), store.candidate(seconds)
    first = lead(a)
    stamp = held(b.acquire("y:2", 0, "")).stamp
    assert a.renew() == Renewed()
    if stamp:  # whose stamp it is must not have changed
        newer = held(b.acquire("y:2", 0, stamp)).stamp
        assert newer != stamp
        assert isinstance(b.acquire("y:2", 0, newer), Granted)
    else:  # etcd ends it
        end = time.monotonic() + stores.PATIENCE
        while isinstance(b.acquire("y:2", 0, ""), Held):
            assert time.monotonic() < end
            time.sleep(0.1)
    assert b.epoch > first
    assert isinstance(a.renew(), Lost)
    with pytest.raises(Deposed):
        a.append(quorum("job", first, 1))


def test_a_store_that_does_not_answer_is_said_to_be_away(tmp_path: Path) -> None:
    store = stores.etcd_store(tmp_path)
    try:
        a = store.candidate()
        lead(a)
        assert store.process is not None
        store.process.signal(signal.SIGSTOP)
        with pytest.raises(StoreAway, match="does not answer"):
            a.renew()
        store.process.signal(signal.SIGCONT)
        store.process.until(lambda: isinstance(a.renew(), (Renewed, Lost)))
        store.process.signal(signal.SIGKILL)
        with pytest.raises(StoreAway, match="refused"):
            a.renew()
        store.process.start()
        store.process.until(lambda: a.acquire("x:1", 0, ""))
        assert lead(a) > 1, "what was kept is still there"
    finally:
        store.close()


def test_a_second_address_of_etcd_is_asked_if_the_first_is_away(tmp_path: Path) -> None:
    store = stores.etcd_store(tmp_path)
    try:
        (port,) = free_ports(1)
        url = store.where.removeprefix("etcd:")
        elector = open_elector(f"etcd:http://127.0.0.1:{port},{url}", LONG, None)
        assert lead(elector) and elector.renew() == Renewed()
        elector.close()
    finally:
        store.close()


@pytest.mark.parametrize(
    ("where", "seconds", "said"),
    [
        ("zookeeper:x", 5.0, "give file:DIRECTORY"),
        ("file:", 5.0, "give file:DIRECTORY"),
        ("etcd:localhost", 5.0, "is not of the form"),
        ("etcd:http://a:99999", 5.0, "is not of the form"),
        ("kubernetes:lease", 5.0, "NAMESPACE/NAME"),
        ("kubernetes:a/b", 5.0, "KUBERNETES_SERVICE_HOST is not set"),
        ("file:x", 0.5, "at least 2 seconds"),
        ("file:x", float("nan"), "at least 2 seconds"),
        ("file:/proc/none/x", 5.0, "cannot be used"),
        ("file:/dev/null", 5.0, "a directory of its own"),
    ],
)
def test_bad_input(where: str, seconds: float, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=said):
        open_elector(where, seconds, None)
