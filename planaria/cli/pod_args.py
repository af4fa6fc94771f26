"""What a FaultTolerantJob says to ``planaria run`` in its pods, read as ``planaria run`` itself will read it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import typer

from planaria.cli import engine as engines
from planaria.cli.run import run
from planaria.errors import UsageError

_FIELD = "spec.template.spec.containers[0].args"
# What the operator gives every group's process itself, or what has no place in a pod.
_NOT_HERE = (
    *(
        "groups",
        "first_group",
        "local_groups",
        "lighthouse",
        "job",
        "placed",
        "host",
        "log_dir",
        "shards",
        "min_groups",
    ),
    *("nproc_per_group", "nnodes", "node_rank", "group_addr", "credentials", "token_file", "http"),
    *("max_replacements", "restart_backoff", "engine", "live"),
)


def check(args: Sequence[str]) -> None:
    """UsageError for what every pod would refuse, and for what the operator says itself."""
    if any("$(" in arg.replace("$$", "") for arg in args):
        return  # Kubernetes puts in what is not known here
    try:
        ctx = _command().make_context("planaria run", [arg.replace("$$", "$") for arg in args])
    except Exception as error:
        # Of click, which typer may bring with it or not, so its classes have no name that always holds.
        if not isinstance(error, UsageError) and not hasattr(error, "format_message"):
            raise
        said = str(error) if isinstance(error, UsageError) else str(error.format_message())
        raise UsageError(f"{_FIELD}: {said[:1].lower()}{said[1:]}") from None
    for name in (*_NOT_HERE, *engines.OF_ENGINE):
        if (source := ctx.get_parameter_source(name)) is not None and source.name == "COMMANDLINE":
            option = name.replace("_", "-")
            raise UsageError(f"{_FIELD}: --{option} is what the operator says itself, or has no place in a pod")


@cache
def _command() -> Any:
    app = typer.Typer(add_completion=False)
    app.command("run", context_settings={"allow_interspersed_args": False, "help_option_names": []})(run)
    return typer.main.get_command(app)
