"""What Planaria says, for people or, with ``--log-format json``, for machines: then every line is a JSON object.

    {"at": "2026-11-29T01:20:00.123Z", "level": "info", "text": "group 3 …", "job": "train", "kind": "lost", "group": 3}

``at``, ``level`` and ``text`` are always there, and ``job`` where a line is about one; ``kind`` of an event, ``group``,
``incarnation``, ``rank``, ``step`` and ``quorum`` where they are known, ``stream`` of what a rank has printed.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from planaria.core.messages import Event


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


# Those of every line; a fact of an event that is called so gets another name.
_OWN = frozenset({"at", "level", "text", "logger", "job", "kind", "group"})
# Facts of events that are numbers wherever they are known; what may be several ("joined") never is one.
_NUMBERS = frozenset({"incarnation", "rank", "step", "exit_code", "pid", "members"})


def json_line(text: str, at: float, level: str = "info", **facts: Any) -> str:
    """``at``: unix seconds. What is None or empty in ``facts`` is left out."""
    when = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    known = {name: fact for name, fact in facts.items() if fact is not None and fact != ""}
    return json.dumps({"at": when, "level": level, "text": text, **known}, default=str)


def json_of(text: str, **facts: Any) -> str:
    """A line that a process has printed, now: as it is if it is one of these already."""
    return text if text.startswith('{"at": ') else json_line(text, time.time(), **facts)


def facts_of(event: Event) -> dict[str, Any]:
    """What an event is about, numbers as numbers."""
    facts: dict[str, Any] = {"kind": event.kind}
    if event.group >= 0:
        facts["group"] = event.group
    for name, value in event.data:
        facts[f"{name}_" if name in _OWN else name] = _number(value) if name in _NUMBERS else value
    return facts


def event_line(event: Event, job: str) -> str:
    return json_line(event.text, event.at, job=job, **facts_of(event))


def configure(form: LogFormat, text: str = "%(asctime)s %(message)s") -> None:
    """The log of a service, on standard error. ``text``: the format for people."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if form is LogFormat.JSON else logging.Formatter(text))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class _JsonLines(logging.Formatter):
    """``extra={"facts": {...}}`` of a record are its facts."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        facts = dict(getattr(record, "facts", {}))
        if record.exc_info:
            facts["traceback"] = self.formatException(record.exc_info)
        return json_line(facts.pop("text", text), record.created, record.levelname.lower(), logger=record.name, **facts)


def _number(value: str) -> object:
    return int(value) if value.isascii() and value.removeprefix("-").isdigit() and len(value) < 16 else value
