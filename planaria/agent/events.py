"""The run's record: one JSON line per event in ``events.jsonl``, and the newest ones for the live view."""

from __future__ import annotations

import errno
import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from planaria.core.messages import Event

_KEPT = 200


class EventLog:
    """Appends whole lines, so that several writers and readers of one file do no harm to each other.

    Whoever records something has more important things to do: what cannot be written (the disk is full) is left out.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.newest: deque[Event] = deque(maxlen=_KEPT)
        self._path = path
        self._file = path.open("ab", buffering=0)  # what could not be written must not be tried again
        self._torn = False  # the last line was cut short
        self._failing = False
        self._clock = clock
        self._listeners: list[tuple[Callable[[Event], None], bool]] = []

    def listen(self, listener: Callable[[Event], None], relayed: bool = False) -> None:
        """To this process's own events; ``relayed``: to the lighthouse's, which every agent of the job takes."""
        self._listeners.append((listener, relayed))

    def add(self, kind: str, text: str, group: int = -1, data: Mapping[str, object] | None = None) -> None:
        """Record something that happened now. ``data``: words and numbers."""
        facts = dict(data or {})
        event = Event(self._clock(), kind, text, group, tuple((key, str(value)) for key, value in facts.items()))
        self._write(event, facts, relayed=False)

    def take(self, event: Event) -> None:
        """Record an event that somebody else made (the lighthouse)."""
        self._write(event, dict(event.data), relayed=True)

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Event, data: dict[str, object], relayed: bool) -> None:
        line = {"at": event.at, "kind": event.kind, "text": event.text, "group": event.group, "data": data}
        failure = self._append(json.dumps(line, default=str).encode() + b"\n")
        self.newest.append(event)
        for listener, to_relayed in self._listeners:
            if to_relayed is relayed:
                listener(event)
        if failure and not self._failing:
            self._failing = True
            self.add("unwritten", f"{self._path} cannot be written ({failure}); the run goes on without its record")
        self._failing = bool(failure)

    def _append(self, line: bytes) -> str:
        """Why it could not be written; empty if it was."""
        if self._file.closed:
            return ""
        data = b"\n" + line if self._torn else line
        try:
            self._torn = self._file.write(data) < len(data)
        except OSError as error:
            return error.strerror or str(error)
        return os.strerror(errno.ENOSPC) if self._torn else ""
