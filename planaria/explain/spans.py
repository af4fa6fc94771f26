"""Incidents as trees of spans, for tools that draw traces: of what a recovery consisted, and how long each part was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planaria.explain.incidents import Incident, Loss
from planaria.explain.record import Turn, Turns
from planaria.explain.words import headline, phases

COMES_BACK = " comes back"
Facts = tuple[tuple[str, str | int | float], ...]


@dataclass(frozen=True, slots=True)
class Span:
    """``start`` and ``end``: unix seconds. Children lie within their parent, but for what comes after a recovery."""

    name: str
    start: float
    end: float
    facts: Facts = ()
    children: tuple[Span, ...] = ()


def recovery(incident: Incident, turns: Turns) -> Span | None:
    """From the first word of a loss until all groups of this node have committed again. None if none of them did, for
    then it is not over, or the record does not say."""
    if incident.quorum is None:
        return None
    number = str(incident.quorum.data.get("quorum"))
    those = turns.of(number)
    commits = [turn.committed for turn in those if turn.committed is not None]
    if not commits:
        return None
    took = phases(incident, those)
    begun = min(commits) - took.total if took.total is not None else incident.at
    heard = min((turn.heard for turn in those if turn.heard is not None), default=begun)
    facts: list[tuple[str, str | int | float]] = [
        ("planaria.quorum", number),
        ("planaria.what", headline(incident, turns)),
    ]
    facts += [("planaria.lost", ",".join(map(str, incident.losses)))] if incident.losses else []
    facts += [("planaria.step", incident.step)] if incident.step is not None else []
    children = [Span("detect and agree", begun, max(begun, heard))]
    children += [_turn(turn) for turn in those if turn.heard is not None and turn.committed is not None]
    children += [back for loss in incident.losses.values() if (back := _back(loss, turns)) is not None]
    return Span("recovery", begun, max(commits), tuple(facts), tuple(children))


def _turn(turn: Turn) -> Span:
    """What one group did, from the word of the quorum until its first commit under it."""
    facts: list[tuple[str, str | int | float]] = [("planaria.group", turn.group)]
    facts += [("planaria.taken_over", ",".join(map(str, turn.taken_over)))] if turn.taken_over else []
    facts += [("planaria.step", turn.first)] if turn.first is not None else []
    parts = tuple(_parts(turn))
    return Span(f"group {turn.group}", parts[0].start, parts[-1].end, tuple(facts), parts)


def _parts(turn: Turn) -> Iterator[Span]:
    names = (
        ("abort and form", turn.formed),
        ("roll call", turn.rolled),
        ("heal", turn.healed),
        ("compute, exchange and step", turn.committed),
    )
    assert turn.heard is not None
    at = turn.heard
    for name, until in names:
        if until is not None:
            yield Span(name, at, max(at, until))
            at = max(at, until)


def _back(loss: Loss, turns: Turns) -> Span | None:
    """From the start of the lost group's next life until it took part in a commit."""
    started = loss.started or loss.regrouped
    if started is None or loss.joined is None:
        return None
    number = str(loss.joined.data.get("quorum"))
    mine = [turn for turn in turns.of(number) if turn.group == loss.group and turn.committed is not None]
    if not mine or mine[0].heard is None:
        return None
    turn = _turn(mine[0])
    start = Span("start and load", started.at, max(started.at, turn.start))
    facts = (("planaria.group", loss.group), ("planaria.quorum", number))
    return Span(f"group {loss.group}{COMES_BACK}", started.at, turn.end, facts, (start, *turn.children))
