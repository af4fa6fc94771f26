"""An urgent quorum that comes at the worst moment of an exchange, for the fronts of a job alone."""

from __future__ import annotations

from typing import Any

import pytest

from planaria.core.messages import Quorum, QuorumId
from planaria.rank.session import Session


def interrupt(monkeypatch: pytest.MonkeyPatch, agreed: bool) -> list[bool]:
    """The control thread hears of a new quorum when the second exchange is complete: before the group's ranks have
    agreed that it is, or right after. Returns a list that holds whether each exchange was complete."""
    attempt, agree, complete, due = Session.attempt, Session.agree, [], [False]

    def hear(session: Session) -> None:
        due[0] = False
        session._hear(Quorum(QuorumId(1, 2), (session.member,), ("",), True, ""))

    def attempts(session: Session, id: QuorumId, what: str, work: Any) -> bool:
        ok = attempt(session, id, what, work)
        if what == "exchange":
            complete.append(ok)
            due[0] = len(complete) == 2
            if due[0] and not agreed:
                hear(session)
        return ok

    def agrees(session: Session, note: Any) -> Any:
        outcome = agree(session, note)
        if due[0]:
            hear(session)
        return outcome

    monkeypatch.setattr(Session, "attempt", attempts)
    monkeypatch.setattr(Session, "agree", agrees)
    return complete
