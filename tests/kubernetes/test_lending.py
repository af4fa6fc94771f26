"""Who gives groups away to whom."""

from __future__ import annotations

from typing import Any

from planaria.engines.kubernetes.lending import Lending, Party, lent_by


def party(name: str, priority: int = 0, **more: Any) -> Party:
    fields: dict[str, Any] = {"waiting": 0, "surplus": 0, "leaving": False, "over": False, "shrinks": True, "lent": {}}
    return Party(name, priority, **(fields | more))


def test_one_group_after_the_other_from_the_lowest_priority_and_none_below_a_minimum() -> None:
    lending = Lending()
    urgent = party("urgent", 10, waiting=2)
    first = lending.decide([urgent, party("low", 1, surplus=3), party("lower", 0, surplus=1)], 0.0)
    assert first == {"lower": {"urgent": 1}}
    lower = party("lower", 0, surplus=0, lent={"urgent": 1}, leaving=True)
    assert lending.decide([urgent, party("low", 1, surplus=3), lower], 10.0) == {}
    lower = party("lower", 0, surplus=0, lent={"urgent": 1})
    assert lending.decide([urgent, party("low", 1, surplus=3), lower], 20.0) == {}, "the scheduler may not have seen it"
    assert lending.decide([urgent, party("low", 1, surplus=3), lower], 25.0) == {"low": {"urgent": 1}}


def test_equals_and_betters_are_left_alone() -> None:
    parties = [party("a", 5, waiting=1), party("b", 5, surplus=4), party("c", 6, surplus=4)]
    assert Lending().decide(parties, 0.0) == {}
    assert Lending().decide([party("a", 7, waiting=1, shrinks=False), *parties[1:]], 0.0) == {}


def test_what_did_not_help_is_given_back_and_not_taken_again() -> None:
    lending = Lending()
    assert lending.decide([party("a", 5, waiting=1), party("b", surplus=1)], 0.0) == {"b": {"a": 1}}
    lends = party("b", surplus=0, lent={"a": 1})
    assert lending.decide([party("a", 5, waiting=1), lends], 30.0) == {}
    assert lending.decide([party("a", 5, waiting=1), lends], 61.0) == {"b": {}}
    assert lending.decide([party("a", 5, waiting=1), party("b", surplus=1)], 70.0) == {}


def test_it_comes_back_when_the_other_is_over_or_gone() -> None:
    lends = party("b", lent={"a": 1, "gone": 2})
    assert Lending().decide([party("a", 5, over=True), lends], 0.0) == {"b": {}}


def test_an_annotation_that_nobody_of_ours_wrote_lends_nothing() -> None:
    for text in ("", "3", "[1]", "{", '{"a": "x"}', '{"a": -1}'):
        assert lent_by({"metadata": {"annotations": {"planaria.dev/lent-to": text}}}) == {}
