"""Finding out whether a thread waits for something that will never come.

A peer's death can make gloo lose an operation whose go-ahead it has just read (see ``exchange.sockets``): whoever waits
for it waits for ever, seen once in some hundred deaths. Nothing but the kernel's account of the thread shows that.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from planaria.core.exits import EXIT_FAILED

# A collective that has lost its connections ends within milliseconds, and NCCL's abort within a second; so long a sleep
# is no pause for breath.
ASLEEP_SECONDS = 2.0
_LOOK = 0.1


def end_if_asleep(
    thread: threading.Thread, still: Callable[[], bool], after: float, words: str, matters: Callable[[], bool]
) -> None:
    """From ``after`` seconds on and while ``still`` holds: if ``thread`` sleeps for ASLEEP_SECONDS without being woken
    once, end this process with ``words`` in its log. A thread that computes or waits for a busy machine does not sleep.
    While ``matters`` does not hold the thread may wait for anything, and what comes then has ``after`` seconds, too.
    Returns at once; a thread looks on, and ends with the process at the latest."""

    def look() -> None:
        woken: object = None
        pause.wait(after)
        while still():
            if not matters():
                woken = None
                pause.wait(max(after, ASLEEP_SECONDS))
                continue
            before, woken = woken, _sleep_of(thread)
            if woken is not None and woken == before:
                sys.stderr.write(f"{words}; this process ends\n")
                sys.stderr.flush()
                os._exit(EXIT_FAILED)
            pause.wait(ASLEEP_SECONDS)

    pause = threading.Event()
    threading.Thread(target=look, name="planaria-stuck", daemon=True).start()


def ended(thread: threading.Thread) -> bool:
    """Wait until ``thread`` has ended. False as soon as it has slept for ASLEEP_SECONDS without being woken once: it
    will not end."""
    asleep: tuple[float, tuple[str, ...] | None] = (time.monotonic(), None)
    while thread.is_alive():
        now, sleep = time.monotonic(), _sleep_of(thread)
        if sleep is None or sleep != asleep[1]:
            asleep = now, sleep
        elif now - asleep[0] >= ASLEEP_SECONDS:
            return False
        thread.join(_LOOK)
    return True


def _sleep_of(thread: threading.Thread) -> tuple[str, ...] | None:
    """If the thread sleeps, the same for as long as it is not woken; else None."""
    # In a process that was forked Python 3.11 knows the main thread by the number that it had before.
    number = os.getpid() if thread is threading.main_thread() else thread.native_id
    try:
        with open(f"/proc/self/task/{number}/status") as file:
            facts = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except OSError:
        return None
    if not facts.get("State", "").startswith("S"):
        return None
    return facts["voluntary_ctxt_switches"], facts["nonvoluntary_ctxt_switches"]
