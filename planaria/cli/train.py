"""``planaria train``: the reference trainer, in as many groups and ranks as its configuration asks for."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated

import typer
from typer.main import get_command

from planaria.cli.options import new_job
from planaria.cli.run import run
from planaria.train.config import Config, keys, load
from planaria.train.tokens import prepare


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="What to train, and how.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[--section.key value]...", help="Replace keys; --help lists all.")
    ] = None,
) -> None:
    """Train the reference Llama as CONFIG.toml says.

    With several groups (fault_tolerance.enable) or ranks (parallelism) it starts `planaria run`, whose options can be
    given as PLANARIA_RUN_<NAME> in the environment; else it trains in this process.
    """
    words = args or []
    if "--help" in words:
        typer.echo(keys())
        return
    settings = load(config, words)
    if "PLANARIA_SOCKET" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _train_here(settings)  # a rank, started by somebody else
        return
    ranks = math.prod(settings.degrees().values())
    settings.micro_batches(settings.shards)
    prepare(settings)  # before there are ranks, that would only wait for each other
    if settings.groups * ranks == 1:
        _train_here(settings)
    else:
        _launch(settings, ranks, config, words)


def _train_here(settings: Config) -> None:
    from planaria.train.loop import train as loop  # torch: not before the configuration is known to be good

    loop(settings)


def _launch(settings: Config, ranks: int, config: Path, words: list[str]) -> None:
    ft = settings.fault_tolerance
    options: dict[str, object] = {
        "groups": settings.groups,
        "nproc-per-group": ranks,
        "shards": settings.shards,
        "min-groups": min(ft.min_replica_size, settings.groups),
        "job": settings.job.name or new_job(str(config)),
        "log-dir": Path(settings.job.dump_folder, "logs", f"group{ft.replica_id}" if ft.replica_id >= 0 else ""),
    }
    if settings.training.device != "auto":
        options["device"] = settings.training.device
    if ft.replica_id >= 0:
        options |= {"first-group": ft.replica_id, "local-groups": 1}
    if ft.lighthouse:
        options["lighthouse"] = ft.lighthouse
    launcher = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    launcher.command(context_settings={"allow_interspersed_args": False})(run)
    given = [f"--{name}={value}" for name, value in options.items()]
    get_command(launcher)([*given, "-m", "planaria.train", str(config.absolute()), *words], prog_name="planaria run")
