"""``planaria run --engine NAME``: where groups run, and how that is started."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module

import typer

from planaria.cli.options import RunOptions
from planaria.errors import UsageError

LOCAL = "local"
# What an engine says itself for each agent that it places.
_PLACES = ("first_group", "local_groups", "placed", "node_rank", "group_addr")
# Each module has ``run(options, ctx) -> exit code``; those of engines that are not used are not imported.
_MODULES = {
    "k8s": "planaria.cli.k8s",
    "ray": "planaria.cli.ray",
    "slurm": "planaria.cli.slurm",
}
# What only one engine understands, by the name of the parameter of ``planaria run``.
OF_ENGINE = {
    "sbatch": ("slurm",),
    "single_allocation": ("slurm",),
    "dry_run": ("slurm", "k8s"),
    "image": ("k8s",),
    "namespace": ("k8s",),
    "pod_template": ("k8s",),
    "kubeconfig": ("k8s",),
    "resource": ("ray",),
}


def check(engine: str, ctx: typer.Context) -> None:
    """UsageError for an engine that there is not, and for what another one would understand."""
    if engine != LOCAL and engine not in _MODULES:
        raise UsageError(f"--engine {engine}: unknown; known engines: {', '.join((LOCAL, *_MODULES))}")
    for name, engines in OF_ENGINE.items():
        if engine not in engines and _given(ctx, name):
            raise UsageError(f"--{name.replace('_', '-')}: only --engine {' and '.join(engines)} knows it")
    for name in _PLACES if engine != LOCAL else ():
        if _given(ctx, name):
            raise UsageError(f"--{name.replace('_', '-')}: --engine {engine} places the groups itself; leave it out")


def run(engine: str, options: RunOptions, ctx: typer.Context) -> int:
    """The exit code of the job."""
    entry: Callable[[RunOptions, typer.Context], int] = import_module(_MODULES[engine]).run
    return entry(options, ctx)


def words_of(ctx: typer.Context, besides: Collection[str]) -> list[str]:
    """The options of ``planaria run`` that were given, on the command line or in the environment, as words for another
    one: without those of engines, and without the parameters ``besides``."""
    words: list[str] = []
    for param in ctx.command.params:
        name = param.name or ""
        left_out = name in ("engine", *OF_ENGINE) or name in besides
        if left_out or param.param_type_name != "option" or not _given(ctx, name):
            continue
        option = next(word for word in param.opts if word.startswith("--"))
        value = ctx.params[name]
        if isinstance(value, bool):
            words += [option] if value else []
        else:
            words += [option, str(value)]
    return words


def _given(ctx: typer.Context, parameter: str) -> bool:
    """On the command line or in the environment."""
    source = ctx.get_parameter_source(parameter)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")
