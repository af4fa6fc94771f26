"""The run's record: one JSON line per event in ``events.jsonl``, and the newest ones for the live view."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from planaria.core.messages import Event

_KEPT = 200


class EventLog:
    """Appends whole lines, so that several writers and readers of one file do no harm to each other."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.newest: deque[Event] = deque(maxlen=_KEPT)
        self._file = path.open("a", buffering=1)
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
        if not self._file.closed:
            self._file.write(json.dumps(line, default=str) + "\n")
        self.newest.append(event)
        for listener, to_relayed in self._listeners:
            if to_relayed is relayed:
                listener(event)
