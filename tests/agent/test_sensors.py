"""Sensors are processes: they are started again when they die or fall silent, and none is left."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from planaria.agent.proc import children_of_self
from planaria.agent.sensors import Sensor, read_out
from planaria.core.health import Reading

from .conftest import running


async def test_one_that_dies_or_falls_silent_is_started_again(tmp_path: Path) -> None:
    rounds: asyncio.Queue[list[Reading]] = asyncio.Queue()
    notes: asyncio.Queue[str] = asyncio.Queue()
    before = set(children_of_self())
    sensor = Sensor(("command", "true"), "the sensor", 0.1)
    task = asyncio.create_task(read_out(sensor, tmp_path / "log", rounds.put_nowait, notes.put_nowait))  # type: ignore[arg-type]
    seen: set[int] = set()
    for signum, said in ((signal.SIGKILL, "killed by SIGKILL"), (signal.SIGSTOP, "gave no answer for")):
        assert await rounds.get() == [Reading("command", 0.0)]
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
