"""The picture of ``planaria plan``: where the time goes, and how much luck matters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from planaria.sim.goodput.search import Answer, Question

# In the order of the ledger; "kept" is what is left.
_COLOURS = {
    "kept": "0.85", "overhead": "tab:olive", "absent": "tab:cyan", "uneven": "tab:blue", "stalled": "tab:red",
    "healing": "tab:pink", "redone": "tab:orange", "saving": "tab:green", "restarting": "tab:purple",
    "waiting": "tab:brown",
}  # fmt: skip


def draw(path: Path, question: Question, answers: Sequence[Answer]) -> None:
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(11, 1.6 + 0.7 * len(answers)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [each.strategy.name for each in answers]
    shares = [each.shares() for each in answers]
    start = [0.0] * len(answers)
    for part, colour in _COLOURS.items():
        widths = [100 * each[part] for each in shares]
        left.barh(names, widths, left=start, color=colour, label=part if max(widths) >= 0.05 else None)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    # Kept work alone would fill the picture: what differs is the rest.
    lowest = min(100 * each["kept"] for each in shares)
    left.set_xlim(max(0.0, 5 * (lowest // 5) - 5), 100)
    left.invert_yaxis()
    left.set(xlabel="% of the time", title="where the time goes")
    left.legend(fontsize="small", loc="lower left")
    for row, each in enumerate(answers):
        values = [100 * outcome.effective for outcome in each.outcomes]
        right.plot(values, [row] * len(values), "o", color="tab:blue", alpha=0.35, markersize=4)
        right.plot([sum(values) / len(values)], [row], "|", color="black", markersize=16)
    right.set(xlabel="effective training time, %", title=f"{question.seeds} runs of {question.days:g} days each")
    right.grid(axis="x", alpha=0.3)
    figure.suptitle(f"{question.gpus:,} GPUs, one failure in {question.hazards.mtbf_gpu_hours:,.0f} GPU hours")
    figure.savefig(path, dpi=120, format="png")
