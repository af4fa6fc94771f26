"""``planaria explain RUN_DIR``: what happened to a run and why."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from planaria.errors import UsageError
from planaria.explain.incidents import Incident, Story, take, tell
from planaria.explain.otel import Collector
from planaria.explain.record import Entry, Spoilt, Turns, entries, follow, turns
from planaria.explain.words import clock, details, headline

LOOK_SECONDS = 1.0  # between two looks at a record that grows: as often as the lighthouse hears of steps
_SHOWN = 50
_DETAILED = 5  # incidents; of more only their headlines are shown, and --at shows one


def explain(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR", help="The run's log directory; of each node.")],
    at: Annotated[
        str | None, typer.Option(help="What happened then: a step, a time (12:30:05, 2026-11-28T12:30:05), or +90s.")
    ] = None,
    otlp: Annotated[
        str | None, typer.Option(metavar="URL", help="Send each recovery as a trace to this OpenTelemetry collector.")
    ] = None,
    follows: Annotated[bool, typer.Option("--follow", help="With --otlp: go on until the run ends.")] = False,
) -> None:
    """What happened to a run and why: who was lost, who noticed, how long each phase took, what was computed again."""
    spoilt = Spoilt()
    if otlp is not None:
        _send(run_dirs, otlp, follows, spoilt)
        return
    if follows:
        raise UsageError("--follow is for --otlp; planaria top and the run's web page show what happens now")
    stories = [(run, tell(entries(run / "events.jsonl", spoilt)), turns(run, spoilt)) for run in run_dirs]
    for number, (run, story, done) in enumerate(stories):
        if len(stories) > 1:
            typer.echo(f"{'' if number == 0 else chr(10)}== {run}")
        _show(run, story, done, at, run_dirs)
    if spoilt.lines:
        typer.echo(f"\n{spoilt.lines} lines of the record could not be read, and were left out")


def _send(run_dirs: Sequence[Path], otlp: str, follows: bool, spoilt: Spoilt) -> None:
    if follows and len(run_dirs) > 1:
        raise UsageError("--follow: give one run directory; start one command for each node")
    for run in run_dirs:
        with closing(Collector(otlp, run.resolve().name)) as collector:
            story, sent = Story(), 0
            for entry in follow(run / "events.jsonl", spoilt):
                if entry is not None:
                    take(story, entry)
                    continue
                done = not follows or story.end is not None
                sent += collector.send_all(story, partial(turns, run, spoilt), over=done)
                if done:
                    break
                time.sleep(LOOK_SECONDS)
            typer.echo(f"{run}: {sent} recover{'y' if sent == 1 else 'ies'} sent to {collector.endpoint}")


def _show(run: Path, story: Story, done: Turns, at: str | None, run_dirs: Sequence[Path]) -> None:
    if story.first is None or story.last is None:
        raise UsageError(f"the record of {run} is empty: nothing happened there yet")
    start = story.first.at
    incidents = story.incidents
    if at is not None:
        incidents = [_chosen(story, done, at)]
    else:
        stood = sum(incident.still is not None for incident in incidents)
        lost = len(incidents) - stood
        told = f"{lost} {'loss' if lost == 1 else 'losses'}" if lost else "nothing was lost"
        told += f"; {stood} {'standstill' if stood == 1 else 'standstills'}" if stood else ""
        typer.echo(f"{story.events} events from {clock(start)} to {clock(story.last.at)}; {told}")
    if len(incidents) > _SHOWN:
        typer.echo(f"of these the last {_SHOWN}:")
    for incident in incidents[-_SHOWN:]:
        step = incident.step
        where = f", at step {step}" if step is not None else ""
        typer.echo(f"\n{clock(incident.at)} (+{incident.at - start:.1f} s{where}): {headline(incident, done)}")
        if at is not None or len(incidents) <= _DETAILED:
            for line in details(incident, done, list(run_dirs), start):
                typer.echo(f"  {line}")
    if at is None:
        if len(incidents) > _DETAILED:
            typer.echo(f"\nmore of one of them: planaria explain {run} --at STEP")
        typer.echo(f"\n{_last_words(story)}")


def _last_words(story: Story) -> str:
    if story.end is not None:
        code = story.end.number("exit_code")
        return f"the end: {story.end.text} (exit code {code})" if code is not None else f"the end: {story.end.text}"
    assert story.last is not None
    last = f"{clock(story.last.at)} {story.last.text}"
    return f"the record has no end: the agent still runs, or died. The last that it wrote: {last}"


def _chosen(story: Story, done: Turns, at: str) -> Incident:
    """The incident during that step, or the last that began before that time."""
    if not story.incidents:
        raise UsageError(f"--at {at}: nothing was lost in this run")
    if at.isdecimal() and len(at) < 10:
        step = int(at)
        known = [(incident, _step_of(incident, done)) for incident in story.incidents]
        near = [(abs(found - step), number) for number, (_, found) in enumerate(known) if found is not None]
        if not near:
            raise UsageError(f"--at {at}: the record knows no steps of its losses; give a time")
        return story.incidents[min(near)[1]]
    assert story.first is not None
    moment = _moment(at, story.first)
    before = [incident for incident in story.incidents if incident.at <= moment]
    if not before:
        first = clock(story.incidents[0].at)
        raise UsageError(f"--at {at}: nothing was lost until then; the first loss was at {first}")
    return before[-1]


def _step_of(incident: Incident, done: Turns) -> int | None:
    if incident.step is not None:
        return incident.step
    those = done.of(str(incident.quorum.data.get("quorum"))) if incident.quorum is not None else []
    return next((turn.step for turn in those if turn.step is not None), None)


def _moment(at: str, first: Entry) -> float:
    """Unix seconds."""
    try:
        if at.startswith("+"):
            return first.at + float(at[1:].removesuffix("s"))
        if at.replace(".", "", 1).isdecimal():
            return float(at)
        if "T" not in at and "-" not in at:  # of the day on which the record begins
            day = datetime.fromtimestamp(first.at).date()
            moment = datetime.fromisoformat(f"{day}T{at}").timestamp()
            return moment if moment >= first.at - 1 else moment + 86_400  # the run went past midnight
        return datetime.fromisoformat(at).timestamp()
    except (ValueError, OverflowError, OSError):
        raise UsageError(f"--at {at}: give a step (120), a time (12:30:05) or seconds from the start (+90s)") from None
