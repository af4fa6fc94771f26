"""What a rank has heard waits for its group's other ranks."""

from __future__ import annotations

from planaria.core.messages import NO_QUORUM, Member, Quorum, QuorumId
from planaria.rank.news import News
from planaria.rank.rounds import Note, agreed


def quorum(number: int, urgent: bool = False) -> Quorum:
    return Quorum(QuorumId(1, number), (Member(0, 0),), ("",), urgent, "", "why", False)


def nothing(_: QuorumId) -> bool:
    return False


def test_what_was_said_of_a_quorum_waits_until_all_ranks_have_heard_of_it() -> None:
    early, late = News(), News()
    for news in (early, late):
        news.formed(QuorumId(1, 2))  # a helper thread may be before the control thread
    assert early.hear(quorum(2))
    outcome = agreed([each.told(Note(), nothing) for each in (early, late)])
    assert outcome.heard == NO_QUORUM
    assert early.take(outcome) == late.take(outcome) == ([], [], [])
    late.hear(quorum(2))
    outcome = agreed([each.told(Note(), nothing) for each in (early, late)])
    assert early.take(outcome) == ([quorum(2)], [QuorumId(1, 2)], [])
    assert not early and late


def test_an_urgent_quorum_ends_what_goes_on_and_outdates_what_was_planned() -> None:
    news = News()
    assert news.hear(quorum(2))
    assert not news.ends(QuorumId(1, 1), joining=False)
    assert news.ends(QuorumId(1, 1), joining=True)
    assert news.hear(quorum(3, urgent=True)) and news.urgent == QuorumId(1, 3)
    assert not news.hear(quorum(2)) and not news.hear(quorum(3)), "old"
    assert news.ends(QuorumId(1, 1), joining=False)
    news.formed(QuorumId(1, 2))
    assert not news.told(Note(), nothing).formed, "nobody will work under it"
    news.forget_quorums()
    assert news.hear(quorum(1))


def test_a_fall_counts_at_once_and_its_first_cause_is_told() -> None:
    news = News()
    news.hear(quorum(1))
    news.broken(QuorumId(1, 1), "a peer is gone")
    news.broken(QuorumId(1, 1), "it is over")
    assert news.ends(QuorumId(1, 1), joining=False)
    assert news.take(agreed([news.told(Note(), nothing)])) == ([quorum(1)], [], [(QuorumId(1, 1), "a peer is gone")])
    assert not news
