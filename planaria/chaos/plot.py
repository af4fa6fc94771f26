"""Both loss curves in one picture. matplotlib is an extra: ``pip install 'planaria[plot]'``."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

from planaria.chaos.inject import Injected
from planaria.chaos.verify import Record, Verdict
from planaria.errors import UsageError


def require(path: Path) -> None:
    """Raises UsageError if a plot at ``path`` cannot be made; call it before the work of hours, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed: pip install 'planaria[plot]'")
    if not path.resolve().parent.is_dir():
        raise UsageError(f"cannot write the plot {path}: there is no directory {path.resolve().parent}")


def draw(path: Path, verdict: Verdict, quiet: Record | None, injected: Sequence[Injected]) -> None:
    """Write the picture; its format follows from the name's ending."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    if quiet is not None:
        steps, losses = _finite([(line.step, line.loss) for line in quiet.lines])
        axes.plot(steps, losses, linewidth=5, color="0.8", label="quiet run, one process")
    steps, losses = _finite(verdict.curve)
    axes.plot(steps, losses, linewidth=1, color="tab:blue", label="under faults")
    for index, one in enumerate(injected):
        axes.axvline(one.step, color="tab:red", linewidth=0.6, alpha=0.6, label=None if index else "a fault")
    axes.set(xlabel="step", ylabel="loss", title=f"bit-identical: {'yes' if verdict.identical else 'no'}")
    axes.legend()
    figure.savefig(path, dpi=120)


def _finite(curve: Sequence[tuple[int, float | None]]) -> tuple[list[int], list[float]]:
    pairs = [(step, loss) for step, loss in curve if loss is not None and math.isfinite(loss)]
    return [step for step, _ in pairs], [loss for _, loss in pairs]
