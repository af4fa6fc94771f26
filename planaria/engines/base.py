"""What every engine offers. The agent decides; an engine only does, and tells what happened."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from planaria.core.messages import Member


@dataclass(frozen=True, slots=True)
class Instance:
    """One incarnation that the engine knows of. ``pid`` is 0 until its process is there."""

    member: Member
    pid: int
    directory: Path  # logs, progress page and results of this incarnation


@dataclass(frozen=True, slots=True)
class Started:
    member: Member
    pid: int


@dataclass(frozen=True, slots=True)
class Ended:
    """``returncode`` as in ``subprocess``: negative for a signal; None if it never ran or nobody knows."""

    member: Member
    returncode: int | None
    cause: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The engine cannot create anything any more. ``reason`` is a sentence for people."""

    reason: str


Change = Started | Ended | Broken


class Engine(Protocol):
    """Where groups run.

    ``watch`` names the one function that is told of every change, in the order in which they happen and as soon
    as the engine knows: the death of a member is the start of every recovery. It must not block.
    """

    def watch(self, tell: Callable[[Change], None]) -> None: ...

    def create(self, group: int, incarnation: int) -> None:
        """Begin to start this incarnation. ``Started`` or ``Ended`` follows. Creating twice is creating once."""

    def delete(self, group: int, incarnation: int, signum: int = signal.SIGKILL) -> None:
        """Send ``signum`` to the incarnation; ``Ended`` follows when it is gone. Unknown ones are ignored."""

    def list(self) -> tuple[Instance, ...]:
        """All incarnations that were created and have not ended."""

    async def close(self) -> None:
        """End everything that is left, and the engine."""
