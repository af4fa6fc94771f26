"""``planaria run --health``: real processes, and a site's command that finds what the test wants."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import SCRIPTS, Run, plain_environ, running

StartRun = Callable[..., Run]
SPEAKER = str(SCRIPTS / "speaker.py")
LONG = ("100000", "0.01")  # steps, seconds: the test ends the run
# A node is sick while the file `sick` is there, GPU 0 while `sick0` is.
CHECK = """#!/bin/sh
echo $$ >> checks
[ -e sick0 ] && echo '{"signal": "ecc", "value": 3, "device": 0}' || echo '{"signal": "ecc", "value": 0, "device": 0}'
if [ -e sick ]; then echo "the disk is full"; exit 1; fi
"""
RULES = """
every = 0.05
share = %s
[command]
run = "./check"
every = 0.1
[rules.gpu]
signal = "command.ecc"
action = "drain"
above = 0
"""


class Site:
    """The directory in which runs are started, with the table and the command."""

    def __init__(self, home: Path, check: str = CHECK, share: float = 0.1) -> None:
        self.home = home
        (home / "rules.toml").write_text(RULES % share)
        (home / "check").write_text(check)
        (home / "check").chmod(0o755)

    def checks(self) -> list[int]:
        """Pids of the runs of the command so far."""
        path = self.home / "checks"
        return [int(line) for line in path.read_text().split()] if path.exists() else []


@pytest.fixture
def site(tmp_path: Path) -> Callable[..., Site]:
    def make(*words: Any, **more: Any) -> Site:
        (tmp_path / "run0").mkdir()
        return Site(tmp_path / "run0", *words, **more)

    return make


HANGS = "did not end within"


def told(run: Run) -> list[str]:
    """But for a command that is slow: these are due every tenth of a second, and a loaded machine takes longer."""
    return [text for text in all_told(run) if HANGS not in text]


def all_told(run: Run) -> list[str]:
    return [event["text"] for event in run.events("health")]


def at_work(run: Run, groups: int) -> None:
    for group in range(groups):
        run.pid_of(group)
        run.until(lambda group=group: run.step_of(group) >= 1)


def stopped(run: Run) -> None:
    run.interrupt()
    assert run.wait() == 130, run.err.read_text()


def test_a_group_moves_away_from_a_sick_gpu(start_run: StartRun, site: Callable[..., Site]) -> None:
    here = site(share=0.5)
    script = here.home / "script.py"
    script.write_text(f"import os, runpy\nprint(os.environ['CUDA_VISIBLE_DEVICES'])\nrunpy.run_path({SPEAKER!r})\n")
    environ = plain_environ(CUDA_VISIBLE_DEVICES="0,1,2")
    run = start_run("--groups", "2", "--health", "rules.toml", str(script), *LONG, environ=environ)
    at_work(run, 2)
    (here.home / "sick0").touch()
    moved = "group 0: GPU 0 shows ecc = 3 in the site's health command: drained; it starts again on other devices"
    run.until(lambda: moved in told(run))
    run.pid_of(0, 1)
    run.until(lambda: run.step_of(0, 1) >= 1)
    assert (run.logs / "rg0" / "i0" / "stdout.log").read_text().split()[0] == "0"
    assert (run.logs / "rg0" / "i1" / "stdout.log").read_text().split()[0] == "2"
    assert "leaves after" in (run.logs / "rg0" / "i0" / "stdout.log").read_text(), "nothing of it was killed"
    # Killed, the other group may have GPU 0 no more than its own again.
    os.kill(run.pid_of(1), signal.SIGKILL)
    run.pid_of(1, 1)
    (here.home / "sick0").unlink()
    run.until(lambda: "GPU 0 is well again, by rule gpu" in told(run))
    assert sum("GPU 0" in text for text in told(run)) == 2, "everything is told once"
    stopped(run)
    assert (run.logs / "rg1" / "i1" / "stdout.log").read_text().split()[0] == "1"
    assert moved in run.err.read_text() and "0 replaced" not in run.err.read_text()
    assert [failure["group"] for failure in run.summary()["failures"]] == [1], "a move is no failure"


def test_no_more_than_the_share_leaves_a_sick_node_and_never_the_last(
    start_run: StartRun, site: Callable[..., Site]
) -> None:
    here = site()
    gpus = plain_environ(CUDA_VISIBLE_DEVICES="0,1,2,3")  # one is free, but on the same node
    run = start_run("--groups", "3", "--health", "rules.toml", SPEAKER, *LONG, environ=gpus)
    at_work(run, 3)
    (here.home / "sick").touch()
    why = "node 0 failed the site's health command (the disk is full)"
    run.until(lambda: f"group 0: {why}: drained" in told(run))
    most = "1 of 3 groups is missing already, and at most 1 may be; planaria scale says how many the job is to have"
    run.until(lambda: f"group 1: {why}: not drained: {most}" in told(run))
    seen = len(here.checks())
    run.until(lambda: len(here.checks()) > seen + 5)
    left = {event["group"] for event in run.events("exit")}
    assert left == {0} and len(told(run)) == len(set(told(run))) <= 5, told(run)
    stopped(run)


def test_the_last_group_stays_whatever_the_share(start_run: StartRun, site: Callable[..., Site]) -> None:
    here = site(share=1.0)
    (here.home / "sick").touch()  # from the beginning: nobody is drained before there is training
    run = start_run("--groups", "2", "--health", "rules.toml", SPEAKER, *LONG)
    last = "is the only one that works; draining it would end the job"
    run.until(lambda: any(text.endswith(last) for text in told(run)))
    seen = len(here.checks())
    run.until(lambda: len(here.checks()) > seen + 5)
    assert len({event["group"] for event in run.events("exit")}) == 1
    assert len(told(run)) == len(set(told(run))) <= 4, told(run)
    stopped(run)


def test_groups_and_ranks_that_are_not_here_are_told(start_run: StartRun, site: Callable[..., Site]) -> None:
    lines = [f'{{"signal": "ecc", "value": 9, {who}}}' for who in ('"group": 7', '"group": 1, "rank": 5')]
    here = site(f"#!/bin/sh\necho $$ >> checks\necho '{lines[0]}'\necho '{lines[1]}'\n")
    run = start_run("--groups", "2", "--health", "rules.toml", SPEAKER, *LONG)
    for who in ("group 7", "group 1, rank 5"):
        text = f"the site's health command speaks of {who}, which is none of this agent's"
        run.until(lambda text=text: text in told(run))
    at_work(run, 2)
    seen = len(here.checks())
    run.until(lambda: len(here.checks()) > seen + 3)
    assert len(told(run)) == 2 and not run.events("exit") and not run.events("drain")
    stopped(run)


def test_a_dry_run_only_talks(start_run: StartRun, site: Callable[..., Site]) -> None:
    here = site()
    run = start_run("--groups", "2", "--health", "rules.toml", "--health-dry-run", SPEAKER, *LONG)
    at_work(run, 2)
    (here.home / "sick").touch()
    for group in range(2):
        text = f"group {group}: node 0 failed the site's health command (the disk is full): would be drained (dry run)"
        run.until(lambda text=text: text in told(run))
    seen = len(here.checks())
    run.until(lambda: len(here.checks()) > seen + 3)
    assert not run.events("exit") and not run.events("drain")
    stopped(run)


def test_a_command_that_hangs_is_killed_and_told_and_nothing_is_left(
    start_run: StartRun, site: Callable[..., Site]
) -> None:
    here = site("#!/bin/sh\nsleep 1000 &\necho $! >> checks\nwait\n")
    run = start_run("--groups", "2", "--health", "rules.toml", SPEAKER, *LONG)
    run.until(lambda: any(HANGS in text and "it was killed" in text for text in all_told(run)))
    run.until(lambda: len(here.checks()) >= 3)  # it is tried again, and again
    assert len(all_told(run)) == 1, "but told once"
    assert not running(here.checks()[0])
    stopped(run)
    run.until(lambda: not any(running(pid) for pid in here.checks()))


def test_nothing_is_left_of_it_when_the_agent_is_killed(start_run: StartRun, site: Callable[..., Site]) -> None:
    here = site("#!/bin/sh\nsleep 1000 &\necho $$ $! > new\nmv new checks\nwait\n")
    run = start_run("--groups", "1", "--health", "rules.toml", SPEAKER, *LONG)
    run.until(here.checks)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    while any(running(pid) for pid in here.checks()):
        time.sleep(0.01)


def test_another_node_of_the_groups_is_not_well(start_run: StartRun, site: Callable[..., Site], address: str) -> None:
    here = site()
    words = ("--groups", "2", "--nnodes", "2", "--group-addr", address, "--health-dry-run")
    one = start_run(*words, "--node-rank", "1", "--health", "rules.toml", SPEAKER, *LONG)
    zero = start_run(*words, SPEAKER, *LONG)  # the default table judges
    at_work(zero, 2)
    (here.home / "sick").touch()
    for group in range(2):
        text = f"group {group}: node 1 failed the site's health command (the disk is full): would be drained (dry run)"
        zero.until(lambda text=text: text in told(zero))
    stopped(zero)
    assert one.wait() == 130
    one.until(lambda: not any(running(pid) for pid in here.checks()))


@pytest.mark.parametrize(
    ("table", "part"),
    [
        ("[rules.ecc]\nabov = 3", "--health rules.toml: there is no key abov in [rules.ecc]; known keys:"),
        ("[rules.x]\nsignal='gremlins'\nabove=1\naction='drain'", "there is no signal gremlins; known signals:"),
        ("not toml", "--health rules.toml: Expected '='"),
        ("[command]\nrun='./no-such-check'", "there is no program ./no-such-check that could be run"),
        (None, "--health rules.toml: cannot read it (No such file or directory)"),
    ],
)
def test_bad_tables_are_bad_input(start_run: StartRun, tmp_path: Path, table: str | None, part: str) -> None:
    if table is not None:
        (tmp_path / "run0").mkdir()
        (tmp_path / "run0" / "rules.toml").write_text(table)
    run = start_run("--groups", "1", "--health", "rules.toml", SPEAKER, *LONG)
    assert run.wait() == 2
    errors = run.err.read_text()
    assert part in errors and "Traceback" not in errors and len(errors.splitlines()) == 1, errors
    assert not run.logs.exists(), "nothing was begun"
