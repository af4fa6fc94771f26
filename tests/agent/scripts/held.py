"""For a process that is to die slowly: a thread by which a tracer (``tests.agent.slow_death``) can hold its remains."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path

_CLONE_FILES = 0x400
NAME = "held"


def hold_a_thread() -> None:
    """Start a thread that has no open files, so that those of the process are closed while it is still there, and
    write its number into the rank's directory. Call it before anything is opened that is to be closed at once."""
    there = threading.Event()

    def stay() -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_FILES) != 0:
            os._exit(1)
        number = Path(os.environ["PLANARIA_DIR"], NAME)
        number.with_suffix(".partial").write_text(str(threading.get_native_id()))
        number.with_suffix(".partial").rename(number)
        os.closerange(0, 1024)
        there.set()
        while True:
            time.sleep(3600)

    threading.Thread(target=stay, daemon=True).start()
    there.wait()
