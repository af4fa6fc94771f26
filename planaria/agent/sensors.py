"""Processes that read signs of health beside the agent: what they call may hang, as a driver does whose GPU is sick.

A sensor prints a line of JSON for every round of readings, or for something that people must know. It dies with its
agent. What it does itself is in ``sensor_main``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from planaria.agent.proc import describe, has_ended, kill_group, launch_beside
from planaria.core.health import Reading, reading_from
from planaria.core.liveness import STARTING, Rule, Silences

_MODULE = "planaria.agent.sensor_main"
# A process that was sent SIGKILL is gone in milliseconds, unless the kernel holds it: nobody waits longer for it.
_GONE_SECONDS = 1.0
# Of a command's output at its most, written out as readings.
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True, slots=True)
class Sensor:
    """What one such process does. ``words``: its arguments; ``what``: its name in a sentence."""

    words: tuple[str, ...]
    what: str
    every: float  # seconds between two rounds
    guards_itself: bool = False  # it tells of its own silences, and ends what it has begun


async def read_out(
    sensor: Sensor, log: Path, take: Callable[[Sequence[Reading]], None], note: Callable[[str], None]
) -> None:
    """Run ``sensor`` until cancelled, or until it says that there is nothing to read: it is started again if it dies,
    and if it falls silent. ``take`` gets every round of readings, ``note`` sentences for people. No process is left."""
    # Three rounds missed are a silence worth a restart.
    silences = Silences(Rule(3 * sensor.every, 3.0, 12 * sensor.every, 12 * sensor.every))
    while True:
        try:
            process, reader = await _start(sensor, log)
        except OSError as error:  # no memory for another process: perhaps later
            note(f"{sensor.what} cannot be started ({error.strerror}); trying on")
            await asyncio.sleep(sensor.every)
            continue
        try:
            silent = await _listen(reader, silences, sensor, take, note)
        finally:
            await _end(process, in_order=sensor.guards_itself)
        if process.poll() == 0 and not silent:
            return
        how = f"gave no answer for {silent:.1f} s and was killed" if silent else describe(process.poll() or 0)
        note(f"{sensor.what} {how}; it is started again")
        await asyncio.sleep(sensor.every)  # one that dies at once again and again costs what it costs anyway


async def _end(process: subprocess.Popen[bytes], in_order: bool) -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL) if in_order else (signal.SIGKILL,):
        kill_group(process.pid, signum)  # nothing happens if it is gone; it is not reaped before
        with suppress(TimeoutError):
            await asyncio.wait_for(has_ended(process), _GONE_SECONDS)
            return


async def _start(sensor: Sensor, log: Path) -> tuple[subprocess.Popen[bytes], asyncio.StreamReader]:
    words = (str(sensor.every), os.getcwd(), *sensor.words)
    process, told = launch_beside(_MODULE, words, log)
    reader = asyncio.StreamReader(_LONGEST_LINE)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(told, "rb")
    )
    return process, reader


async def _listen(
    reader: asyncio.StreamReader,
    silences: Silences,
    sensor: Sensor,
    take: Callable[[Sequence[Reading]], None],
    note: Callable[[str], None],
) -> float:
    """Pass on what it says until it ends. Returns for how long it was silent if that was too long, else 0."""
    heard, begins = time.monotonic(), True
    while True:
        # The first round of each process may start the driver, which takes long, and says nothing of the others.
        limit = STARTING.floor if begins else silences.limit
        try:
            async with asyncio.timeout(None if sensor.guards_itself else limit):
                line = await reader.readline()
        except TimeoutError:
            return time.monotonic() - heard
        if not line.endswith(b"\n"):
            return 0.0
        if not begins:
            silences.ended(time.monotonic() - heard)
        heard = time.monotonic()
        said = json.loads(line)
        if "note" in said:
            note(str(said["note"]))
        else:
            begins = False
            take([reading_from(facts) for facts in said["readings"]])
