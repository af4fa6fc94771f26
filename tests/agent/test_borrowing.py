"""The command that is asked for nodes, run for real, however it behaves."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from planaria.agent.agent import Assignment
from planaria.agent.borrowing import Lender, _run
from planaria.cli.options import words_of
from planaria.core.messages import JobSpec, Member, Policy
from planaria.core.plan import GroupState, PlanSpec
from planaria.errors import UsageError

from .conftest import running
from .test_moves import Bench

LIMIT = 60.0  # so it is never in the way of a machine that is slow


async def run(script: str, directory: Path, limit: float = LIMIT) -> str:
    return await _run(["sh", "-c", script], dict(os.environ), directory / "log", limit)


async def test_what_it_says_is_kept_and_its_exit_code_counts(tmp_path: Path) -> None:
    assert await run("echo a node comes", tmp_path) == ""
    assert await run("echo none is free >&2; exit 3", tmp_path) == "exited with code 3"
    assert (tmp_path / "log").read_text() == "a node comes\nnone is free\n"
    assert "cannot be run" in await _run([str(tmp_path)], {}, tmp_path / "log", LIMIT)


async def test_one_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    said = await run(f"sleep 1000 & echo $! > {tmp_path}/child; wait", tmp_path, limit=2.0)
    assert said == "did not end within 2 s: it was killed"
    child = int((tmp_path / "child").read_text())
    while running(child):
        time.sleep(0.01)


async def test_what_a_good_one_leaves_behind_goes_on(tmp_path: Path) -> None:
    assert await run(f"sleep 1000 & echo $! > {tmp_path}/child", tmp_path) == ""
    child = int((tmp_path / "child").read_text())
    assert running(child)
    os.kill(child, 9)


async def test_nobody_waits_for_it_when_the_job_ends(tmp_path: Path) -> None:
    task = asyncio.create_task(run(f"echo $$ > {tmp_path}/self; sleep 1000", tmp_path))
    while not (tmp_path / "self").exists() or not (said := (tmp_path / "self").read_text()):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not running(int(said))


async def test_one_that_still_asks_for_nobody_is_ended_before_the_node_is_given_back(tmp_path: Path) -> None:
    """The group that waited is gone. What the command had was lost sight of: it went on after the job, and could have
    the node after that was given back."""
    script = f'echo "$1 $$" >> {tmp_path}/calls; [ "$1" = return ] || exec sleep 1000'
    spec = JobSpec("job", 2, ranks=2, policy=Policy.SPARE, spare_wait=LIMIT)
    lender = Lender(("sh", "-c", script, "borrow"), "127.0.0.1:1", 1)
    bench = Bench(tmp_path, Assignment(spec, PlanSpec(2), tmp_path, ranks=2, lender=lender))
    agent, life = bench.agent, bench.life(Member(1, 0))
    agent.standbys._living.clear()
    agent.closing.closed = frozenset({""})  # nothing can be started here

    def calls() -> list[list[str]]:
        return [line.split() for line in (tmp_path / "calls").read_text().splitlines()]

    assert agent.borrowing.wait(life, life.ranks[1])
    while not (tmp_path / "calls").exists() or not calls():
        await asyncio.sleep(0.01)
    asked = int(calls()[0][1])
    life.state = GroupState.DEAD
    agent.borrowing.tick(time.monotonic())
    await agent.borrowing.close()
    assert [verb for verb, _ in calls()] == ["ask", "return"]
    assert not running(asked)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    bench.events.close()


@pytest.mark.parametrize("command", ["", "no-such-program --ask", "sh 'open"])
def test_commands_that_cannot_be(command: str) -> None:
    with pytest.raises(UsageError, match="--borrow"):
        words_of(command, "--borrow")
