"""Healing between real processes: striped over all sources, checked, and without effect on the sources."""

from __future__ import annotations

from typing import Any

import pytest
from exchange_rank import described, state


def raw(seed: int) -> list[bytes]:
    import torch

    return [t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"" for t in state(seed)]


@pytest.mark.parametrize(
    ("sources", "healers"), [((0,), (1,)), ((0, 1), (2,)), ((2, 0, 1), (3,)), ((1,), (0, 2)), ((3, 0), (1, 2))]
)
def test_healers_get_the_bits_of_the_sources(cluster: Any, sources: tuple[int, ...], healers: tuple[int, ...]) -> None:
    ranks = cluster.take(max(sources + healers) + 1)
    quorum_id = cluster.form(ranks)
    for i in sources:
        ranks[i].tell("serve_state", quorum_id=quorum_id, sources=sources, healers=healers, seed=11)
    for i in healers:
        ranks[i].tell("receive_state", quorum_id=quorum_id, sources=sources, healers=healers)
    for i in healers:
        assert ranks[i].answer() == (described(state(11)), raw(11))
    for i in sources:
        ranks[i].answer()
    cluster.everyone(ranks, "gather", quorum_id=quorum_id, payload=b"the communicator is as good as before")


def test_many_blocks(cluster: Any) -> None:
    ranks = cluster.some(3)
    quorum_id = cluster.form(ranks)
    sources = (0, 2)[: len(ranks) - 1]
    roles = {"quorum_id": quorum_id, "sources": sources, "healers": (1,), "seed": 5, "scale": 700}  # 110 MB
    ranks[1].tell("receive_and_compare", **roles)
    for i in sources:
        ranks[i].tell("serve_state", **roles)
    assert [rank.answer() for rank in ranks] == [None, True, None][: len(ranks)]


def test_a_source_is_killed_during_healing(cluster: Any) -> None:
    ranks = cluster.take(3)
    quorum_id = cluster.form(ranks)
    roles = {"quorum_id": quorum_id, "sources": (0, 2), "healers": (1,)}
    ranks[1].tell("receive_state", **roles)
    ranks[0].tell("serve_state", seed=5, **roles)
    ranks[2].kill()
    assert f"receiving a state with rank 2, {ranks[2].member}, failed" in ranks[1].failure()
    ranks[0].outcome()  # it may have sent everything before
    cluster.everyone(ranks[:2], "drop", quorum_id=quorum_id)
    newer = cluster.form(ranks[:2])
    roles = {"quorum_id": newer, "sources": (0,), "healers": (1,)}
    ranks[1].tell("receive_state", **roles)
    ranks[0].tell("serve_state", seed=5, **roles)
    assert ranks[1].answer()[1] == raw(5)
    ranks[0].answer()


def test_news_ends_the_wait_for_a_source_that_does_not_come(cluster: Any) -> None:
    ranks = cluster.take(2)
    quorum_id = cluster.form(ranks)
    ranks[1].tell("receive_state", quorum_id=quorum_id, sources=(0,), healers=(1,))
    ranks[1].news()
    assert "Interrupted: receiving a state" in ranks[1].failure()
    ranks[1].do("forget_news")
    ranks[1].do("drop", quorum_id=quorum_id)
    assert ranks[1].do("join_lives") == []


def test_sources_that_do_not_agree_are_named(cluster: Any) -> None:
    ranks = cluster.take(3)
    quorum_id = cluster.form(ranks)
    roles = {"quorum_id": quorum_id, "sources": (0, 1), "healers": (2,), "seed": 5}
    ranks[0].tell("serve_state", **roles)
    ranks[1].tell("serve_state", manifest=b"another", **roles)
    ranks[2].tell("receive_state", quorum_id=quorum_id, sources=(0, 1), healers=(2,))
    assert "ranks [1] serve another state than rank 0" in ranks[2].failure()
    for rank in ranks[:2]:
        rank.outcome()


def test_corrupted_bytes_are_noticed_and_their_source_named(cluster: Any) -> None:
    ranks = cluster.some(3)
    *sources, healer = ranks
    quorum_id = cluster.form(ranks)
    roles = {"quorum_id": quorum_id, "sources": tuple(range(len(sources))), "healers": (len(sources),)}
    for rank in sources:
        rank.tell("serve_state", seed=5, corrupt=rank is sources[-1], **roles)
    healer.tell("receive_state", **roles)
    failure = healer.failure()
    assert f"with rank {len(sources) - 1}, {sources[-1].member}, failed" in failure
    assert "does not match its checksum" in failure
    for rank in sources:
        rank.outcome()


def test_exchanges_go_on_while_a_source_serves(cluster: Any) -> None:
    ranks = cluster.take(2)
    quorum_id = cluster.form(ranks)
    ranks[0].tell("serve_then_gather", quorum_id=quorum_id, sources=(0,), healers=(1,), seed=5)
    ranks[1].do("gather", quorum_id=quorum_id, payload=b"before it receives")
    ranks[1].tell("receive_state", quorum_id=quorum_id, sources=(0,), healers=(1,))
    assert ranks[1].answer()[1] == raw(5)
    assert ranks[0].answer() == [b"", b"before it receives"]


@pytest.mark.parametrize(
    ("sources", "healers", "what"),
    [
        ((0, 1), (1,), "not distinct members"),
        ((0,), (5,), "not distinct members"),
        ((1,), (2,), "rank 0 is not among"),
    ],
)
def test_roles_that_make_no_sense(cluster: Any, sources: Any, healers: Any, what: str) -> None:
    ranks = cluster.take(3)
    quorum_id = cluster.form(ranks)
    ranks[0].tell("serve_state", quorum_id=quorum_id, sources=sources, healers=healers, seed=1)
    assert what in ranks[0].failure()


@pytest.mark.gpu
@pytest.mark.parametrize("poor", [(0,), (1,), (0, 1)])
def test_a_device_without_room_takes_the_memory_of_the_host(cluster: Any, poor: tuple[int, ...]) -> None:
    if cluster.kind == "cpu":
        pytest.skip("needs GPUs")
    ranks = [cluster.start(group) for group in range(2)]  # what is done to their memory lasts
    for rank in ranks:
        rank.ready()
    quorum_id = cluster.form(ranks)
    for i, rank in enumerate(ranks):
        rank.do("leave_little_room", block_bytes=4 << 20, megabytes=(400, 100)[i] if i in poor else 3000)
    roles = {"quorum_id": quorum_id, "sources": (0,), "healers": (1,), "seed": 5, "scale": 2000}  # 312 MB
    ranks[0].tell("serve_state", **roles)
    ranks[1].tell("where_healed_state_lies", **roles)
    assert ranks[1].answer() == ({"cpu"} if 1 in poor else {"cpu", "cuda"})
    ranks[0].answer()
    for rank in ranks:
        rank.kill()
