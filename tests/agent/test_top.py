"""``planaria top``: what is seen of a job of a thousand groups, of a real one, and of a lighthouse that is away."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from rich.console import Console

from planaria.cli.top import View
from planaria.core.messages import Event, Member, Phase, Quorum, QuorumId
from planaria.core.roster import GroupStatus, JobStatus, condition
from planaria.errors import PlanariaError
from planaria.lighthouse.client import OperatorClient

from .conftest import SCRIPTS, Run, plain_environ

SPEAKER = str(SCRIPTS / "speaker.py")


def group(number: int, phase: Phase = Phase.COMPUTING, state: str = "active", **more: object) -> GroupStatus:
    known = GroupStatus(Member(number, 0), state, 40, QuorumId(1, 2), phase, 2.5, 0.5, 7, f"node{number // 8}", True)
    return replace(known, **more)  # type: ignore[arg-type]


def job_of(groups: list[GroupStatus], events: tuple[Event, ...] = ()) -> JobStatus:
    members = tuple(each.member for each in groups if each.state == "active")
    quorum = Quorum(QuorumId(1, 2), members, ("",) * len(members), True, "", "")
    return JobStatus("train", 1, quorum, None, len(groups), False, tuple(groups), events)


def lines(view: View, width: int = 100, height: int | None = 30, now: float = 0.0) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(view.render(width, height, now))
    return cast(io.StringIO, console.file).getvalue().splitlines()


def test_a_thousand_groups_fit_into_a_screen_and_who_needs_a_look_is_named() -> None:
    groups = [group(number) for number in range(1000)]
    groups[3] = group(3, state="dead", loss=math.nan, note="killed by SIGKILL")
    groups[500] = group(500, Phase.HEALING)
    groups[777] = group(777, step_seconds=9.5)
    groups[900] = group(900, connected=False)
    view = View()
    view.take(job_of(groups, (Event(0.0, "lost", "group 3 is gone", 3, ()),)), 0.0)
    seen = lines(view)
    assert len(seen) <= 30 and all(len(line) <= 100 for line in seen)
    assert seen[0].startswith("train  step 40  loss 2.5  999 of 1000 groups at work  quorum 1.2")
    strip = "".join(seen[1:11])
    assert len(strip) == 1000 and (strip[3], strip[500], strip[900], strip[0]) == ("x", "▓", "?", "█")
    assert seen[11].split("   ") == ["█ 997 working", "▓ 1 healing", "? 1 out of reach", "x 1 dead", ""]
    named = {int(line.split()[0]): line for line in seen[13:] if line.split()[0].isdigit()}
    assert named.keys() >= {3, 500, 777, 900} and "killed by SIGKILL" in named[3] and "node97" in named[777]
    assert seen[-1].endswith("group 3 is gone")


def test_speed_is_that_of_the_last_half_minute_and_begins_anew_with_the_job() -> None:
    view = View()
    for second in range(100):
        view.take(job_of([group(0, step=second if second < 50 else 50 + 3 * (second - 50))]), float(second))
    assert view.rate() == 3.0
    view.take(job_of([group(0, step=7)]), 100.0)
    assert view.rate() is None
    assert "steps/s" not in lines(view)[0]


def test_the_words_for_groups() -> None:
    told = {
        condition(group(0, phase)): phase
        for phase in (Phase.COMPUTING, Phase.FORMING, Phase.HEALING, Phase.LOADING, Phase.PARKED)
    }
    assert [*told] == ["working", "forming", "healing", "loading", "ready"]
    assert condition(group(0, Phase.STARTING, "starting")) == "starting"
    assert condition(group(0, state="suspect")) == "suspect" and condition(group(0, state="drained")) == "drained"


def test_a_lighthouse_that_does_not_answer_is_told_and_what_was_seen_stays() -> None:
    class Away:
        def status(self, job: str) -> JobStatus:
            raise PlanariaError("the lighthouse at a:1 does not answer")

    view = View()
    view.take(job_of([group(0)]), 10.0)
    view.look(cast(OperatorClient, Away()), "train")
    seen = lines(view, now=25.0)
    assert seen[0].startswith("train  step 40") and seen[1].startswith("no answer for 15 s; what follows is older.")
    assert len(lines(view, width=20, height=5, now=25.0)) >= 5  # a terminal that is too small is no error


def test_a_real_job_on_a_real_terminal(start_run: Callable[..., Run]) -> None:
    run = start_run("--groups", "2", SPEAKER, "100000", "0.02")
    run.until(lambda: run.step_of(1) >= 3)
    command = [sys.executable, "-m", "planaria", "top", "--log-dir", str(run.logs), "-n", "0.2"]

    def once() -> str:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=plain_environ(), check=True
        ).stdout

    told = run.until(lambda: found if "██" in (found := once()) else "")  # heartbeats come once a second
    assert "2 of 2 groups at work" in told and "█ 2 working" in told
    owner, terminal = pty.openpty()
    environ = plain_environ(TERM="xterm")
    watching = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environ)
    os.close(terminal)
    shown, deadline = "", time.monotonic() + 60
    while len(set(re.findall(r"step (\d+)", shown))) < 3:
        assert time.monotonic() < deadline, shown
        if select.select([owner], [], [], 0.1)[0]:
            shown += os.read(owner, 1 << 16).decode(errors="replace")
    watching.send_signal(signal.SIGINT)
    while watching.poll() is None:
        if select.select([owner], [], [], 0.1)[0]:
            try:
                shown += os.read(owner, 1 << 16).decode(errors="replace")
            except OSError:
                break
    assert watching.wait(60) == 0 and "Traceback" not in shown
    os.close(owner)
    run.interrupt()
    assert run.wait() == 130
    assert "stopped" in once()
