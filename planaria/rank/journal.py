"""What a rank leaves behind: a line per commit, a few per change of quorum, and the result."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from planaria.core.messages import NO_QUORUM, QuorumId
from planaria.files import write_whole

# A killed rank loses at most this much of its log; its peers wrote the same lines, but for those that have just healed:
# ``flush`` before somebody heals.
FLUSH_SECONDS = 0.5


class Journal:
    """``metrics.jsonl`` and ``result.json`` in a rank's directory; does nothing without a directory."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._file = (directory / "metrics.jsonl").open("a") if directory is not None else None
        self._flushed = time.monotonic()

    def commit(self, step: int, shards: int, metrics: Mapping[str, float]) -> None:
        """Step ``step`` (an index) was committed with the gradients of ``shards`` shards."""
        if self._file is None:
            return
        line = {"step": step, "shards": shards, "at": round(time.time(), 6), **metrics}
        with suppress(OSError):  # the disk is full: training goes on
            self._file.write(json.dumps(line) + "\n")
            if time.monotonic() - self._flushed > FLUSH_SECONDS:
                self.flush()

    def flush(self) -> None:
        """What was committed so far is to be found, whatever becomes of this process."""
        self._flushed = time.monotonic()
        if self._file is not None:
            with suppress(OSError):
                self._file.flush()

    def result(self, step: int, digest: str, metrics: Mapping[str, float]) -> None:
        if self._directory is None:
            return
        body = {"step": step, "digest": digest, "metrics": dict(metrics)}
        with suppress(OSError):  # the lighthouse is told as well
            write_whole(self._directory / "result.json", json.dumps(body, indent=1) + "\n", durable=False)

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


class QuorumJournal:
    """``quorums.jsonl`` in a rank's directory: when it heard of a quorum, had its communicator, had called the roll,
    had healed, and made its first commit under it. For whoever asks afterwards what a recovery consisted of. Written
    at once, each line in one write, on any thread: a change of quorum is rare, and who dies in it should have told."""

    def __init__(self, directory: Path | None) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = -1 if directory is None else os.open(directory / "quorums.jsonl", flags, 0o644)
        self._committed = NO_QUORUM

    def note(self, quorum: QuorumId, what: str, at: float | None = None, **facts: object) -> None:
        """``at``: when it was (unix seconds), if it is noted after what others wait for."""
        if self._file < 0:
            return
        when = time.time() if at is None else at
        line = {"at": round(when, 6), "quorum": str(quorum), "what": what, **facts}
        with suppress(OSError):  # the disk is full: training goes on
            os.write(self._file, json.dumps(line).encode() + b"\n")

    def committed(self, quorum: QuorumId, step: int) -> None:
        """Step ``step`` (a count) was committed under ``quorum``. The first under it is noted."""
        if quorum != self._committed:
            self._committed = quorum
            self.note(quorum, "committed", step=step)
