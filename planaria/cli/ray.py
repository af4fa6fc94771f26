"""``planaria run --engine ray``: a supervisor that keeps an actor of Ray for every group.

It runs on a node of the cluster, for instance as a job of Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from planaria.cli import supervisor
from planaria.cli.logdir import held, usable
from planaria.cli.options import RunOptions
from planaria.cli.supervisor import Supervisor
from planaria.errors import UsageError
from planaria.lighthouse.server import refuse_strangers
from planaria.wire.channel import join_address, split_address

if TYPE_CHECKING:
    from planaria.engines.placing import Template

# A machine that is there takes a connection at once, or refuses it; lost packets are sent again after one and three.
CONNECT_SECONDS = 5.0


def run(options: RunOptions, ctx: typer.Context) -> int:
    """The exit code of the job."""
    asked = resources_given(ctx.params["resource"] or ())
    try:
        import ray

        from planaria.engines.ray import host
    except ImportError as error:
        raise UsageError(f"--engine ray needs Ray ({error}): pip install 'planaria[ray]'") from None
    template = supervisor.template_of(options, ctx)
    with held(options.log_dir):
        address = os.environ.get("RAY_ADDRESS", "") or _current()
        if address.startswith("ray://"):
            raise UsageError(
                f"RAY_ADDRESS={address}: the supervisor runs in the cluster itself: start it on a node, or as a "
                "job: ray job submit -- planaria run --engine ray ..."
            )
        try:
            if address != "auto":  # Ray would try for minutes
                socket.create_connection(split_address(address, "RAY_ADDRESS"), CONNECT_SECONDS).close()
            ray.init(address, namespace=host.NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
        except (OSError, ValueError, RuntimeError) as error:
            raise UsageError(f"--engine ray: there is no cluster at {address} ({error})") from None
        try:
            return _supervise(options, template, asked)
        finally:
            ray.shutdown()


def _current() -> str:
    """The cluster that was started or joined here last. Ray itself believes what it has noted of one that is gone."""
    place = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        return (Path(place) / "ray" / "ray_current_cluster").read_text().strip() or "auto"
    except OSError:
        return "auto"


def _supervise(options: RunOptions, template: Template, asked: dict[str, float]) -> int:
    import ray

    from planaria.engines.ray import actor, host

    address = options.host or ray.util.get_node_ip_address()
    if options.lighthouse is None:
        refuse_strangers(join_address(address, 0), None)
    if not supervisor.goes_on(options):
        try:
            host.refuse_earlier(template)
        except host.AWAY as error:
            raise UsageError(f"--engine ray: the cluster does not answer ({error})") from None
        supervisor.begin_anew(options)
    needs = {"CPU": float(options.nproc_per_group)}
    if options.device != "cpu" and (options.device or ray.cluster_resources().get("GPU")):
        needs["GPU"] = float(options.nproc_per_group)
    needs = {key: amount for key, amount in (needs | asked).items() if amount}
    kept = Supervisor(options, "ray", address, actor.LOG, lambda note: host.RayHost(template, needs, note))
    with usable(options.log_dir):
        log = (options.log_dir / "ray.log").open("a")
    # Ray prints what it hears of nodes and workers, and cannot be asked not to.
    with log, redirect_stdout(log):
        return asyncio.run(kept.run())


def resources_given(given: Sequence[str]) -> dict[str, float]:
    """Amounts by name. UsageError."""
    found = {}
    for text in given:
        key, _, amount = text.partition("=")
        try:
            found[key] = float(amount)
        except ValueError:
            found[key] = -1.0
        if not key or not 0 <= found[key] < float("inf"):
            raise UsageError(f"--resource {text}: give what a node of a group takes as NAME=AMOUNT, such as GPU=8")
    return found
