"""A thread that waits for what will never come ends the process; one that is merely slow does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import threading, time
from planaria.rank.stuck import end_if_asleep
over = threading.Event()
free = threading.Event()
free.set()
end_if_asleep(threading.main_thread(), lambda: not over.is_set(), 0.1, "it is stuck", lambda: not free.is_set())
until = time.monotonic() + 4
{body}
over.set()
print("went on")
"""


@pytest.mark.parametrize(
    ("body", "ends"),
    [
        ("free.clear(); threading.Lock().acquire() and threading.Event().wait()", True),
        ("time.sleep(4); free.clear(); threading.Event().wait()", True),
        ("time.sleep(4)", False),
        ("free.clear()\nwhile time.monotonic() < until: time.sleep(0.2)", False),  # a wait that is woken all the time
        ("free.clear()\nwhile time.monotonic() < until: pass", False),
    ],
)
def test_only_who_sleeps_for_long_is_stuck(body: str, ends: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(body=body)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == int(ends), done.stderr
    assert ("it is stuck; this process ends" in done.stderr) == ends and ("went on" in done.stdout) != ends
