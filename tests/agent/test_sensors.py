"""Sensors are processes: they are started again when they die or fall silent, and none is left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from planaria.agent.proc import children_of_self
from planaria.agent.sensors import Sensor, read_out
from planaria.core.health import Reading

from .conftest import HOME, running

# The second process that runs this needs many times as long for its first round as any round of the first one took.
SLOW = """
import json, pathlib, sys, time
from planaria.agent.sensor_main import _tell
from planaria.core.health import Reading
began = pathlib.Path({began!r})
before = began.read_text() if began.exists() else ""
began.write_text(before + "x")
time.sleep(4.0 if before else 0.0)
for _ in range(1000 if before else 4):
    _tell([Reading("command", float(len(before)))])
    time.sleep(0.01)
sys.exit(1)
"""


async def test_one_that_dies_or_falls_silent_is_started_again(tmp_path: Path) -> None:
    rounds: asyncio.Queue[list[Reading]] = asyncio.Queue()
    notes: asyncio.Queue[str] = asyncio.Queue()
    before = set(children_of_self())
    sensor = Sensor(("command", "true"), "the sensor", 0.5)

    def note(text: str) -> None:
        if text.startswith("the sensor"):  # not that `true` takes longer than half a second, on a loaded machine
            notes.put_nowait(text)

    task = asyncio.create_task(read_out(sensor, tmp_path / "log", rounds.put_nowait, note))  # type: ignore[arg-type]
    seen: set[int] = set()
    for signum, said in ((signal.SIGKILL, "killed by SIGKILL"), (signal.SIGSTOP, "gave no answer for")):
        while not (found := await rounds.get()):
            pass
        assert found == [Reading("command", 0.0)]
        (pid,) = set(children_of_self()) - before
        seen.add(pid)
        os.kill(pid, signum)
        note = await notes.get()
        assert note.startswith(f"the sensor {said}") and note.endswith("it is started again")
        while not rounds.empty():
            rounds.get_nowait()
    await rounds.get()
    seen |= set(children_of_self()) - before
    assert len(seen) == 3
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not any(running(pid) for pid in seen)


async def test_one_that_is_slow_to_start_again_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver, or a loaded machine: its rounds have come quickly before, but every process begins with a long one."""
    monkeypatch.setattr("planaria.agent.sensors._MODULE", "slow_sensor")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{HOME}")
    began = tmp_path / "began"
    (tmp_path / "slow_sensor.py").write_text(SLOW.format(began=str(began)))
    rounds: asyncio.Queue[int] = asyncio.Queue()
    notes: asyncio.Queue[str] = asyncio.Queue()
    sensor = Sensor(("x",), "the sensor", 0.5)
    take: Callable[[Sequence[Reading]], None] = lambda found: rounds.put_nowait(int(found[0].value))  # noqa: E731
    task = asyncio.create_task(read_out(sensor, tmp_path / "log", take, notes.put_nowait))
    while await rounds.get() < 1:  # the second process has begun, and said something
        pass
    assert "exited with code 1" in await notes.get() and notes.empty()
    assert began.read_text() == "xx", "no other was started meanwhile"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_a_command_has_begun_ends_with_its_sensor(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    script = f"sleep 1000 & echo $$ $! > {begun}.new; mv {begun}.new {begun}; wait"
    sensor = Sensor(("command", "sh", "-c", script), "the sensor", 60.0, guards_itself=True)
    task = asyncio.create_task(read_out(sensor, tmp_path / "log", lambda _: None, print))
    while not begun.exists():
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    while any(running(int(pid)) for pid in begun.read_text().split()):
        await asyncio.sleep(0.01)


async def test_without_anything_to_read_it_says_why_and_ends(tmp_path: Path) -> None:
    notes: list[str] = []
    await read_out(Sensor(("gpus", "no-such-gpu"), "the sensor", 0.1), tmp_path / "log", lambda _: None, notes.append)
    assert len(notes) == 1 and "are not read" in notes[0]
