"""Shows the ranks' output on the terminal, each line with its rank in front.

Ranks write to files of their own, never to the agent: a terminal that is paused, or an agent that is busy, must not
stop training, and nothing is lost when either dies. A thread here follows the files, because writing to a
terminal can block for as long as a person likes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TextIO

# Files cannot announce that they grew. Twenty looks a second seem immediate to people and cost nothing.
_POLL_SECONDS = 0.05
_CHUNK = 1 << 16
# A terminal that is paused (Ctrl-S) blocks the thread in a write that nothing can end; the files hold it all anyway.
_LAST_WORDS_SECONDS = 2.0


class LogPump:
    """Follows files and writes their lines to ``out``. Owner: whoever calls ``close``, which shows the rest."""

    def __init__(self) -> None:
        self._followed: list[_Followed] = []
        self._sayings: list[str] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="planaria-logs", daemon=True)
        self._thread.start()

    def follow(self, prefix: str, path: Path, out: TextIO, shown: Callable[[str], str] | None = None) -> None:
        """``shown`` makes of a line what is to be seen of it; by default it has ``prefix`` in front."""
        with self._lock:
            self._followed.append(_Followed(shown or (lambda text: f"[{prefix}] {text}"), path, out))

    def say(self, line: str) -> None:
        """Show a line of our own on standard error."""
        with self._lock:
            self._sayings.append(line)

    def release(self, path: Path) -> None:
        """The file will not grow any more: show what is left of it and forget it."""
        with self._lock:
            for followed in self._followed:
                if followed.path == path:
                    followed.complete = True

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join(_LAST_WORDS_SECONDS)

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(_POLL_SECONDS)
            self._show()
        with self._lock:
            for followed in self._followed:
                followed.complete = True
        self._show()

    def _show(self) -> None:
        with self._lock:
            now = [(followed, followed.complete) for followed in self._followed]
            sayings, self._sayings = self._sayings, []
        outs = set()
        for followed, complete in now:
            try:
                if followed.show(complete):
                    outs.add(followed.out)
            except (OSError, ValueError):
                complete = True  # the terminal is gone; the log file remains
                followed.complete = True
        with suppress(OSError, ValueError):
            sys.stderr.writelines(f"{line}\n" for line in sayings)
        for out in {*outs, sys.stderr}:
            with suppress(OSError, ValueError):
                out.flush()
        with self._lock:
            done = [followed for followed, complete in now if complete]
            self._followed = [followed for followed in self._followed if followed not in done]


class _Followed:
    def __init__(self, shown: Callable[[str], str], path: Path, out: TextIO) -> None:
        self.shown = shown
        self.path = path
        self.out = out
        self.complete = False
        self._file: BinaryIO | None = None
        self._partial = b""

    def show(self, complete: bool) -> bool:
        """Write the lines that are new. Returns whether there were any."""
        if self._file is None:
            try:
                self._file = self.path.open("rb")
            except FileNotFoundError:
                return False
        shown = False
        while chunk := self._file.read(_CHUNK):
            *lines, self._partial = (self._partial + chunk).split(b"\n")
            shown = self._write(lines) or shown
        if complete:
            shown = self._write([self._partial] if self._partial else []) or shown
            self._file.close()
        return shown

    def _write(self, lines: list[bytes]) -> bool:
        for line in lines:
            # Of a progress bar that draws over itself, what a person would see in the end.
            text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
            self.out.write(f"{self.shown(text)}\n")
        return bool(lines)
