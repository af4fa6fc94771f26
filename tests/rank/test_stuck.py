"""A thread that waits for what will never come ends the process; one that is merely slow does not."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from planaria.rank.stuck import ended

SCRIPT = """
import os, sys, threading, time
from planaria.rank.stuck import end_if_asleep
if {forked} and (child := os.fork()):  # as ranks are
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
over = threading.Event()
free = threading.Event()
free.set()
end_if_asleep(threading.main_thread(), lambda: not over.is_set(), 0.1, "it is stuck", lambda: not free.is_set())
until = time.monotonic() + 6
{body}
over.set()
print("went on")
"""


@pytest.mark.parametrize(
    ("body", "ends"),
    [
        ("free.clear(); threading.Lock().acquire() and threading.Event().wait()", True),
        ("time.sleep(6); free.clear(); threading.Event().wait()", True),
        ("time.sleep(6)", False),
        ("free.clear()\nwhile time.monotonic() < until: time.sleep(0.2)", False),  # a wait that is woken all the time
        ("free.clear()\nwhile time.monotonic() < until: pass", False),
    ],
)
@pytest.mark.parametrize("forked", [False, True])
def test_only_who_sleeps_for_long_is_stuck(body: str, ends: bool, forked: bool) -> None:
    script = SCRIPT.format(body=body, forked=forked)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == int(ends), done.stderr
    assert ("it is stuck; this process ends" in done.stderr) == ends and ("went on" in done.stdout) != ends


def test_a_thread_that_sleeps_for_long_is_waited_for_no_longer() -> None:
    over, until = threading.Event(), time.monotonic() + 5

    def works() -> None:
        while time.monotonic() < until:
            time.sleep(0.2)

    for target, ends in ((over.wait, False), (works, True), (lambda: None, True)):
        thread = threading.Thread(target=target)
        thread.start()
        assert ended(thread) is ends
    over.set()
