"""``planaria demo``: a minute of training in which everything goes wrong, and the proof that nothing
came of it."""

from __future__ import annotations

from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from planaria.chaos import plot as plots
from planaria.chaos.schedule import demo_schedule
from planaria.chaos.session import Script
from planaria.cli.chaos import Proof, new_directory, prove
from planaria.cli.logdir import check_writable
from planaria.demo.files import text_files
from planaria.errors import UsageError

GROUPS = 4
SHARDS = 8
# Enough for every fault to find the job at full strength again after the one before.
LEAST_STEPS = 60
SCRIPTS = {"torch": "tiny_lm.py", "jax": "jax_lm.py"}
# A JAX group compiles before it is back, which takes some hundred of these small steps.
STEPS = {"torch": 150, "jax": 1000}
# Bytes of a sample, as the script has it when it is told nothing.
LENGTH = 64


def demo(
    data: Annotated[
        str | None, typer.Option(metavar="GLOB", help="Text to train on; default: Python's library.")
    ] = None,
    framework: Annotated[str, typer.Option(help="torch or jax.")] = "torch",
    plot: Annotated[Path | None, typer.Option(help="Draw both loss curves into this file (needs matplotlib).")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; default: 150, with JAX 1000.")] = None,
    seed: Annotated[int, typer.Option(help="Of the training.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the whole record here.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Run directory; default: a new one in planaria_logs.")] = None,
) -> None:
    """Train a tiny language model on the CPU, in 4 groups, while they are killed, stopped and robbed of their
    lighthouse; then train it quietly in one process, and compare every bit. Exit code 0 only if nothing was lost and
    all bits agree."""
    if framework not in SCRIPTS:
        raise UsageError(f"unknown framework {framework!r}; known: {', '.join(SCRIPTS)}")
    steps = STEPS[framework] if steps is None else steps
    if steps < LEAST_STEPS:
        raise UsageError(f"the demo's faults need at least {LEAST_STEPS} steps, not {steps}")
    if plot is not None:
        plots.require(plot)
    if json_file is not None:
        check_writable(json_file, "--json")
    if find_spec(framework) is None:
        raise UsageError(f"{framework} is not installed; pip install 'planaria[{framework}]'")
    text_files(data, LENGTH)  # before anything starts, not in four processes that have imported torch
    args = ["--steps", str(steps), "--seed", str(seed), *(["--data", data] if data else [])]
    script = Path(str(resources.files("planaria.demo").joinpath(SCRIPTS[framework])))
    proof = Proof(
        True,
        json_file,
        {"demo": True, "framework": framework, "data": data, "steps": steps, "seed": seed},
        plot,
        all_faults=True,
    )
    what = Script(script, tuple(args), GROUPS, SHARDS, device="cpu")  # for which it was made: a GPU would only wait
    code = prove(Console(), what, demo_schedule(steps), new_directory(log_dir, "demo"), proof)
    raise typer.Exit(code)
