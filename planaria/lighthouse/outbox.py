"""A bounded queue towards somebody who may read slowly, or not at all."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Filled without ever blocking; emptied by one task. Whoever lets it fill up is cut off, for the
    lighthouse must neither wait for a reader nor keep everything for it. Being cut off costs little: it comes
    back and is told what counts.
    """

    def __init__(self, limit: int) -> None:
        self.verdict = ""  # why it was closed; empty while it is open
        self._limit = limit
        self._items: deque[T] = deque()
        self._news = asyncio.Event()

    def offer(self, item: T) -> bool:
        """Queue ``item``; False if it is closed, as it is from the moment when it is full."""
        if len(self._items) >= self._limit:
            self.close(f"too slow: {self._limit} messages were waiting to be read")
        if self.verdict:
            return False
        self._items.append(item)
        self._news.set()
        return True

    def close(self, verdict: str) -> None:
        """End it: ``take`` returns None at once, whatever is still queued. The first verdict stays."""
        self.verdict = self.verdict or verdict
        self._news.set()

    async def take(self) -> T | None:
        """The next item, None once it is closed."""
        while not self.verdict and not self._items:
            self._news.clear()
            await self._news.wait()
        return None if self.verdict else self._items.popleft()
