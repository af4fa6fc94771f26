"""Finding out whether a thread waits for something that will never come.

A peer's death can make gloo lose an operation whose go-ahead it has just read (see ``exchange.sockets``): whoever waits
for it waits for ever, seen once in some hundred deaths. Nothing but the kernel's account of the thread shows that.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from planaria.core.exits import EXIT_FAILED

# A collective that has lost its connections ends within milliseconds; so long a sleep is no pause for breath.
ASLEEP_SECONDS = 1.0


def end_if_asleep(
    thread: threading.Thread, still: Callable[[], bool], after: float, words: str, matters: Callable[[], bool]
) -> None:
    """From ``after`` seconds on and while ``still`` holds: if ``thread`` sleeps for a whole second without being woken
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


def _sleep_of(thread: threading.Thread) -> tuple[str, ...] | None:
    """If the thread sleeps, the same for as long as it is not woken; else None."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/status") as file:
            facts = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except OSError:
        return None
    if not facts.get("State", "").startswith("S"):
        return None
    return facts["voluntary_ctxt_switches"], facts["nonvoluntary_ctxt_switches"]
