"""Tells people when buddy copies were asked for, and cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planaria.wire.page import Copies

if TYPE_CHECKING:
    from planaria.agent.agent import Agent


class CopiesWatch:
    """On the event loop's thread, for ``agent``. Each group is spoken of once."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._told: set[int] = set()

    def tick(self) -> None:
        if not self._agent.assignment.copies:
            return
        for life in self._agent.lives.alive():
            view = life.view
            if view is None or not view.committed_at_ns or life.member.group in self._told:
                continue
            if not view.guarded:
                why = (
                    "its script does not put the body of its loop under `with step.guard():`, so its ranks end together"
                )
            elif view.copies is Copies.NO_ROOM:
                why = f"there is no room for them in memory (see {life.speaker.log})"
            else:
                continue
            self._told.add(life.member.group)
            text = f"{life.member} keeps no copies of its state in memory: {why}; training goes on without"
            self._agent.events.add("uncopied", text, life.member.group)
