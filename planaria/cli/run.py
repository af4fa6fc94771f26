"""``planaria run``: train a script in several groups that replace each other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from planaria.cli import engine as engines
from planaria.cli import options as opts
from planaria.cli.certs import CredentialsOption, TokenOption
from planaria.cli.logdir import directory_given
from planaria.cli.node import help_out
from planaria.cli.options import RunOptions
from planaria.cli.supervise import supervise
from planaria.core.exits import EXIT_INTERRUPTED
from planaria.engines.nodestream import DEFAULT_ADDRESS
from planaria.logs import LogFormat
from planaria.wire import membership


def _option(*names: str, help: str, **more: Any) -> Any:
    """An option in both spellings, also from the environment as PLANARIA_RUN_<NAME>."""
    long = next(name for name in names if name.startswith("--"))
    snake = "--" + long[2:].replace("-", "_")
    spellings = [*names, *([snake] if snake not in names else [])]
    variable = "PLANARIA_RUN_" + long[2:].replace("-", "_").upper()
    return typer.Option(*spellings, help=help, envvar=variable, show_envvar=False, **more)


def run(
    ctx: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Python script, or a module's name with -m.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own.")] = None,
    groups: Annotated[int, _option("--groups", help="Replica groups of the whole job.")] = 1,
    shards: Annotated[
        int | None,
        _option("--shards", help="Shards of every step; default: what the script says, else --groups."),
    ] = None,
    nproc_per_group: Annotated[
        int, _option("--nproc-per-group", help="Processes (ranks) of every group, on each node.")
    ] = 1,
    nnodes: Annotated[int, _option("--nnodes", help="Nodes over which every group is spread.")] = 1,
    node_rank: Annotated[
        int,
        _option("--node-rank", help="Which of them this is; 0 speaks for the groups, one beyond them has --standbys."),
    ] = 0,
    group_addr: Annotated[
        str | None,
        _option(
            "--group-addr",
            help=f"host:port of node 0, at which the other nodes find it; default with several: {DEFAULT_ADDRESS}.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        _option("--device", help="cpu, or cuda: every process gets a GPU of its own; default: cuda if there are any."),
    ] = None,
    lighthouse: Annotated[
        str | None,
        _option("--lighthouse", help="host:port of a lighthouse, or of several, with commas; default: one of its own."),
    ] = None,
    job: Annotated[str | None, _option("--job", help="Name of the job; default: made from the script's name.")] = None,
    first_group: Annotated[int, _option("--first-group", help="Number of the first group that runs here.")] = 0,
    local_groups: Annotated[
        int | None, _option("--local-groups", help="How many groups run here; default: all from --first-group on.")
    ] = None,
    placed: Annotated[
        bool,
        _option(
            "--placed",
            help="An engine placed the groups here: SIGTERM has them leave (exit code 75) while the others go on.",
        ),
    ] = False,
    policy: Annotated[
        str, _option("--policy", help="For a lost group's shards: redistribute, spare or shrink.")
    ] = "redistribute",
    spare_wait: Annotated[
        float | None,
        _option("--spare-wait", help="With --policy spare: seconds that others wait for a standby; default: 10."),
    ] = None,
    borrow: Annotated[
        str | None,
        _option("--borrow", help="With --policy spare: command that is asked for a node when no standby is left."),
    ] = None,
    reduction: Annotated[
        str, _option("--reduction", help="tree (bit-exact), fast, int8 or fp8 (for slow links).")
    ] = "tree",
    exact: Annotated[
        str | None,
        _option("--exact", help="bits or samples: what is promised; default: what the script says, else bits on CPUs."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        _option("--checkpoint", help="Directory for durable checkpoints; the job starts from the newest one in it."),
    ] = None,
    checkpoint_every: Annotated[
        int | None, _option("--checkpoint-every", help="Steps between them; default: what the script says, else 100.")
    ] = None,
    checkpoint_keep: Annotated[
        int | None, _option("--checkpoint-keep", help="How many are kept; default: what the script says, else 3.")
    ] = None,
    replay: Annotated[
        Path | None,
        _option(
            "--replay",
            help="Log directory (or membership.json) of a low-communication run: the same groups are left out again.",
        ),
    ] = None,
    module: Annotated[bool, _option("-m", "--module", help="SCRIPT is the name of a module, as in python -m.")] = False,
    log_dir: Annotated[
        Path | None,
        _option(
            "--log-dir",
            help="Directory of this run; default: ./planaria_logs/<job>.",
            parser=directory_given,
            metavar="DIRECTORY",
        ),
    ] = None,
    tee: Annotated[
        bool, _option("-t", "--tee", help="Show the ranks' output although --quiet or --live would not.")
    ] = False,
    log_format: Annotated[
        LogFormat,
        _option("--log-format", help="json: each line that is shown is a JSON object, and events are complete."),
    ] = LogFormat.TEXT,
    quiet: Annotated[bool, _option("--quiet", "-q", help="Only the log files get the ranks' output.")] = False,
    max_replacements: Annotated[
        int,
        _option(
            "--max-replacements",
            "--replace-budget",
            "--replace_budget",
            help="How often groups may be replaced in 10 minutes.",
        ),
    ] = 100,
    restart_backoff: Annotated[
        float, _option("--restart-backoff", help="Seconds before a group that failed twice at once restarts; doubles.")
    ] = 1.0,
    standbys: Annotated[
        int,
        _option("--standbys", help="Warm processes that wait here for a rank to be lost, and take its place at once."),
    ] = 0,
    buddy: Annotated[
        int | None,
        _option("--buddy", help="Every so many steps each rank's state is copied to another rank's memory."),
    ] = None,
    check_state: Annotated[
        int | None,
        _option(
            "--check-state",
            help="Compare the groups' parameters in every step and all that they hold every so many steps; 0: never.",
        ),
    ] = None,
    recheck: Annotated[
        float | None,
        _option("--recheck", help="Have two groups compute a shard, with this probability, and compare."),
    ] = None,
    min_groups: Annotated[int, _option("--min-groups", help="The job fails if fewer groups can be kept.")] = 1,
    live: Annotated[
        bool, _option("--live", help="A view of the groups in place of their output, on a terminal.")
    ] = False,
    http: Annotated[
        str | None,
        _option("--http", help="host:port of the own lighthouse's web pages and metrics; default: any on loopback."),
    ] = None,
    health: Annotated[
        str | None, _option("--health", help="Table of health rules (TOML) over the default ones, or off.")
    ] = None,
    health_dry_run: Annotated[
        bool, _option("--health-dry-run", help="Only say what would be done for the health of a group.")
    ] = False,
    host: Annotated[
        str | None,
        _option("--host", help="Address of this node for other nodes; default: as --group-addr has it, else loopback."),
    ] = None,
    engine: Annotated[
        str, _option("--engine", help="Where groups run: local (here), slurm (a job for each, kept alive), k8s or ray.")
    ] = engines.LOCAL,
    dry_run: Annotated[bool, _option("--dry-run", help="With an engine: print what it would submit.")] = False,
    sbatch: Annotated[
        list[str] | None,
        _option("--sbatch", help="With --engine slurm: an option of sbatch, as KEY=VALUE or KEY; may be repeated."),
    ] = None,
    single_allocation: Annotated[
        bool, _option("--single-allocation", help="With --engine slurm: one job with a step for every group.")
    ] = False,
    image: Annotated[
        str | None, _option("--image", help="With --engine k8s: the image with planaria and the script.")
    ] = None,
    namespace: Annotated[
        str | None, _option("--namespace", help="With --engine k8s: whose operator keeps the job.")
    ] = None,
    pod_template: Annotated[
        Path | None, _option("--pod-template", help="With --engine k8s: YAML of what pods are like (PodTemplateSpec).")
    ] = None,
    kubeconfig: Annotated[
        Path | None, _option("--kubeconfig", help="With --engine k8s: default $KUBECONFIG, else ~/.kube/config.")
    ] = None,
    resource: Annotated[
        list[str] | None,
        _option(
            "--resource",
            help="With --engine ray: what a node of a group takes, as NAME=AMOUNT; default: a CPU, and a GPU if there "
            "are any, for each of its processes; may be repeated.",
        ),
    ] = None,
    credentials: CredentialsOption = None,
    token_file: TokenOption = None,
) -> None:
    """Run SCRIPT in replica groups. A group that dies is replaced; the others go on, and no step is lost.

    Every option can also be given as PLANARIA_RUN_<NAME> in the environment. Ctrl-C lets all groups stop after
    the same step; a second one kills them.
    """
    name = job or opts.new_job(script)
    options = RunOptions(
        script=script,
        args=tuple(args or ()),
        module=module,
        groups=groups,
        shards=shards,
        lighthouse=lighthouse,
        job=name,
        first_group=first_group,
        local_groups=max(groups - first_group, 0) if local_groups is None else local_groups,
        policy=opts.policy_named(policy),
        reduction=reduction,
        checkpoint=None if checkpoint is None else checkpoint.absolute(),
        checkpoint_every=checkpoint_every,
        checkpoint_keep=checkpoint_keep,
        replay=None if replay is None else membership.read(replay).path.absolute(),
        log_dir=(log_dir or Path("planaria_logs") / name).absolute() / (f"node{node_rank}" if node_rank else ""),
        log_format=log_format,
        quiet=quiet and not tee,
        live=live and not tee,
        max_replacements=max_replacements,
        restart_backoff=restart_backoff,
        min_groups=min_groups,
        http=http,
        host=host,
        nproc_per_group=nproc_per_group,
        device=device,
        exact=exact,
        nnodes=nnodes,
        node_rank=node_rank,
        group_addr=group_addr or DEFAULT_ADDRESS,
        spread=nnodes > 1 or node_rank > 0 or group_addr is not None,
        health=opts.health_table(health, health_dry_run),
        standbys=standbys,
        spare_wait=spare_wait,
        borrow=opts.words_of(borrow, "--borrow"),
        buddy=buddy,
        check_state=check_state,
        recheck=recheck,
        placed=placed,
    )
    engines.check(engine, ctx)
    opts.check(options, here=engine == engines.LOCAL)
    try:
        if engine != engines.LOCAL:
            code = engines.run(engine, options, ctx)
        else:
            code = asyncio.run(supervise(options) if node_rank == 0 else help_out(options))
    except KeyboardInterrupt:  # before the agent could take it for a wish to stop in order
        code = EXIT_INTERRUPTED
    raise typer.Exit(code)
