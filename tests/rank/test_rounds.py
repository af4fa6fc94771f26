"""What a group agrees on, of what each of its ranks has heard."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.core.messages import NO_QUORUM, QuorumId
from planaria.errors import ProtocolError, UsageError
from planaria.rank.rounds import NOTE_BYTES, Note, agreed

ids = st.builds(QuorumId, st.integers(0, 3), st.integers(0, 5))
notes = st.builds(
    Note,
    heard=ids,
    formed=st.frozensets(ids, max_size=3),
    broken=st.dictionaries(ids, st.text(max_size=20), max_size=3),
    stop=st.booleans(),
    ok=st.booleans(),
    finite=st.booleans(),
    seconds=st.floats(0, 1e6),
    metrics=st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3),
    named=ids,
    alike=st.booleans(),
    doubtful=st.frozensets(st.integers(0, 99), max_size=3),
)


@given(notes)
def test_a_note_travels_as_it_is(note: Note) -> None:
    data = note.encode()
    assert len(data) == NOTE_BYTES
    assert Note.decode(data) == note


@given(st.lists(notes, min_size=1, max_size=4))
def test_what_holds_for_the_group(said: list[Note]) -> None:
    outcome = agreed(said)
    for note in said:
        # Nothing counts that one rank has not heard of, or that does not stand at one; what fell at one has fallen.
        assert outcome.heard <= note.heard
        assert outcome.formed <= note.formed
        assert set(note.broken) <= set(outcome.broken)
        assert outcome.stop >= note.stop and outcome.ok <= note.ok and outcome.finite <= note.finite
        assert outcome.alike <= note.alike and outcome.doubtful >= note.doubtful
        assert outcome.seconds >= note.seconds
        assert set(note.metrics) <= set(outcome.metrics)
    assert outcome.heard in {note.heard for note in said}
    assert {note.named for note in said} == {outcome.named} or outcome.named == NO_QUORUM
    if not outcome.alike or outcome.doubtful:  # the step does not count, so nothing is taken up after it
        assert outcome.named == NO_QUORUM


@given(st.lists(notes, min_size=1, max_size=4))
def test_every_rank_comes_to_the_same(said: list[Note]) -> None:
    travelled = [Note.decode(note.encode()) for note in said]
    here, there = agreed(said), agreed(travelled)
    assert replace(there, metrics={}) == replace(here, metrics={})
    # One infinity and the other one make NaN, which is not equal to itself.
    assert repr(there.metrics) == repr(here.metrics)


def test_a_group_of_one_agrees_with_itself() -> None:
    note = Note(QuorumId(1, 2), frozenset({QuorumId(1, 2)}), {QuorumId(1, 1): "fell"}, metrics={"loss": 0.1})
    assert agreed([note]) == note


def test_metrics_are_means_over_the_ranks_that_record_them() -> None:
    # The last stage of a pipeline knows the loss, and all of them their own speed.
    outcome = agreed([Note(metrics={"speed": 1.0}), Note(metrics={"speed": 2.0, "loss": 0.3})])
    assert outcome.metrics == {"speed": 1.5, "loss": 0.3}
    assert math.isnan(agreed([Note(metrics={"loss": math.nan}), Note(metrics={"loss": 1.0})]).metrics["loss"])


def test_a_failure_names_its_rank() -> None:
    id = QuorumId(2, 1)
    assert agreed([Note(), Note(broken={id: "it broke"})]).broken == {id: "rank 1: it broke"}


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="too long"):
        Note(metrics={f"{number}" * 400: 1.0 for number in range(8)}).encode()
    with pytest.raises(ProtocolError, match="cannot be read"):
        Note.decode(b"{}".ljust(NOTE_BYTES))
