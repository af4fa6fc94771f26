"""What happens to communicators when members die, stop, or are no longer wanted: real processes, real signals."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from exchange_rank import digest, expected

from planaria.core.messages import Member, Quorum, QuorumId
from planaria.core.tree import maximal_nodes
from planaria.errors import CommunicatorError
from planaria.exchange.communicator import MOST_GATHERED
from planaria.exchange.rendezvous import RendezvousStore, form_group
from planaria.exchange.sockets import Lines

NUMELS = (300, 7, 1, 0, 130, 1, 2000, 33)
SHARDS = 6


def exchange(ranks: list[Any], quorum_id: QuorumId, seed: int = 3, **more: Any) -> None:
    nodes = tuple(maximal_nodes(range(i, SHARDS, len(ranks)), SHARDS) for i in range(len(ranks)))
    for rank in ranks:
        rank.tell("exchange", quorum_id=quorum_id, numels=NUMELS, nodes=nodes, shards=SHARDS, seed=seed, **more)


def assert_they_go_on(cluster: Any, ranks: list[Any], seed: int = 3) -> QuorumId:
    """These ranks form a new quorum and get the right bits for the step."""
    quorum_id = cluster.form(ranks)
    exchange(ranks, quorum_id, seed)
    assert {rank.answer()["digest"] for rank in ranks} == {digest(expected(seed, SHARDS, NUMELS))}
    return quorum_id


@contextmanager
def stopped(rank: Any) -> Iterator[None]:
    rank.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        rank.signal(signal.SIGCONT)


def begin_without_the_last(ranks: list[Any], quorum_id: QuorumId) -> None:
    """All are in the middle of an exchange: the last member holds half of its buckets back, so nobody can finish."""
    nodes = tuple(maximal_nodes(range(i, SHARDS, len(ranks)), SHARDS) for i in range(len(ranks)))
    for rank in ranks:
        rank.tell(
            "exchange",
            quorum_id=quorum_id,
            numels=NUMELS,
            nodes=nodes,
            shards=SHARDS,
            seed=3,
            withhold=rank is ranks[-1],
        )
    for rank in ranks[:-1]:
        # Only then is it certain what ends the wait: before that, it could also be another who has left already.
        while not rank.waits_for(len(ranks) - 1):
            assert rank.alive


@pytest.mark.parametrize("members", [2, 3, 4])
def test_sigkill_in_mid_exchange(cluster: Any, members: int) -> None:
    ranks = cluster.take(members)
    quorum_id = cluster.form(ranks)
    begin_without_the_last(ranks, quorum_id)
    ranks[-1].kill()
    failures = [rank.failure() for rank in ranks[:-1]]
    assert all(f"failed in quorum {quorum_id}" in failure for failure in failures)
    # Whoever leaves first leaves because of it; others may wait for that one at this moment.
    assert any(f"with rank {members - 1}, {ranks[-1].member}, failed" in failure for failure in failures)
    cluster.everyone(ranks[:-1], "drop", quorum_id=quorum_id)
    assert_they_go_on(cluster, ranks[:-1])


def test_kill_after_kill(cluster: Any) -> None:
    for _ in range(3):
        ranks = cluster.some(3)
        quorum_id = cluster.form(ranks)
        begin_without_the_last(ranks, quorum_id)
        ranks[-1].kill()
        for rank in ranks[:-1]:
            rank.failure()
        cluster.everyone(ranks[:-1], "drop", quorum_id=quorum_id)
        assert_they_go_on(cluster, ranks[:-1])


def test_news_ends_the_wait_for_a_stopped_peer_which_then_wakes_harmlessly(cluster: Any) -> None:
    ranks = cluster.some(3)
    others, sleeper = ranks[:-1], ranks[-1]
    quorum_id = cluster.form(ranks)
    begin_without_the_last(ranks, quorum_id)
    with stopped(sleeper):
        for rank in others:
            rank.news()
        for rank in others:
            assert "Interrupted: exchanging gradients" in rank.failure()
        cluster.everyone(others, "forget_news")
        # The operations with the stopped peer are pending and have no time limit: were drop or the end of the life's
        # thread to wait for them, these two would not return.
        cluster.everyone(others, "drop", quorum_id=quorum_id)
        assert cluster.everyone(others, "join_lives") == [[] for _ in others]
        newer = assert_they_go_on(cluster, others)
    # Awake again it waits for news, as it did before; its old life has ended, and nobody minds.
    sleeper.news()
    assert "Interrupted" in sleeper.failure()
    sleeper.do("forget_news")
    cluster.everyone(ranks, "drop", quorum_id=quorum_id)
    cluster.everyone(others, "gather", quorum_id=newer, payload=b"still there")
    assert_they_go_on(cluster, ranks, seed=4)


def test_a_dropped_life_ends_those_of_the_peers(cluster: Any) -> None:
    ranks = cluster.some(3)
    quorum_id = cluster.form(ranks)
    begin_without_the_last(ranks, quorum_id)
    ranks[-1].news()
    assert "Interrupted" in ranks[-1].failure()
    ranks[-1].do("forget_news")
    ranks[-1].do("drop", quorum_id=quorum_id)
    for rank in ranks[:-1]:
        assert "failed in quorum" in rank.failure()
    cluster.everyone(ranks[:-1], "drop", quorum_id=quorum_id)
    assert_they_go_on(cluster, ranks)


def test_a_failure_of_a_life_is_told_by_every_later_call(cluster: Any) -> None:
    ranks = cluster.take(2)
    quorum_id = cluster.form(ranks)
    ranks[1].kill()
    for _ in range(2):
        ranks[0].tell("gather", quorum_id=quorum_id, payload=b"")
        assert f"gathering with rank 1, {ranks[1].member}, failed" in ranks[0].failure()
    ranks[0].do("drop", quorum_id=quorum_id)
    ranks[0].tell("gather", quorum_id=quorum_id, payload=b"")
    assert "is not formed" in ranks[0].failure()


def test_a_peer_does_not_choose_how_much_memory_is_taken(cluster: Any) -> None:
    ranks = cluster.take(2)
    quorum_id = cluster.form(ranks)
    ranks[0].tell("gather", quorum_id=quorum_id, payload=bytes(MOST_GATHERED + 1))
    ranks[1].tell("gather", quorum_id=quorum_id, payload=b"")
    assert f"it says that {MOST_GATHERED + 1} bytes follow" in ranks[1].failure()
    ranks[0].failure()
    cluster.everyone(ranks, "drop", quorum_id=quorum_id)


# --- formation ------------------------------------------------------------------------------------------------


def test_a_member_dies_during_formation(cluster: Any) -> None:
    ranks = cluster.some(3)
    others = ranks[:-1]
    quorum = cluster.quorum(ranks)
    cluster.everyone(others, "form", quorum=quorum)
    ranks[-1].kill()  # it never came, and nothing but news can tell
    newer = cluster.quorum(others)
    cluster.everyone(others, "form", quorum=newer)
    assert cluster.everyone(others, "formed", quorum_id=newer.id) == [None for _ in others]
    # The older formation is still waiting. Abandoning it ends its thread at once, not at its timeout.
    cluster.everyone(others, "drop", quorum_id=quorum.id)
    for error in cluster.everyone(others, "formed", quorum_id=quorum.id):
        assert f"the communicator of quorum {quorum.id} has ended" in error
    assert cluster.everyone(others, "join_lives", count=1) == [[f"planaria-exchange-{newer.id}"] for _ in others]
    gathered = cluster.everyone(others, "gather", quorum_id=newer.id, payload=b"x")
    assert gathered == [[b"x" for _ in others] for _ in others]


def test_the_host_of_the_store_dies_during_formation(cluster: Any) -> None:
    ranks = cluster.some(3)
    quorum = cluster.quorum(ranks)
    cluster.everyone(ranks[1:], "form", quorum=quorum)
    ranks[0].kill()
    for error in cluster.everyone(ranks[1:], "formed", quorum_id=quorum.id):
        assert f"quorum {quorum.id} was not formed" in error
    cluster.everyone(ranks[1:], "drop", quorum_id=quorum.id)
    assert_they_go_on(cluster, ranks[1:])


def test_the_host_of_the_store_is_dead_before_formation(cluster: Any) -> None:
    ranks = cluster.take(2)
    ranks[0].kill()
    quorum = cluster.quorum(ranks)
    ranks[1].do("form", quorum=quorum)
    error = ranks[1].do("formed", quorum_id=quorum.id)
    assert f"cannot reach the rendezvous store at {ranks[0].address}: Connection refused" in error


def test_the_host_of_the_store_is_stopped_before_formation(cluster: Any) -> None:
    ranks = cluster.some(3)
    quorum = cluster.quorum(ranks)
    with stopped(ranks[0]):
        cluster.everyone(ranks[1:], "form", quorum=quorum)
        cluster.everyone(ranks[1:], "drop", quorum_id=quorum.id)
        assert_they_go_on(cluster, ranks[1:])
    # The connections that nobody wants any more are accepted now, and closed.
    cluster.everyone(ranks[1:], "formed", quorum_id=quorum.id)
    assert_they_go_on(cluster, ranks)


def test_forming_again_and_again_leaves_nothing_behind(cluster: Any) -> None:
    ranks = cluster.some(3)
    quorums = [cluster.quorum(ranks) for _ in range(20)]
    for quorum in quorums:  # each takes the place of the last before that is formed
        cluster.everyone(ranks, "form", quorum=quorum)
        if quorum is not quorums[-1]:
            cluster.everyone(ranks, "drop", quorum_id=quorum.id)
    assert cluster.everyone(ranks, "formed", quorum_id=quorums[-1].id) == [None for _ in ranks]
    last = f"planaria-exchange-{quorums[-1].id}"
    assert all(set(left) <= {last} for left in cluster.everyone(ranks, "join_lives", count=1))


def test_what_broke_is_gone_without_a_collector(cluster: Any) -> None:
    """The error that a life ends with must not keep it: with it go connections, threads and buffers."""
    ranks = cluster.take(2)
    ranks[0].do("collects_garbage", does=False)
    for _ in range(3):
        ranks = cluster.take(2)
        ranks[0].do("until_no_transport")
        quorum_id = cluster.form(ranks)
        ranks[1].signal(signal.SIGSTOP)
        ranks[0].tell("gather", quorum_id=quorum_id, payload=b"")
        ranks[1].kill()
        assert f"quorum {quorum_id}" in ranks[0].failure()
        ranks[0].do("drop", quorum_id=quorum_id)
        assert ranks[0].do("join_lives") == []
        ranks[0].do("until_no_transport")
    ranks[0].do("collects_garbage", does=True)


def test_a_quorum_is_formed_once_and_only_by_its_members(cluster: Any) -> None:
    ranks = cluster.take(3)
    quorum = cluster.quorum(ranks[:2])
    ranks[2].tell("form", quorum=quorum)
    assert f"{ranks[2].member} is not a member of quorum {quorum.id}" in ranks[2].failure()
    for _ in range(2):
        cluster.everyone(ranks[:2], "form", quorum=quorum)
    assert cluster.everyone(ranks[:2], "formed", quorum_id=quorum.id) == [None, None]
    assert cluster.everyone(ranks[:2], "join_lives", count=1) == [[f"planaria-exchange-{quorum.id}"]] * 2


@pytest.mark.parametrize("members", [1, 2, 4])
def test_gather_takes_payloads_of_any_length(cluster: Any, members: int) -> None:
    ranks = cluster.take(members)
    quorum_id = cluster.form(ranks)
    payloads = [bytes([i]) * (i * 1000) for i in range(members)]
    for rank, payload in zip(ranks, payloads, strict=True):
        rank.tell("gather", quorum_id=quorum_id, payload=payload)
    assert [rank.answer() for rank in ranks] == [payloads] * members


def test_a_member_is_stopped_while_it_forms(cluster: Any) -> None:
    """It came, and then nothing more is heard of it: with devices, while NCCL is being formed."""
    ranks = cluster.some(3)
    others, sleeper = ranks[:-1], ranks[-1]
    for wait in (0.0, 0.01, 0.03, 0.1):
        quorum = cluster.quorum(ranks)
        cluster.everyone(ranks, "form", quorum=quorum)
        time.sleep(wait)  # anywhere in the formation, or after it
        with stopped(sleeper):
            cluster.everyone(others, "drop", quorum_id=quorum.id)
            newer = assert_they_go_on(cluster, others)
        sleeper.do("drop", quorum_id=quorum.id)
        cluster.everyone(others, "drop", quorum_id=newer)
        assert cluster.everyone(ranks, "join_lives") == [[] for _ in ranks]


def test_columns_of_a_quorum_do_not_meet(cluster: Any) -> None:
    """The ranks of a group form at the same time with the same store, each with its like of the other groups."""
    columns = [cluster.take(2)]
    if cluster.kind == "cpu":  # with devices one column more would need two more of them; the names are the same
        columns.append([cluster.beside(rank, column=1) for rank in columns[0]])
    quorum = cluster.quorum(columns[0])
    everyone = [rank for column in columns for rank in column]
    for rank in everyone:
        rank.ready()
        rank.tell("form", quorum=quorum)
    for rank in everyone:
        rank.answer()
    assert cluster.everyone(everyone, "formed", quorum_id=quorum.id) == [None for _ in everyone]
    for number, column in enumerate(columns):
        for rank in column:
            rank.tell("gather", quorum_id=quorum.id, payload=b"column %d" % number)
    for number, column in enumerate(columns):
        assert [rank.answer() for rank in column] == [[b"column %d" % number] * 2] * 2
    for rank in everyone[2:]:
        rank.kill()


def test_kinds_of_device_must_be_the_same_everywhere() -> None:
    store = RendezvousStore()
    members = (Member(0, 1), Member(1, 1))
    quorum = Quorum(QuorumId(1, 1), members, (store.address, ""), urgent=True, lineage="")

    def form(rank: int, kind: str) -> str:
        lines = Lines()
        try:
            form_group(quorum, rank, "127.0.0.1", timedelta(seconds=60), lines, kind=kind)
        except CommunicatorError as error:
            lines.cut()
            return str(error)
        return "formed"

    with ThreadPoolExecutor() as pool:
        told = [pool.submit(form, 0, "cuda"), pool.submit(form, 1, "cpu")]
        assert "its gradients are on 'cpu', those of group 0 (incarnation 1) on 'cuda'" in told[0].result()
        assert "its gradients are on 'cuda', those of group 1 (incarnation 1) on 'cpu'" in told[1].result()
