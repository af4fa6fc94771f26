"""Incidents in plain language."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from planaria.explain.incidents import Incident, Loss
from planaria.explain.record import Entry, Turn, Turns

_FRAMES = 12  # of a stack that are shown; the file has all
_WHO = re.compile(r"^group [0-9]+ \(incarnation [0-9]+\)(, rank [0-9]+,)? ")
_START = "planaria/agent/rankmain.py"


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of a recovery, the slowest group of this node counting for each. None: not known."""

    quorum: float | None  # from the first word of the loss until all had heard of the next quorum
    form: float | None  # the old communicator dropped, the new one standing
    roll: float | None
    heal: float | None
    commit: float | None  # the missing shards, the exchange, the step itself
    total: float | None  # from the first word of the loss until the first commit of the first that made one


def phases(incident: Incident, turns: list[Turn]) -> Phases:
    """``turns``: of the incident's quorum, all by one clock."""
    signs = [sign for loss in incident.losses.values() for sign in loss.signs]
    commits = [turn.committed for turn in turns if turn.committed is not None]
    measured = [loss.recovered.data.get("seconds") for loss in incident.losses.values() if loss.recovered is not None]
    known = [float(seconds) for seconds in measured if isinstance(seconds, (int, float))]
    # What the lighthouse says carries its clock; an agent's own words are those with these facts.
    suspected = [sign.at for sign in signs if sign.kind == "suspect" and "why" in sign.data]
    ended = [sign.at for sign in signs if sign.kind == "exit" and "state" in sign.data]
    begun = min(suspected or ended, default=None)
    if known and commits and not suspected:  # by the agent, which knows when the lighthouse was told
        begun = min(commits) - max(known)
    heard = [turn.heard for turn in turns if turn.heard is not None]
    return Phases(
        max(heard) - begun if heard and begun is not None else None,
        _longest((turn.heard, turn.formed) for turn in turns),
        _longest((turn.formed, turn.rolled) for turn in turns),
        _longest((turn.rolled, turn.healed) for turn in turns),
        _longest((turn.healed or turn.rolled, turn.committed) for turn in turns),
        min(commits) - begun if commits and begun is not None else max(known, default=None),
    )


def _longest(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    found = [max(0.0, b - a) for a, b in pairs if a is not None and b is not None]
    return max(found, default=None)


def headline(incident: Incident, turns: Turns) -> str:
    """One line: "group 3 lost (SIGKILL), shards 6, 7 taken over by group 1, next commit after 0.21 s"."""
    parts = ["; ".join(lost(loss) for loss in incident.losses.values())]
    if incident.still is not None:
        parts = ["nobody was lost, and all waited for each other"]
    if incident.quorum is None:
        return ", ".join([*parts, "no quorum came after it"])
    those = turns.of(str(incident.quorum.data.get("quorum")))
    taken = [f"{_shards(turn.taken_over)} by group {turn.group}" for turn in those if turn.taken_over]
    if taken:
        parts.append("taken over: " + ", ".join(taken))
    if incident.resumed is not None:
        parts.append("all groups were lost, the job went back")
    total = phases(incident, those).total
    if total is not None:
        parts.append(f"next commit after {total:.2f} s")
    elif any(turn.committed is not None for turn in those):
        parts.append("the groups here went on")
    else:
        parts.append("no commit after it is recorded")
    return ", ".join(parts)


def lost(loss: Loss) -> str:
    """ "group 3 lost (killed by SIGKILL)"; with a rank where one alone was."""
    ended = loss.exit
    alone = ended is not None and ended.data.get("alone") is True
    rank = ended.number("rank") if ended is not None else None
    who = f"group {loss.group} lost rank {rank}" if alone else f"group {loss.group} lost"
    how = _how(loss)
    return f"{who} ({how})" if how else who


def _how(loss: Loss) -> str:
    if (found := loss.first("suspect")) is not None:
        return f"a hang: {found.data.get('why') or _WHO.sub('', found.text).removeprefix('is suspected: ')}"
    for kind in ("exit", "lost", "agent", "corrupt", "late"):
        if (found := loss.first(kind)) is not None:
            text = str(found.data.get("cause") or found.text)
            return _WHO.sub("", text)
    return ""


def details(incident: Incident, turns: Turns, runs: list[Path], start: float) -> Iterator[str]:
    """``runs``: the directories of the nodes, in which stacks are found. ``start``: of the record."""
    if incident.still is not None:
        yield f"why: {incident.still.text}"
        yield "noticed by: the lighthouse, which hears of all groups; a message was lost, or a path between them is cut"
    for loss in incident.losses.values():
        yield f"why: {_cause(loss)}"
        yield f"noticed by: {_witness(loss)}"
    if incident.quorum is not None:
        yield f"then: {incident.quorum.text}"
        yield from _recovery(incident, turns)
    for loss in incident.losses.values():
        yield from _back(loss, turns)
        for sign in loss.signs:
            if sign.kind == "hang":
                yield from _where(sign, runs)
    yield "record:"
    if incident.still is not None:
        yield f"  {clock(incident.still.at)} (+{incident.still.at - start:.3f} s) {incident.still.text}"
    for loss in incident.losses.values():
        for sign in loss.signs:
            yield f"  {clock(sign.at)} (+{sign.at - start:.3f} s) {sign.text}"


def _cause(loss: Loss) -> str:
    """The first cause that the record knows of, and what it led to."""
    operator = next((sign for sign in loss.signs if sign.kind == "kill" and "operator" in sign.text), None)
    if operator is not None:
        return operator.text
    for kind in ("evict", "health", "corrupt"):
        if (found := loss.first(kind)) is not None:
            return found.text
    if (found := loss.first("suspect")) is not None:
        return f"it hung: {found.text}"
    if (found := loss.exit) is not None:
        more = "" if ":" in found.text else "; its log may say more"
        return found.text + more * (found.number("exit_code") not in (None, -9))
    return loss.signs[-1].text if loss.signs else "nothing in this record says so; another node's may"


def _witness(loss: Loss) -> str:
    for sign in loss.signs:
        if sign.kind == "suspect":
            return "its agent, which watches the progress page and the process table"
        if sign.kind == "agent":
            return "the lighthouse, by the silence of its agent"
        if sign.kind == "evict":
            return "an operator"
        if sign.kind == "corrupt":
            return "the groups, whose checksums of the state must agree"
        if sign.kind in ("exit", "lost"):
            return "its agent, the parent of the process: at once"
    return "another node"


def _recovery(incident: Incident, turns: Turns) -> Iterator[str]:
    assert incident.quorum is not None
    those = turns.of(str(incident.quorum.data.get("quorum")))
    if not those:
        yield "  no group of this node has recorded anything under that quorum"
        return
    took = phases(incident, those)
    steps = (
        ("word of the next quorum at all groups here", took.quorum),
        ("old communicator dropped, new one formed", took.form),
        ("roll call", took.roll),
        ("healing", took.heal),
        ("missing shards, exchange and step", took.commit),
    )
    for name, seconds in steps:
        if seconds is not None:
            yield f"  {name}: {seconds:.3f} s"
    if took.total is not None:
        yield f"  first commit after {took.total:.3f} s"
    taken = [turn for turn in those if turn.taken_over]
    step = next((turn.step for turn in those if turn.step is not None), None)
    if taken:
        work = ", ".join(f"group {turn.group}: {_shards(turn.taken_over)}" for turn in taken)
        yield f"  computed again of step {step}: {work}"
    elif step is not None:
        yield f"  nothing had to be computed again by a group of this node (step {step})"
    for turn in those:
        if turn.committed is None and turn.heard is not None and turn.group not in incident.losses:
            last = "broke" if turn.broken else "rolled" if turn.rolled else "formed" if turn.formed else "heard"
            yield f"  group {turn.group} made no commit under it (got as far as: {last} {turn.broken})".rstrip()


def _back(loss: Loss, turns: Turns) -> Iterator[str]:
    if loss.regrouped is not None:
        yield f"back: {loss.regrouped.text}"
    elif loss.started is not None:
        yield f"back: {loss.started.text}"
    if loss.joined is None:
        if loss.started is not None or loss.regrouped is not None:
            yield "  it did not join again"
        return
    mine = [turn for turn in turns.of(str(loss.joined.data.get("quorum"))) if turn.group == loss.group]
    told = loss.first("lost", "suspect", "exit")
    for turn in mine:
        if turn.healed is not None and turn.rolled is not None:
            yield f"  it took the state in {turn.healed - turn.rolled:.3f} s, for step {turn.step}"
        if turn.committed is not None and told is not None:
            after = f"{turn.committed - told.at:.2f} s after the loss"
            yield f"  it took part in a commit again (step {turn.first}) {after}"


def _where(hang: Entry, runs: list[Path]) -> Iterator[str]:
    ranks = hang.data.get("ranks")
    yield f"where the ranks stood at {clock(hang.at)}:"
    for rank in ranks if isinstance(ranks, list) else []:
        if not isinstance(rank, dict):
            continue
        where = f"group {rank.get('group')}, rank {rank.get('rank')}"
        if rank.get("away"):
            yield f"  {where}: on another node"
            continue
        shard = f" shard {rank['shard']}" if isinstance(rank.get("shard"), int) and rank["shard"] >= 0 else ""
        process = {"T": ", stopped", "t": ", traced", "D": ", waits in the kernel"}.get(str(rank.get("process")), "")
        yield (
            f"  {where} (pid {rank.get('pid')}{process}): {rank.get('phase')}{shard} for {rank.get('seconds')} s, "
            f"step {rank.get('step')}, quorum {rank.get('quorum')}, {rank.get('collectives')} collectives begun"
        )
        if "stacks" in rank:
            yield from _stack(rank, runs)


def _stack(rank: dict[str, object], runs: list[Path]) -> Iterator[str]:
    name, start = str(rank["stacks"]), rank.get("from")
    for run in runs:
        path = run / name
        if not path.resolve().is_relative_to(run.resolve()):
            continue  # a record may have been tampered with
        try:
            with path.open("rb") as file:
                file.seek(start if isinstance(start, int) and start >= 0 else 0)
                text = file.read(1 << 20).decode(errors="replace")
        except OSError:
            continue
        # The main thread, the one that trains, comes last.
        threads = [part for part in text.split("\n\n") if "most recent call first" in part]
        if not threads:
            yield f"    it wrote no stacks (was it stopped?): {name}"
            return
        lines = threads[-1].splitlines()[1:]
        ours = next((number for number, line in enumerate(lines) if _START in line), len(lines))  # below the script
        yield f"    its training thread (all threads: {name}):"
        yield from (f"    {line}" for line in lines[: min(ours, _FRAMES)])
        return
    yield f"    its stacks are not there any more: {name}"


def _shards(shards: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, shards[:8])) + (", …" if len(shards) > 8 else "")
    return f"shard{'s' * (len(shards) > 1)} {shown}"


def clock(at: float) -> str:
    try:
        return datetime.fromtimestamp(at).isoformat(sep=" ", timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{at:.3f}"
