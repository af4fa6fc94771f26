"""What a run tells of itself: one line of metrics every few steps, on the screen, in a file, and for TensorBoard.

One group writes: the lowest of those that computed the step, which all of them know without asking. If it dies before
it has written, the line is missing; so the newest lines are part of the protected state, and whoever writes next writes
first what is missing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from planaria.errors import UsageError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# A line is missing only if its writer died in the moment before writing. So many in a row are one too many.
_KEPT = 8


class Recorder:
    """``state`` is to be protected: the newest lines, as far as they are the same on all groups.

    Args:
        path: of the file, JSON lines. Lines of steps that are done again (from a checkpoint, or because the file is an
            earlier run's) are replaced.
        tensorboard: directory for event files; None for none.
        total: steps of the run.
    """

    def __init__(self, path: Path, tensorboard: Path | None, total: int) -> None:
        self.state: dict[str, Any] = {"lines": []}
        if tensorboard is not None and find_spec("tensorboard") is None:
            raise UsageError("metrics.enable_tensorboard needs tensorboard: pip install 'planaria[train]'")
        self._path, self._tensorboard, self._total = path, tensorboard, total
        self._leads = False
        self._file: TextIO | None = None
        self._writer: SummaryWriter | None = None
        self._bar: Progress | None = None

    def computed(self, step: int, leads: bool) -> None:
        """To be called after the exchange of every step. ``leads``: this process writes."""
        self._leads = leads
        if not leads:
            self.close()
        elif sys.stdout.isatty():
            self._show(step)

    def line(self, values: Mapping[str, Any], speed: Mapping[str, float]) -> None:
        """``values``, with "step", are the same on all groups; ``speed`` is this process's own."""
        before = self.state["lines"]
        self.state["lines"] = [*before, dict(values)][-_KEPT:]
        if not self._leads:
            return
        self._say({**values, **speed})
        try:
            if self._file is None:
                self._take_over(values["step"], before)
            self._write({**values, **speed})
        except OSError as error:
            # Metrics are not worth a run. The next line starts anew, without what was written of this one.
            print(f"planaria: cannot write metrics to {self._path}: {error.strerror}", file=sys.stderr)
            self._drop_files()

    def close(self) -> None:
        self._drop_files()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _drop_files(self) -> None:
        with suppress(OSError):
            if self._file is not None:
                self._file.close()
            if self._writer is not None:
                self._writer.close()
        self._file = self._writer = None

    def _take_over(self, step: int, before: list[dict[str, Any]]) -> None:
        """Bring the file to where ``step``'s line is the next. It becomes a new file: a group that hung while it was
        the one to write, and wakes up now, still has the old one."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rows = self._path.read_text().split("\n")[:-1] if self._path.exists() else []
        kept = {number: row for row in rows if 0 <= (number := _step_of(row)) < step}
        draft = self._path.with_suffix(f".{os.getpid()}.draft")
        self._file = open(draft, "w")  # noqa: SIM115
        self._file.writelines(f"{row}\n" for row in kept.values())
        self._file.flush()
        os.replace(draft, self._path)
        if self._tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter  # only who writes pays for the import

            self._writer = SummaryWriter(str(self._tensorboard))
        for line in before:
            if line["step"] > max(kept, default=-1):
                self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name in line.keys() - {"step"}:
                self._writer.add_scalar(name, line[name], line["step"])
            self._writer.flush()

    def _show(self, step: int) -> None:
        if self._bar is None:
            self._bar = Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), auto_refresh=False)
            self._bar.add_task("", total=self._total, completed=step)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=step + 1, refresh=True)

    def _say(self, line: Mapping[str, Any]) -> None:
        parts = [f"{name.replace('_', ' ')} {_short(name, value)}" for name, value in line.items()]
        if self._bar is not None:
            self._bar.console.print("  ".join(parts))
        else:
            print("  ".join(parts), flush=True)


def _short(name: str, value: Any) -> str:
    if name == "mfu":
        return f"{value:.1%}"
    if name == "tokens_per_second":
        return f"{value:,.0f}"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _step_of(row: str) -> int:
    """-1 for what is no line of ours: one that a full disk cut short, and that another was written behind."""
    try:
        return int(json.loads(row)["step"])
    except (ValueError, TypeError, KeyError):
        return -1
