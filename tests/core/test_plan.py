"""Keeping N groups alive: examples that read as documentation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planaria.core.plan import (
    Action,
    BelowMin,
    Drain,
    Finish,
    GroupState,
    Kill,
    NodeFailure,
    Observed,
    ObservedGroup,
    PlanSpec,
    Start,
    Suspend,
    avoided,
    backoff,
    next_wakeup,
    plan,
    quick_failures,
)

NOW = 1000.0
PENDING, RUNNING = GroupState.PENDING, GroupState.RUNNING
DRAINING, DEAD = GroupState.DRAINING, GroupState.DEAD
FINISHED, REFUSED, DRAINED = GroupState.FINISHED, GroupState.REFUSED, GroupState.DRAINED


def group(id: int, state: GroupState = RUNNING, incarnation: int = 0, **more: Any) -> ObservedGroup:
    more.setdefault("settled", state in (RUNNING, DRAINING))
    return ObservedGroup(id, incarnation, state, **more)


def seen(*groups: ObservedGroup, committed: bool = True, replacements: tuple[float, ...] = ()) -> Observed:
    return Observed(groups, committed, replacements)


def spec(desired: int, **more: Any) -> PlanSpec:
    return PlanSpec(desired, **more)


def only_finish(actions: list[Action]) -> Finish:
    (action,) = actions
    assert isinstance(action, Finish)
    return action


# --- starting, and replacing the dead -----------------------------------------------------------------------


def test_a_new_job_starts_all_groups() -> None:
    assert plan(spec(3), Observed(), NOW) == [Start(0, 0), Start(1, 0), Start(2, 0)]


def test_a_job_that_is_complete_is_left_alone() -> None:
    view = seen(group(0), group(1))
    assert plan(spec(2), view, NOW) == []
    assert next_wakeup(spec(2), view, NOW) is None


def test_a_dead_group_is_replaced_at_once() -> None:
    view = seen(group(0), group(1, DEAD, 4, since=NOW, exit_code=-9))
    assert plan(spec(2), view, NOW) == [Start(1, 5)]


def test_a_first_quick_failure_is_replaced_at_once_too() -> None:
    view = seen(group(0), group(1, DEAD, since=NOW, quick_failures=1))
    assert plan(spec(2), view, NOW) == [Start(1, 1)]


def test_quick_failures_in_a_row_wait_longer_each_time() -> None:
    asked = spec(1, backoff_first=1.0, backoff_max=10.0)
    assert [backoff(asked, failures) for failures in range(8)] == [0, 0, 1, 2, 4, 8, 10, 10]
    assert backoff(asked, 10_000) == 10


def test_a_wait_ends_when_next_wakeup_says() -> None:
    view = seen(group(0), group(1, DEAD, 2, since=NOW, quick_failures=3))
    assert plan(spec(2), view, NOW + 1.9) == []
    assert next_wakeup(spec(2), view, NOW + 1.9) == NOW + 2.0
    assert plan(spec(2), view, NOW + 2.0) == [Start(1, 3)]


def test_one_group_that_fails_does_not_slow_down_the_others() -> None:
    view = seen(group(0, DEAD, since=NOW, quick_failures=9), group(1, DEAD, since=NOW), group(2))
    assert plan(spec(3), view, NOW) == [Start(1, 1)]


def test_what_counts_as_a_quick_failure() -> None:
    asked = spec(1, calm_after=60.0)
    assert quick_failures(asked, 2, lived=0.5, settled=False) == 3
    assert quick_failures(asked, 2, lived=0.5, settled=True) == 2  # killed while it worked
    assert quick_failures(asked, 2, lived=60.0, settled=False) == 0


# --- the job cannot start -----------------------------------------------------------------------------------


def test_bad_input_before_any_commit_ends_the_job() -> None:
    view = seen(group(0), group(1, REFUSED, exit_code=2, message="no file train.bin"), committed=False)
    assert plan(spec(2), view, NOW) == [Finish(2, "no file train.bin")]


def test_bad_input_without_a_message_names_the_group() -> None:
    view = seen(group(1, REFUSED, 3, exit_code=2), committed=False)
    assert "group 1 (incarnation 3)" in only_finish(plan(spec(2), view, NOW)).reason


def test_bad_input_of_a_later_group_gives_up_that_group_alone() -> None:
    view = seen(group(0), group(1, REFUSED, exit_code=2), group(2))
    assert plan(spec(3), view, NOW) == []
    assert next_wakeup(spec(3), view, NOW) is None


def test_a_script_that_always_fails_ends_the_job_soon() -> None:
    failed = {"quick_failures": 3, "exit_code": 1, "message": "ModuleNotFoundError: no module named flux"}
    view = seen(group(0, DEAD, 2, since=NOW, **failed), group(1, DEAD, 2, since=NOW - 1, **failed), committed=False)
    finish = only_finish(plan(spec(2), view, NOW))
    assert finish.exit_code == 1
    assert "group 0 (incarnation 2) ended with exit code 1: ModuleNotFoundError" in finish.reason


def test_a_job_that_has_worked_is_not_given_up_like_that() -> None:
    view = seen(group(0, DEAD, 2, since=NOW - 60, quick_failures=3), committed=True)
    assert plan(spec(1), view, NOW) == [Start(0, 3)]


# --- the budget ---------------------------------------------------------------------------------------------


def test_without_budget_the_job_goes_on_with_fewer() -> None:
    asked = spec(3, min_groups=2, budget=2, budget_window=100.0)
    view = seen(group(0), group(1), group(2, DEAD, 2, since=NOW), replacements=(NOW - 90, NOW - 10))
    assert plan(asked, view, NOW) == []
    assert next_wakeup(asked, view, NOW) == NOW + 10
    assert plan(asked, view, NOW + 10) == [Start(2, 3)]


def test_without_budget_and_with_too_few_groups_the_job_fails() -> None:
    asked = spec(3, min_groups=3, budget=2, budget_window=100.0)
    dead = group(2, DEAD, 2, since=NOW, exit_code=-9)
    finish = only_finish(plan(asked, seen(group(0), group(1), dead, replacements=(NOW - 90, NOW - 10)), NOW))
    assert finish.exit_code == 1
    assert "groups that can run: 2, needed: 3" in finish.reason
    assert "group 2 (incarnation 2) was ended by signal 9" in finish.reason


def test_the_last_of_the_budget_goes_to_who_has_been_dead_longest() -> None:
    asked = spec(3, budget=1)
    view = seen(group(0), group(1, DEAD, since=NOW - 1), group(2, DEAD, since=NOW - 2))
    assert plan(asked, view, NOW) == [Start(2, 1)]


def test_new_groups_need_no_budget() -> None:
    assert plan(spec(2, budget=0), seen(group(0)), NOW) == [Start(1, 0)]


def test_too_many_refused_groups_fail_the_job() -> None:
    view = seen(group(0), group(1, REFUSED, exit_code=2, message="wrong torch version"))
    finish = only_finish(plan(spec(2, min_groups=2), view, NOW))
    assert finish.exit_code == 1
    assert "wrong torch version" in finish.reason


# --- scaling and draining -----------------------------------------------------------------------------------


def test_scaling_up_starts_the_lowest_free_ids() -> None:
    assert plan(spec(4), seen(group(0), group(2)), NOW) == [Start(1, 0), Start(3, 0)]


def test_scaling_down_drains_the_highest_ids() -> None:
    assert plan(spec(2), seen(*(group(i) for i in range(4))), NOW) == [Drain(2), Drain(3)]


def test_dead_groups_are_dropped_before_running_ones_leave() -> None:
    assert plan(spec(1), seen(group(0), group(1, DEAD)), NOW) == [Drain(1)]
    assert plan(spec(1, budget=0), seen(group(0, DEAD), group(1)), NOW) == [Drain(0)]


def test_a_drained_group_is_never_started_again() -> None:
    view = seen(group(0), group(1, DRAINED))
    assert plan(spec(1), view, NOW) == []
    assert plan(spec(2), view, NOW) == [Start(2, 0)]


def test_a_place_is_free_only_when_the_draining_group_has_left() -> None:
    assert plan(spec(2), seen(group(0), group(1, DRAINING)), NOW) == []


def test_a_dead_group_gets_its_own_place_back_although_another_is_leaving() -> None:
    """It can still heal from the one that leaves."""
    assert plan(spec(1), seen(group(0, DEAD), group(1, DRAINING)), NOW) == [Start(0, 1)]


def test_the_last_group_with_the_state_is_not_drained_before_another_has_healed() -> None:
    healing = seen(group(0, settled=False), group(1))
    assert plan(spec(1), healing, NOW) == []
    assert plan(spec(1), seen(group(0), group(1)), NOW) == [Drain(1)]


# --- suspects -----------------------------------------------------------------------------------------------


def test_of_two_a_suspect_is_the_one_to_leave_and_who_does_not_leave_is_ended() -> None:
    doubted = group(0, suspected_since=NOW)
    assert plan(spec(1), seen(doubted, group(1)), NOW) == [Drain(0)]
    view, at = seen(replace(doubted, state=DRAINING), group(1)), NOW + PlanSpec(1).suspect_patience
    assert plan(spec(1), view, NOW) == [] and next_wakeup(spec(1), view, NOW) == at
    assert plan(spec(1), view, at) == [Kill(0, "group 0 (incarnation 0) has been suspected for 30 s")]


def test_a_suspect_is_given_time_to_come_back_and_then_replaced() -> None:
    asked = spec(2, suspect_patience=30.0)
    view = seen(group(0), group(1, suspected_since=NOW))
    assert plan(asked, view, NOW + 29) == []
    assert next_wakeup(asked, view, NOW + 29) == NOW + 30
    assert plan(asked, view, NOW + 30) == [Kill(1, "group 1 (incarnation 0) has been suspected for 30 s")]


def test_if_all_are_suspected_nobody_is_killed() -> None:
    """Their state would be lost; and if all are silent at once, it is more likely that they all evaluate."""
    view = seen(group(0, suspected_since=NOW - 500), group(1, suspected_since=NOW - 500))
    assert plan(spec(2), view, NOW) == []


def test_one_rank_is_replaced_where_copies_outlive_it_and_no_group_is_drained_for_that() -> None:
    view = seen(group(0, suspected_since=NOW - 500, outlives=True))
    assert [type(action) for action in plan(spec(1), view, NOW)] == [Kill]


def test_a_suspect_that_could_not_be_replaced_is_not_killed() -> None:
    view = seen(group(0), group(1, suspected_since=NOW - 500))
    assert plan(spec(2, budget=0), view, NOW) == []


def test_a_start_that_hangs_is_replaced() -> None:
    view = seen(group(0, settled=False, suspected_since=NOW - 500), committed=False)
    assert [type(action) for action in plan(spec(1), view, NOW)] == [Kill]


# --- the end ------------------------------------------------------------------------------------------------


def test_the_job_is_complete_when_one_has_finished_and_nobody_runs() -> None:
    view = seen(group(0, FINISHED, since=NOW, done=True), group(1, DEAD, since=NOW - 5))
    assert plan(spec(2), view, NOW) == [Finish(0, "all steps are committed")]


def test_nobody_is_started_or_drained_once_one_has_finished() -> None:
    view = seen(group(0, FINISHED, since=NOW, done=True), group(1, done=True), group(2, DEAD), group(3, DRAINED))
    assert plan(spec(4), view, NOW) == []
    assert plan(spec(1), view, NOW) == []


def test_whoever_has_made_the_last_step_may_evaluate_and_save_for_long() -> None:
    view = seen(group(0, FINISHED, since=NOW, done=True), group(1, done=True))
    assert plan(spec(2), view, NOW + 3600) == []
    assert next_wakeup(spec(2), view, NOW) is None


def test_whoever_came_too_late_is_ended() -> None:
    asked = spec(2, finish_grace=10.0)
    view = seen(group(0, FINISHED, since=NOW, done=True), group(1))
    assert plan(asked, view, NOW + 9) == []
    assert next_wakeup(asked, view, NOW + 9) == NOW + 10
    assert plan(asked, view, NOW + 10) == [Kill(1, "the job finished without it")]


def test_a_joiner_that_never_settled_is_ended_with_the_job() -> None:
    view = seen(group(0, FINISHED, since=NOW, done=True), group(1, settled=False))
    assert [type(action) for action in plan(spec(2, finish_grace=10.0), view, NOW)] == [Kill]


def test_one_that_left_early_hurries_nobody_however_long_a_step_takes() -> None:
    """Its script ended the loop, and the others have not said yet whether they do the same or go on."""
    view = seen(group(0, FINISHED, since=NOW), group(1), group(2, settled=False), group(3, DEAD))
    assert plan(spec(4, finish_grace=10.0), view, NOW + 3600) == []
    assert next_wakeup(spec(4, finish_grace=10.0), view, NOW) is None
    last_made = seen(group(0, FINISHED, since=NOW), group(1), group(2, FINISHED, since=NOW + 90, done=True))
    assert next_wakeup(spec(3, finish_grace=10.0), last_made, NOW + 95) == NOW + 100, "not from when group 0 left"


def test_when_all_have_left_early_a_joiner_is_not_waited_for() -> None:
    view = seen(group(0, FINISHED, since=NOW), group(1, FINISHED, since=NOW), group(2, settled=False))
    assert plan(spec(3), view, NOW) == [Kill(2, "every group that held the state has left")]
    view = seen(group(0, FINISHED, since=NOW), group(1, FINISHED, since=NOW), group(2, DEAD))
    assert plan(spec(3), view, NOW) == [Finish(0, "all groups left their loop early")]


def test_a_suspect_among_those_who_have_not_left_yet_is_replaced_by_nobody() -> None:
    asked = spec(3, suspect_patience=30.0)
    view = seen(group(0, FINISHED, since=NOW), group(1, suspected_since=NOW), group(2))
    assert plan(asked, view, NOW + 29) == [] and next_wakeup(asked, view, NOW + 29) == NOW + 30
    assert [type(a) for a in plan(asked, view, NOW + 30)] == [Kill]
    alone = seen(group(0, FINISHED, since=NOW), group(1, suspected_since=NOW))
    assert plan(asked, alone, NOW + 3600) == [], "it may be the last that holds the state"


def test_exit_code_zero_before_the_last_step_is_a_failure_like_others() -> None:
    view = seen(group(0), group(1, DEAD, since=NOW, exit_code=0))
    assert plan(spec(2), view, NOW) == [Start(1, 1)]


def test_a_script_that_fails_after_its_last_step_is_not_started_again() -> None:
    view = seen(group(0, DEAD, since=NOW, done=True, exit_code=1, message="disk full"))
    finish = only_finish(plan(spec(1), view, NOW))
    assert (finish.exit_code, "disk full" in finish.reason) == (1, True)


def test_one_that_dies_at_its_end_does_not_hurry_the_others() -> None:
    """They may still be computing its shards of the last step again."""
    view = seen(group(0, DEAD, since=NOW, done=True, exit_code=-9), group(1))
    assert plan(spec(2), view, NOW + 3600) == []


def test_bad_wishes_and_views_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one group"):
        PlanSpec(0)
    with pytest.raises(ValueError, match="cannot be negative"):
        PlanSpec(1, budget=-1)
    with pytest.raises(ValueError, match="longest back-off"):
        PlanSpec(1, backoff_first=5.0, backoff_max=1.0)
    with pytest.raises(ValueError, match="group 3 was observed 2 times"):
        seen(group(3), group(3, DEAD))


# --- on a cluster: waiting for a place, nodes to avoid, too few for too long ---------------------------------


def test_who_waits_for_a_place_is_dropped_before_a_running_group_leaves() -> None:
    view = seen(group(0, PENDING), group(1), group(2), group(3, DEAD, since=NOW))
    assert plan(spec(3), view, NOW) == [Drain(3)]
    assert plan(spec(2), view, NOW) == [Drain(0), Drain(3)]
    assert plan(spec(5), view, NOW) == [Start(3, 1), Start(4, 0)], "who waits has a place"


def test_no_more_groups_than_the_maximum_whoever_wants_them() -> None:
    assert plan(spec(9, max_groups=2), Observed(), NOW) == [Start(0, 0), Start(1, 0)]
    assert plan(spec(9, max_groups=1), seen(group(0), group(1)), NOW) == [Drain(1)]


def test_a_node_is_avoided_after_some_failures_within_the_window_and_for_a_time() -> None:
    asked = spec(2, quarantine_failures=3, quarantine_window=100.0, quarantine_seconds=1000.0)
    failures = (NodeFailure("n1", NOW - 90), NodeFailure("n1", NOW - 50), NodeFailure("n2", NOW - 40))
    view = replace(seen(group(0), group(1, DEAD, since=NOW)), node_failures=failures)
    assert plan(asked, view, NOW) == [Start(1, 1)]
    view = replace(view, node_failures=(*failures, NodeFailure("n1", NOW)))
    assert plan(asked, view, NOW) == [Start(1, 1, ("n1",))]
    assert avoided(asked, view.node_failures, NOW) == {"n1": NOW + 1000}
    assert plan(asked, view, NOW + 1000) == [Start(1, 1)]
    slow = tuple(NodeFailure("n1", NOW - 101 * i) for i in range(9))
    assert avoided(asked, slow, NOW) == {}, "never three within the window"


def test_a_node_that_was_lost_is_avoided_at_once() -> None:
    view = replace(seen(group(0)), node_failures=(NodeFailure("n3", NOW, lost=True),))
    assert plan(spec(2, lost_node_seconds=600.0), view, NOW + 599) == [Start(1, 0, ("n3",))]
    assert plan(spec(2, lost_node_seconds=600.0), view, NOW + 600) == [Start(1, 0)]


@pytest.mark.parametrize("below_min", list(BelowMin))
def test_with_too_few_for_too_long_the_job_ends_or_makes_room(below_min: BelowMin) -> None:
    asked = spec(3, min_groups=2, budget=0, below_min_limit=60.0, below_min=below_min)
    view = replace(seen(group(0), group(1, PENDING), group(2, DEAD, since=NOW)), below_min_since=NOW)
    assert plan(asked, view, NOW + 59) == [], "although the budget is used up: it comes back"
    assert next_wakeup(asked, view, NOW + 59) == NOW + 60
    (end,) = plan(asked, view, NOW + 60)
    assert isinstance(end, Suspend if below_min is BelowMin.SUSPEND else Finish)
    assert "fewer than 2 groups have run for 60 s (now: 1)" in end.reason
    assert plan(asked, replace(view, below_min_since=None), NOW + 600) == []


def test_who_still_waits_for_a_place_when_the_job_is_complete_is_cancelled() -> None:
    view = seen(group(0, FINISHED, since=NOW, done=True), group(1, PENDING))
    assert [type(action) for action in plan(spec(2), view, NOW)] == [Kill]
