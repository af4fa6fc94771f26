"""Members that cannot promise the same bits are named, with what differs."""

from __future__ import annotations

from dataclasses import replace

from planaria.core.fingerprint import BY_RANK, SOFT, differing, drift, misfit, odd_ones, unfit
from planaria.core.messages import Member, Ready


def ready(group: int, initial: str = "start", shards: int = 4, **facts: str) -> Ready:
    known = {"torch": "2.13", "cpu": "avx2"} | facts
    return Ready(Member(group, 0), "host:1", tuple(sorted(known.items())), initial, shards, 10)


def test_alike_is_no_misfit() -> None:
    assert misfit(ready(3), [ready(0), ready(1)]) == ""
    assert misfit(ready(3), []) == ""
    assert odd_ones([ready(0), ready(1)]) == []


def test_a_misfit_names_key_and_both_values() -> None:
    assert misfit(ready(3, torch="2.12"), [ready(0)]) == (
        "group 3 (incarnation 0) differs from group 0 in torch (2.13 there, 2.12 here)"
    )


def test_a_key_that_only_one_side_has_is_named_too() -> None:
    assert differing(ready(0), ready(1, gpu="H200")) == "gpu (absent there, H200 here)"


def test_shards_and_steps_must_agree() -> None:
    other = replace(ready(1, shards=6), total_steps=20)
    assert differing(ready(0), other) == "shards (4 there, 6 here), steps (10 there, 20 here)"


def test_the_majority_is_right() -> None:
    ((odd, reason),) = odd_ones([ready(0, cpu="avx512"), ready(1), ready(2)])
    assert odd.member == Member(0, 0)
    assert reason == "group 0 (incarnation 0) differs from group 1 in cpu (avx2 there, avx512 here)"


def test_of_two_the_lower_group_is_right() -> None:
    ((odd, _),) = odd_ones([ready(1, cpu="avx512"), ready(0)])
    assert odd.member == Member(1, 0)


def test_different_states_at_the_start_come_with_advice() -> None:
    ((odd, reason),) = odd_ones([ready(0), ready(1, initial="other"), ready(2)])
    assert odd.member == Member(1, 0)
    assert "seed every group alike" in reason


def test_soft_entries_are_told_and_not_refused() -> None:
    other = ready(1, **{"~torch": "2.12"})
    usual = ready(0, **{"~torch": "2.13"})
    assert misfit(other, [usual]) == "" and odd_ones([usual, other]) == []
    assert drift(other, [usual]) == (
        "group 1 (incarnation 0) differs from group 0 in torch (2.13 there, 2.12 here): its sums may round differently"
    )
    assert drift(ready(1), [ready(0)]) == "" and drift(other, []) == ""


def test_a_single_process_is_compared_with_what_all_ranks_of_a_group_have_alike() -> None:
    group = ready(0, torch="2.13", gpu="H200", model=BY_RANK + "1f", **{SOFT + "threads": "1"})
    alike = {"torch": "2.13", "cpu": "avx2", "gpu": "H200", "model": "a stage", SOFT + "threads": "2"}
    assert unfit(tuple(alike.items()), group) == unfit((), group) == ""
    odd = {**alike, "torch": "2.12", "checks": "3 0.0", "gpu": "A100"}
    del odd["model"]
    assert unfit(tuple(odd.items()), group) == (
        "checks (absent there, 3 0.0 here), gpu (H200 there, A100 here), torch (2.13 there, 2.12 here)"
    )
