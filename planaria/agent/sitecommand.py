"""The site's own health command: one run of it, however it behaves.

Exit code 0 means that the node is well, another one that it is not. Lines of JSON on its standard output are readings
of the site's own signals; any other line is a remark, and the last one is quoted. What could not be run, was killed or
made no sense says nothing about the node: that is told to people, and no rule fires for it.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from planaria.agent.parent import die_with_parent
from planaria.agent.proc import describe, kill_group
from planaria.core.health import SITE, Reading, reading_from, shown
from planaria.core.liveness import Rule, Silences

# A thousand readings of a hundred characters; more is a command that went astray.
_MOST_BYTES = 1 << 17
# A process that was sent SIGKILL is gone in milliseconds, unless a driver holds it, or it is another user's (sudo).
_GONE_SECONDS = 5.0
_CANNOT_RUN = (126, 127)  # a shell's words for a command that it cannot execute, or does not find


@dataclass(frozen=True, slots=True)
class Done:
    """``problem``: why it says nothing, or less than it should; ``kind``: the same for the same sort of problem."""

    readings: tuple[Reading, ...] = ()
    problem: str = ""
    kind: str = ""


class SiteCommand:
    """``run`` may be called again and again; each run has a limit that follows from how long those before it took."""

    def __init__(self, argv: Sequence[str], every: float, cwd: str) -> None:
        self._argv, self._cwd = list(argv), cwd
        self._undead: subprocess.Popen[bytes] | None = None  # one that was killed, and is still there
        # Nobody needs an answer before the next is due. The first run finds cold caches; ten times as long as it may
        # take between two runs is a hang.
        self._silences = Silences(Rule(every, 3.0, 10 * every, 10 * every))

    def run(self) -> Done:
        name = f"the health command {self._argv[0]}"
        alive = Done(problem=f"{name} was killed and does not end; it is not run until it has", kind="undead")
        if self._undead is not None and self._undead.poll() is None:
            return alive
        parent = os.getpid()
        try:
            process = subprocess.Popen(
                self._argv,
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),  # safe: this process has one thread
            )
        except OSError as error:
            return Done(problem=f"{name} cannot be run: {error.strerror}", kind="start")
        began = time.monotonic()
        try:
            output, errors, late = _output_of(process, began + self._silences.limit)
        finally:
            kill_group(process.pid)  # whatever it left behind, too; not reaped yet, so the number is still its own
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GONE_SECONDS)
        if (code := process.returncode) is None:
            self._undead = process
            return alive
        with suppress(OSError):  # a full disk
            os.write(sys.stderr.fileno(), errors)
        took = time.monotonic() - began
        limit = self._silences.describe()
        self._silences.ended(took)
        if late:
            return Done(problem=f"{name} did not end within {took:.2g} s ({limit}): it was killed", kind="hang")
        if len(output) + len(errors) > _MOST_BYTES:
            return Done(problem=f"{name} printed more than {_MOST_BYTES} bytes: it was killed", kind="flood")
        if code < 0 or code in _CANNOT_RUN:
            return Done(problem=f"{name} {describe(code)}: that says nothing of the node", kind=f"code {code}")
        return _read(name, output.decode(errors="replace"), code)


def _read(name: str, output: str, code: int) -> Done:
    readings, remark, problem = [], "", ""
    for line in output.split("\n"):
        if not line.lstrip().startswith("{"):
            remark = line.strip() or remark
            continue
        try:
            said = reading_from(json.loads(line))
            if min(said.group, said.rank) < -1 or (said.rank >= 0 and said.group < 0 and not said.device):
                raise ValueError('"group" and "rank" count from 0, and a "rank" is one of a "group"')
            readings.append(replace(said, signal=SITE + said.signal, node=0))
        except RecursionError:
            problem = problem or f"{name} printed a line that is nested too deep to be a reading"
        except ValueError as error:
            problem = problem or f"{name} printed a line that is no reading ({error}): {shown(line.strip()[:100])}"
    text = shown(remark) if code else ""
    verdict = Reading("command", float(code != 0), text=text or (f"exit code {code}" if code else ""))
    return Done((verdict, *readings), problem, "rubbish" if problem else "")


def _output_of(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bytes, bool]:
    """What it printed until it ended, its errors, and whether it had not ended at the deadline. Processes that it
    leaves behind are not waited for, though they may hold its output open."""
    assert process.stdout is not None and process.stderr is not None
    found = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
    pidfd = os.pidfd_open(process.pid)
    late = False
    try:
        with process.stdout, process.stderr, selectors.DefaultSelector() as selector:
            for fd in found:
                os.set_blocking(fd, False)
                selector.register(fd, selectors.EVENT_READ)
            selector.register(pidfd, selectors.EVENT_READ)
            ended = False
            while not (ended or late) and sum(map(len, found.values())) <= _MOST_BYTES:
                ready = {key.fd for key, _ in selector.select(max(0.0, deadline - time.monotonic()))}
                ended, late = pidfd in ready, not ready
                for fd in found if ended else ready:
                    chunk = _take(fd, to_the_end=ended)
                    if not chunk and not ended:
                        selector.unregister(fd)  # it closed its output, and goes on
                    found[fd] += chunk
    finally:
        os.close(pidfd)
    output, errors = found.values()
    return output, errors, late


def _take(out: int, to_the_end: bool) -> bytes:
    found = b""
    while True:
        try:
            chunk = os.read(out, 1 << 16)
        except BlockingIOError:
            return found
        found += chunk
        if not chunk or not to_the_end or len(found) > _MOST_BYTES:
            return found
