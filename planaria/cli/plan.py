"""``planaria plan``: what failures will cost a run, and which way to live with them costs least."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from planaria.cli.logdir import check_writable
from planaria.errors import UsageError
from planaria.sim.goodput import strategies
from planaria.sim.goodput.cluster import DARK, HOUR, LLAMA3_MTBF_HOURS, Hazards
from planaria.sim.goodput.ledger import Outcome
from planaria.sim.goodput.search import FOR_STATE, STATE_BYTES, STEP_BYTES, Answer, Question, answer
from planaria.sim.goodput.strategies import Strategy

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([mbt])", re.IGNORECASE)
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
_NAMES = {
    "overhead": "healthy overhead", "absent": "groups away", "uneven": "uneven shards", "stalled": "standing still",
    "healing": "healing", "redone": "work done twice", "saving": "checkpoints", "restarting": "restarts",
    "waiting": "waiting for machines",
}  # fmt: skip


def plan(
    gpus: Annotated[int, typer.Option(help="All GPUs, spares included.")],
    model: Annotated[str, typer.Option(help="Parameters: 405b, 1.5t, 800m.")] = "405b",
    mtbf_gpu_hours: Annotated[
        float, typer.Option(help="Hours of one GPU between two failures; default: Llama 3's.")
    ] = round(LLAMA3_MTBF_HOURS),
    group_size: Annotated[int | None, typer.Option(help="GPUs of a group; default: the best.")] = None,
    spares: Annotated[int | None, typer.Option(help="GPUs kept as spares; default: the best.")] = None,
    checkpoint_every: Annotated[float | None, typer.Option(help="Seconds between two; default: the best.")] = None,
    save_seconds: Annotated[float, typer.Option(help="For which a checkpoint stops the job.")] = 5.0,
    restart_minutes: Annotated[float, typer.Option(help="From a stop of the whole job to its next step.")] = 10.0,
    repair_hours: Annotated[float, typer.Option(help="Until a broken machine is back, on average.")] = 24.0,
    hard: Annotated[float, typer.Option(help="Share of the failures that need a repair.")] = 0.76,
    machine_gpus: Annotated[int, typer.Option(help="GPUs that are repaired together.")] = 8,
    gpu_memory: Annotated[float, typer.Option(help="GB of a GPU: says how small a group can be.")] = 80.0,
    step_seconds: Annotated[float, typer.Option(help="A step of the whole job without failures.")] = 10.0,
    shards_per_group: Annotated[int, typer.Option(help="Micro-batches of a group in a step.")] = 16,
    days: Annotated[float, typer.Option(help="Length of the run.")] = 30.0,
    only: Annotated[str | None, typer.Option(help="Strategies, with commas; default: all.")] = None,
    seeds: Annotated[int, typer.Option(help="Simulated runs of each strategy.")] = 20,
    seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw a PNG here.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """What failures will cost a run of --gpus, by simulation, for each way to live with them."""
    positive = {
        "--mtbf-gpu-hours": mtbf_gpu_hours, "--gpu-memory": gpu_memory, "--step-seconds": step_seconds, "--days": days,
        "--checkpoint-every": 1.0 if checkpoint_every is None else checkpoint_every,
    }  # fmt: skip
    for option, number in positive.items():
        if not (math.isfinite(number) and number > 0):
            raise UsageError(f"{option} {number:g}: must be more than 0")
    for option, number in (
        ("--save-seconds", save_seconds), ("--restart-minutes", restart_minutes), ("--repair-hours", repair_hours)
    ):  # fmt: skip
        if not (math.isfinite(number) and number >= 0):
            raise UsageError(f"{option} {number:g}: must not be negative")
    hazards = Hazards(mtbf_gpu_hours, hard, min(DARK, hard), repair_hours=repair_hours)
    question = Question(
        gpus, parameters_of(model), hazards, machine_gpus, gpu_memory, group_size, None, checkpoint_every, save_seconds,
        shards_per_group, step_seconds, days=days, seeds=seeds, first_seed=seed,
    )  # fmt: skip
    _check(question, hard)
    question = _with_spares(question, spares)
    chosen = _strategies(only, restart_minutes * 60)
    if json_file is not None:
        check_writable(json_file, "--json")
    if plot is not None:
        from planaria.chaos.plot import require

        require(plot)
        check_writable(plot, "--plot")
    console = Console()
    answers = []
    with console.status("simulating") as status:
        for strategy in chosen:
            status.update(f"simulating {strategy.name}")
            answers.append(answer(question, strategy))
    _show(console, question, answers, model)
    if json_file is not None:
        json_file.write_text(json.dumps(_record(question, answers), indent=1) + "\n")
    if plot is not None:
        from planaria.cli.plan_plot import draw

        draw(plot, question, answers)
        console.print(f"plot: {plot}", soft_wrap=True)


def parameters_of(text: str) -> float:
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"--model {text}: give its number of parameters, for example 405b, 1.5t or 800m")
    return float(match[1]) * _UNITS[match[2].lower()]


def _check(question: Question, hard: float) -> None:
    gpus, machine, size = question.gpus, question.machine_gpus, question.group_size
    if not 1 <= machine <= gpus or gpus > 10_000_000:
        raise UsageError(
            f"--gpus {gpus} with --machine-gpus {machine}: there is at least one machine (and no 10^7 GPUs)"
        )
    if gpus % machine:
        raise UsageError(f"--gpus {gpus}: not whole machines of {machine} GPUs (--machine-gpus)")
    if size is not None and not 1 <= size <= gpus:
        raise UsageError(f"--group-size {size}: must be between 1 and --gpus {gpus}")
    if size is not None and size % machine and machine % size:
        raise UsageError(f"--group-size {size}: must be whole machines of {machine} GPUs, or divide one")
    if question.smallest_group > gpus:
        raise UsageError(
            f"a group for this model needs {question.smallest_group} GPUs or more ({STEP_BYTES} bytes a parameter in "
            f"{FOR_STATE:.0%} of {question.gpu_gbytes:g} GB each), but there are {gpus}"
        )
    if size is not None and size < question.smallest_group:
        raise UsageError(
            f"--group-size {size}: the model needs {question.smallest_group} GPUs or more "
            f"({STEP_BYTES} bytes a parameter in {FOR_STATE:.0%} of {question.gpu_gbytes:g} GB each)"
        )
    if not 0 <= hard <= 1:
        raise UsageError(f"--hard {hard:g}: a share, between 0 and 1")
    if not 1 <= question.shards_per_group <= 1024:
        raise UsageError(f"--shards-per-group {question.shards_per_group}: must be between 1 and 1024")
    if not 1 <= question.seeds <= 10_000:
        raise UsageError(f"--seeds {question.seeds}: must be between 1 and 10000")
    failures = question.days * 24 * HOUR / question.mtbf
    if failures * question.seeds > 3_000_000:  # an hour on one core
        raise UsageError(
            f"{failures:.0f} failures in {question.days:g} days are too many to simulate {question.seeds} times: "
            "give fewer --days or --seeds"
        )


def _with_spares(question: Question, spares: int | None) -> Question:
    if spares is None:
        return question
    machine, size = question.machine_gpus, question.group_size or question.smallest_group
    if spares < 0 or spares % machine or spares + size > question.gpus:
        raise UsageError(
            f"--spares {spares}: whole machines of {machine} GPUs, and at least {size} GPUs for one group must be left"
        )
    return replace(question, spares=spares // machine)


def _strategies(only: str | None, restart: float) -> list[Strategy]:
    known = {each.name: each for each in strategies.ALL}
    names = list(known) if only is None else [name.strip() for name in only.split(",")]
    for name in names:
        if name not in known:
            raise UsageError(f"--only {name!r}: unknown strategy; known: {', '.join(known)}")
    return [replace(known[name], restart=restart) for name in dict.fromkeys(names)]


def _show(console: Console, question: Question, answers: list[Answer], model: str) -> None:
    hazards = question.hazards
    console.print(
        f"{question.gpus:,} GPUs for {question.days:g} days, {model}; a failure every {_time(question.mtbf)}, "
        f"{hazards.hard_out * question.gpus:.1f} machines in repair on average; {question.seeds} seeds",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(
        "strategy", "group", "spares", "checkpoint", "effective", "5 % .. 95 %", "of all GPUs", "samples lost"
    )
    for each in answers:
        low, high = each.quantile(_effective, 0.05), each.quantile(_effective, 0.95)
        spare = each.layout.gpus - each.layout.groups * each.layout.group_size
        lost = each.mean(lambda outcome: outcome.samples_lost)
        table.add_row(
            each.strategy.name + ("" if each.strategy.exact else " *"),
            str(each.layout.group_size), str(spare), _time(each.every), f"{each.mean(_effective):.2%}",
            f"{low:.2%} .. {high:.2%}", f"{each.mean(lambda outcome: outcome.of_all):.2%}",
            f"{lost:.2%}" if lost else "none",
        )  # fmt: skip
    console.print(table)
    if not all(each.strategy.exact for each in answers):
        console.print("* another result than without failures: steps with fewer samples", highlight=False)
    lost_to = Table("of the time, lost to", *(each.strategy.name for each in answers))
    shares = [each.shares() for each in answers]
    for part, name in _NAMES.items():
        if any(each[part] >= 5e-6 for each in shares):
            lost_to.add_row(name, *(f"{each[part]:.2%}" if each[part] >= 5e-6 else "" for each in shares))
    console.print(lost_to)
    best = max(answers, key=_work)
    console.print(f"most work of all GPUs: {best.strategy.name}", highlight=False)
    exact = [each for each in answers if each.strategy.exact]
    if not best.strategy.exact and exact:
        name = max(exact, key=_work).strategy.name
        console.print(f"most work with the result of a run without failures: {name}", highlight=False)
    console.print("\nassumptions:", highlight=False)
    for line in assumptions(question, [each.strategy for each in answers]):
        console.print(f"  - {escape(line)}", highlight=False, soft_wrap=True)


def assumptions(question: Question, chosen: list[Strategy]) -> list[str]:
    hazards = question.hazards
    lines = [
        "effective: samples that count, over those that the same groups make without failures and without any "
        "library's overhead; of all GPUs: the same, spares counted as GPUs that could train",
        f"failures: Poisson, one in {hazards.mtbf_gpu_hours:,.0f} GPU hours, idle GPUs too (Llama 3: 419 in 54 days on "
        f"16,384, {LLAMA3_MTBF_HOURS:,.0f}); {hazards.hard:.0%} need a repair, {hazards.dark:.0%} silence the machine, "
        f"{hazards.hang:.0%} are hangs (defaults: Llama 3's table)",
        f"a machine of {question.machine_gpus} GPUs is back after {hazards.repair_hours:g} h on average, exponential "
        "(an assumption); machines are interchangeable, so what is left of a broken group serves the others",
        f"a step takes {question.step_seconds:g} s (an assumption), the same per GPU whatever the size of a group, in "
        f"{question.shards_per_group} shards per group; shards that do not divide by the living groups are waited for",
        f"a checkpoint stops the job for {question.save:g} s (an assumption)",
        f"who comes back takes {STATE_BYTES} bytes a parameter at {question.heal_gbytes:g} GB/s into each GPU (0.8 of "
        "a 400 Gbit/s link, an assumption; bench/RESULTS.md: 86 GB/s over NVLink)",
        "Planaria's figures come from two GPUs: nothing of it was measured on more",
    ]
    named: dict[str, list[str]] = {}
    for each in chosen:
        for source in each.sources:
            named.setdefault(source, []).append(each.name)
    return lines + [f"{', '.join(names)}: {source}" for source, names in named.items()]


def _effective(outcome: Outcome) -> float:
    return outcome.effective


def _work(each: Answer) -> float:
    return each.mean(lambda outcome: outcome.of_all)


def _record(question: Question, answers: list[Answer]) -> dict[str, Any]:
    rows = []
    for each in answers:
        rows.append(
            {
                "strategy": each.strategy.name,
                "exact": each.strategy.exact,
                "group_size": each.layout.group_size,
                "groups": each.layout.groups,
                "spare_gpus": each.layout.gpus - each.layout.groups * each.layout.group_size,
                "checkpoint_every": each.every,
                "effective": [outcome.effective for outcome in each.outcomes],
                "of_all": [outcome.of_all for outcome in each.outcomes],
                "samples_lost": [outcome.samples_lost for outcome in each.outcomes],
                "time": each.shares(),
            }
        )
    return {
        "gpus": question.gpus,
        "days": question.days,
        "first_seed": question.first_seed,
        "mtbf_gpu_hours": question.hazards.mtbf_gpu_hours,
        "strategies": rows,
        "assumptions": assumptions(question, [each.strategy for each in answers]),
    }


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 2 * HOUR else f"{seconds / HOUR:.3g} h"
