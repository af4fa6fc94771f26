"""What an agent told the lighthouse and what still counts: one that was started again must hear it again."""

from __future__ import annotations

from dataclasses import dataclass

from planaria.core.messages import (
    Adopted,
    Died,
    Finished,
    Leaving,
    Member,
    Prepared,
    Ready,
    Report,
    Saved,
    Suspected,
    Trouble,
)


@dataclass(slots=True)
class _Record:
    ready: Ready | None = None
    adopted: Adopted | None = None
    suspected: Suspected | None = None
    trouble: Trouble | None = None
    finished: Finished | None = None
    leaving: Leaving | None = None
    prepared: Prepared | None = None
    died: Died | None = None


class Told:
    """The newest reports of every member that can still matter."""

    def __init__(self) -> None:
        self._records: dict[Member, _Record] = {}
        self._saved: Saved | None = None  # the newest checkpoint: it outlives its member

    def record(self, report: Report) -> None:
        if isinstance(report, Saved) and not report.trouble:
            self._saved = report
        if not isinstance(report, (Ready, Adopted, Trouble, Finished, Died, Suspected, Leaving, Prepared)):
            return
        record = self._records.setdefault(report.member, _Record())
        match report:
            case Ready():
                if record.ready is not None and report.after > record.ready.after:
                    record.leaving = None  # it was left out at once, by which nothing has moved
                record.ready, record.suspected, record.prepared = report, None, None
                if record.trouble is not None and record.trouble.quorum <= report.after:
                    record.trouble = None  # or else it may be all that tells of a newer quorum that broke
            case Adopted():
                record.adopted, record.suspected = report, None
                if record.trouble is not None and record.trouble.quorum < report.quorum:
                    record.trouble = None
            case Trouble():
                record.trouble = report
            case Finished():
                record.finished = report
            case Suspected():
                record.suspected = report
            case Prepared():
                record.prepared = None if report.trouble else report
            case Leaving():
                record.leaving = report
            case Died():
                # Whatever it was up to is over, except that it had finished. Earlier lives of its group cannot be
                # in question any more once a later one has been heard of.
                self._records[report.member] = _Record(finished=record.finished, died=report)
                self._forget_before(report.member)

    def again(self) -> list[Report]:
        """All that still counts, in an order in which it could have happened."""
        saved: list[Report] = [] if self._saved is None else [self._saved]
        return saved + [
            report
            for _, r in sorted(self._records.items())
            for report in (r.prepared, r.ready, r.adopted, r.suspected, r.trouble, r.leaving, r.finished, r.died)
            if report is not None
        ]

    def ready(self, member: Member) -> Ready | None:
        """Its newest Ready. Told once more, it takes a suspicion back."""
        record = self._records.get(member)
        return record.ready if record is not None else None

    def _forget_before(self, member: Member) -> None:
        self._records = {
            m: r
            for m, r in self._records.items()
            if m.group != member.group or m.incarnation >= member.incarnation or r.finished is not None
        }
