"""The ``planaria`` command and its subcommands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated

import typer

import planaria
from planaria.errors import PlanariaError

app = typer.Typer(
    name="planaria",
    help="Training that goes on when machines die, with the very weights of a run in which nothing failed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# (module, function, settings), in the order of the help text.
_COMMANDS: tuple[tuple[str, str, dict[str, object]], ...] = (
    # Everything after the script belongs to the script.
    ("planaria.cli.run", "run", {"allow_interspersed_args": False}),
    ("planaria.cli.train", "train", {"allow_interspersed_args": False}),
    ("planaria.cli.operate", "status", {}),
    ("planaria.cli.top", "top", {}),
    ("planaria.cli.operate", "kill", {}),
    ("planaria.cli.operate", "drain", {}),
    ("planaria.cli.operate", "undrain", {}),
    ("planaria.cli.operate", "migrate", {}),
    ("planaria.cli.operate", "scale", {}),
    ("planaria.cli.operate", "evict", {}),
    ("planaria.cli.lighthouse", "lighthouse", {}),
    ("planaria.cli.operator", "operator", {}),
    ("planaria.cli.certs", "certs", {}),
    ("planaria.cli.chaos", "chaos", {}),
    ("planaria.cli.demo", "demo", {}),
    ("planaria.cli.plan", "plan", {}),
    ("planaria.cli.explain", "explain", {}),
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"planaria {planaria.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _register(words: Sequence[str]) -> None:
    """Import and offer the command that ``words`` begin with, which halves the time to its first line; else all."""
    wanted = words[0] if words else ""
    known = {name for _, name, _ in _COMMANDS}
    for module, name, settings in _COMMANDS:
        if wanted in known and name != wanted:
            continue
        function: Callable[..., None] = getattr(import_module(module), name)
        app.command(name, context_settings=dict(settings))(function)


def main() -> None:
    """Entry point. A PlanariaError was written for people: its message, its exit code, no traceback."""
    try:
        _register(sys.argv[1:])
        app()
    except PlanariaError as error:
        print(f"planaria: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
