"""What a rank leaves behind: a line per commit, and the result."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

# A killed rank loses at most this much of its log; its peers wrote the same lines.
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
        self._file.write(json.dumps(line) + "\n")
        now = time.monotonic()
        if now - self._flushed > FLUSH_SECONDS:
            self._file.flush()
            self._flushed = now

    def result(self, step: int, digest: str, metrics: Mapping[str, float]) -> None:
        if self._directory is None:
            return
        body = {"step": step, "digest": digest, "metrics": dict(metrics)}
        draft = self._directory / "result.json.new"
        draft.write_text(json.dumps(body, indent=1) + "\n")
        os.replace(draft, self._directory / "result.json")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
