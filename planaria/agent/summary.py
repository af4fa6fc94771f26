"""The last words of a run: for people on the terminal, for programs in ``summary.json``."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from planaria.agent.lives import Failure
from planaria.agent.proc import signal_name
from planaria.core.exits import EXIT_LEFT
from planaria.files import write_whole
from planaria.logs import LogFormat, json_line

_RULE = 78
_LATER_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Summary:
    """``seconds``: how long the run took. ``step``: steps committed, as far as this agent saw."""

    job: str
    exit_code: int
    reason: str
    groups: int
    step: int
    replacements: int
    seconds: float
    directory: Path
    failures: tuple[Failure, ...] = ()

    @property
    def outcome(self) -> str:
        if self.exit_code == 0:
            return "finished"
        if self.exit_code == EXIT_LEFT:
            return "left"
        return "stopped" if self.exit_code > 128 else "failed"

    @property
    def path(self) -> Path:
        return self.directory / "summary.json"

    def shown(self, form: LogFormat) -> str:
        """The last lines of the run's log."""
        if form is LogFormat.TEXT:
            return self.text()
        facts = {name: getattr(self, name) for name in ("job", "exit_code", "step", "replacements")}
        return json_line(self.text(), time.time(), kind="summary", seconds=round(self.seconds, 3), **facts)

    def write(self) -> None:
        """Write it whole or not at all. Raises OSError."""
        content = {
            "job": self.job,
            "outcome": self.outcome,
            "exit_code": self.exit_code,
            "reason": self.reason,
            "groups": self.groups,
            "step": self.step,
            "replacements": self.replacements,
            "seconds": round(self.seconds, 3),
            "first_failure": _fields(self.failures[0]) if self.failures else None,
            "failures": [_fields(failure) for failure in self.failures],
        }
        write_whole(self.path, json.dumps(content, indent=2) + "\n")

    def text(self) -> str:
        lost = len(self.failures)
        facts = [f"{self.step} steps committed"] if self.step else []
        facts += [f"{lost} {'group' if lost == 1 else 'groups'} lost"] if lost else []
        facts += [f"{self.replacements} replaced"] if self.replacements else []
        facts += [f"{self.seconds:.1f} s", f"logs in {self.directory}"]
        line = f"planaria: job {self.job} {self.outcome}: {self.reason} ({', '.join(facts)})"
        return line if self.outcome != "failed" or not self.failures else f"{line}\n{self._table()}"

    def _table(self) -> str:
        first, *later = self.failures
        lines = ["=" * _RULE, "First failure (root cause):"]
        how = "exit code" if first.returncode is None or first.returncode >= 0 else "signal"
        value = first.how()
        if first.returncode is not None:
            code = first.returncode
            value = str(code) if code >= 0 else f"{signal_name(-code)} ({-code})"
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first.at))
        rows = [
            ("group", f"{first.member.group} (incarnation {first.member.incarnation})"),
            *([("rank", str(first.rank))] if first.ranks > 1 else []),
            (how, value),
            ("time", when),
            ("step", str(first.step)),
            ("message", first.message.replace("\n", "\n" + " " * 14)),
            ("log file", str(first.log)),
        ]
        lines += [f"  {name:<9} : {value}" for name, value in rows]
        if later:
            lines += ["-" * _RULE, "Later failures:"]
            lines += [f"  {f.who} {f.how()}: {f.message.splitlines()[0]}" for f in later[:_LATER_SHOWN] if f.message]
            if len(later) > _LATER_SHOWN:
                lines.append(f"  and {len(later) - _LATER_SHOWN} more, all in summary.json")
        return "\n".join([*lines, "=" * _RULE])


def _fields(failure: Failure) -> dict[str, object]:
    code = failure.returncode
    return {
        "group": failure.member.group,
        "incarnation": failure.member.incarnation,
        "rank": failure.rank,
        "exit_code": code if code is not None and code >= 0 else None,
        "signal": -code if code is not None and code < 0 else None,
        "time": failure.at,
        "step": failure.step,
        "message": failure.message,
        "log_file": str(failure.log),
    }
