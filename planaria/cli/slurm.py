"""``planaria run --engine slurm``: a supervisor that keeps one job of Slurm for every group.

It needs a login node, or a job of one CPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from dataclasses import asdict
from pathlib import Path

import typer

from planaria.cli import engine as engines
from planaria.cli import supervisor
from planaria.cli.logdir import held, usable
from planaria.cli.options import RunOptions
from planaria.cli.supervisor import Supervisor
from planaria.engines.keeper import HostAway
from planaria.engines.slurm import commands, scripts
from planaria.engines.slurm.host import SlurmHost, jobs_before
from planaria.engines.slurm.steps import StepHost
from planaria.errors import UsageError
from planaria.lighthouse.server import refuse_strangers
from planaria.wire.channel import join_address

LOG = "slurm.log"
BEFORE = "jobs_before.json"  # numbers of jobs of earlier runs of the same name


def run(options: RunOptions, ctx: typer.Context) -> int:
    """The exit code of the job; 0 for a whole allocation that was asked for."""
    template = _template(options, ctx)
    whole, allocation = ctx.params["single_allocation"], os.environ.get("SLURM_JOB_ID", "")
    outside = whole and not allocation
    if options.lighthouse is None and not outside:
        refuse_strangers(join_address(_host(options), 0), None)
    if outside or ctx.params["dry_run"]:
        texts = [scripts.whole(template, options.groups, _again(options, template, ctx))] if whole else []
        texts = texts or [scripts.render(template, group, 0) for group in range(options.groups)]
        if ctx.params["dry_run"]:
            print("\n".join(texts), end="")
            return 0
        commands.check_present()
        return asyncio.run(_submit(texts[0], options))
    commands.check_present()
    with held(options.log_dir):
        if not supervisor.goes_on(options):
            before = frozenset[str]() if whole else asyncio.run(_jobs_before(options))
            supervisor.begin_anew(options)
            with usable(options.log_dir):
                (options.log_dir / BEFORE).write_text(json.dumps(sorted(before)))
        return asyncio.run(_supervise(options, template, allocation if whole else ""))


async def _supervise(options: RunOptions, template: scripts.Template, allocation: str) -> int:
    """``allocation``: in whose steps groups run; empty: each has a job of its own."""
    if allocation:
        steps = StepHost(template, allocation)
        kept = Supervisor(options, "slurm", _host(options), LOG, lambda note: steps)
    else:
        before = _read_before(options.log_dir / BEFORE)
        kept = Supervisor(options, "slurm", _host(options), LOG, lambda note: SlurmHost(template, note, before))
    return await kept.run()


async def _jobs_before(options: RunOptions) -> frozenset[str]:
    try:
        return await jobs_before(options.job)
    except HostAway as error:
        raise UsageError(f"--engine slurm: {error}; try again") from None


async def _submit(script: str, options: RunOptions) -> int:
    try:
        number = await commands.submit(script)
    except HostAway as error:
        raise UsageError(f"--engine slurm: {error}; try again") from None
    log = options.log_dir / "slurm.log"
    print(f"planaria: job {options.job} is asked for, as Slurm's job {number}; its output goes to {log}")
    return 0


def _again(options: RunOptions, template: scripts.Template, ctx: typer.Context) -> list[str]:
    """This very call, for inside of the allocation."""
    words = engines.words_of(ctx, ("job", "log_dir", "credentials", "token_file"))
    ours = ["--engine", "slurm", "--single-allocation", "--job", options.job, "--log-dir", str(options.log_dir)]
    return [*template.planaria, "run", *ours, *supervisor.credentials(), *words, *template.script]


def _host(options: RunOptions) -> str:
    """Where the other nodes reach this one."""
    return options.host or socket.getfqdn()


def _template(options: RunOptions, ctx: typer.Context) -> scripts.Template:
    common = asdict(supervisor.template_of(options, ctx))
    return scripts.Template(**common, sbatch=scripts.options_given(ctx.params["sbatch"] or ()))


def _read_before(path: Path) -> frozenset[str]:
    try:
        return frozenset(map(str, json.loads(path.read_text())))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} is not what a supervisor has written ({error}); give another --log-dir") from None
