"""What happened in a run, for people: the newest lines, each with its virtual time."""

from __future__ import annotations

from collections import deque

from planaria.core.messages import (
    Adopted,
    Corrupted,
    Desired,
    Died,
    Drain,
    Finished,
    Kill,
    Leaving,
    Migrate,
    Publish,
    Quorum,
    Ready,
    Refuse,
    Resume,
    Saved,
    Stop,
    Suspected,
    Trouble,
    Welcome,
)

KEPT = 2000


class Trace:
    """Lines are put together only when they are read: most runs pass and nobody looks."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str, tuple[object, ...]]] = deque(maxlen=KEPT)

    def add(self, now: float, text: str, *values: object) -> None:
        self._lines.append((now, text, values))

    def lines(self, count: int | None = None) -> list[str]:
        kept = list(self._lines)[-(count or KEPT) :]
        return [f"{now:9.4f}  {text.format(*(show(v) for v in values))}" for now, text, values in kept]


def show(value: object) -> str:
    """A message or a value in a few words."""
    match value:
        case Quorum(id, members, _, urgent, _, reason, founding):
            names = " ".join(f"{m.group}.{m.incarnation}" for m in members)
            kind = "founding" if founding else "urgent" if urgent else "planned"
            return f"{kind} {id} [{names}] ({reason})"
        case Publish(_, quorum):
            return f"publish {show(quorum)}"
        case Ready(_, address):
            return f"ready at {address}, step {value.step}" + ("" if value.initial else ", without a look at the disk")
        case Adopted(_, quorum_id, step):
            return f"adopted {quorum_id} at step {step}"
        case Trouble(_, quorum_id, step, text):
            return f"trouble in {quorum_id} at step {step}: {text}"
        case Finished(_, step):
            return f"finished at step {step}"
        case Died(_, cause):
            return f"died ({cause})"
        case Suspected(_, why):
            return f"suspected ({why})"
        case Corrupted(_, step, text):
            return f"corrupted at step {step}: {text}"
        case Saved(_, step):
            return f"saved step {step}"
        case Resume(reason, run):
            return f"resume {run}: {reason}"
        case Refuse(_, reason) | Stop(reason):
            return f"{type(value).__name__.lower()}: {reason}"
        case Drain() | Kill() | Migrate() | Leaving() | Desired() | Welcome():
            return str(value)
    return str(value)
