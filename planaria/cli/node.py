"""``planaria run --node-rank K`` on a node beside node 0 of its groups."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

from planaria.agent.events import EventLog
from planaria.agent.helper import NodeHelper
from planaria.agent.logs import LogPump
from planaria.agent.proc import end_all_children
from planaria.cli.logdir import held, move_aside, move_groups_aside, usable
from planaria.cli.options import RunOptions, gpus_of, health_watch
from planaria.cli.supervise import SHOWN, follow, heeded, launch_of, say, terms_of
from planaria.engines.launch import Launch
from planaria.engines.local import LocalEngine
from planaria.files import write_whole


async def help_out(options: RunOptions) -> int:
    """Run this node's ranks for node 0 until the job is over; its exit code. Leaves no process behind."""
    with held(options.log_dir):
        move_aside(options.log_dir)
        _write_run(options)
        return await _help_out(options)


async def _help_out(options: RunOptions) -> int:
    with usable(options.log_dir):
        events = EventLog(options.log_dir / "events.jsonl")
    pump = LogPump()
    events.listen(lambda event: say(pump, options, event, SHOWN))
    if not options.quiet:
        events.listen(lambda event: follow(pump, options, event))

    def make_engine(job: str, host: str, path: Path) -> tuple[Launch, LocalEngine]:
        move_groups_aside(options.log_dir)  # those of another run of node 0
        launch = launch_of(options, job, options.host or host, path)
        return launch, LocalEngine(launch, gpus_of(options), options.standbys)

    helper = NodeHelper(
        options.node_rank,
        socket.gethostname(),
        terms_of(options),
        make_engine,
        events,
        health_watch(options),
        options.standbys,
        gpus=bool(gpus_of(options).ids),
    )
    loop = asyncio.get_running_loop()
    for signum in heeded():
        loop.add_signal_handler(signum, helper.interrupt, signum)
    try:
        code, reason = await helper.run(options.group_addr)
    finally:
        await helper.close()
        end_all_children()
        pump.close()
        events.close()
    print(f"planaria: node {options.node_rank} has ended: {reason} (logs in {options.log_dir})", file=sys.stderr)
    return code


def _write_run(options: RunOptions) -> None:
    content = {"job": options.job, "lighthouse": "", "node": options.node_rank, "pid": os.getpid()}
    write_whole(options.log_dir / "run.json", json.dumps(content, indent=2) + "\n", durable=False)
