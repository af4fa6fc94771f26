"""What operators can have done to a job: each verb from its request, for whoever has asked."""

from __future__ import annotations

from collections.abc import Callable

from planaria.core.roster import Effect
from planaria.lighthouse.jobs import Job
from planaria.wire import checks
from planaria.wire import control_pb2 as pb

# What to do with the job's machine, and what comes of it, as a sentence. ProtocolError: the request makes no sense.
Chosen = tuple[Callable[[float], list[Effect]], str]


def perform(job: Job, choose: Callable[[Job], Chosen]) -> str:
    """What will happen, as a sentence. PlanariaError if it cannot be done."""
    verb, text = choose(job)
    job.operate(verb)
    return f"job {job.name}: {text}"


def kill(request: pb.KillRequest, job: Job) -> Chosen:
    checks.integer(request.signal, 1, 64, "a signal")
    machine, whom, rank = job.machine, f"group {request.group}", None
    if request.HasField("rank"):
        rank = checks.rank(request.rank)
        whom = f"rank {rank} of {whom}"
    return (
        lambda now: machine.kill(request.group, request.signal, now, rank),
        f"signal {request.signal} goes to {whom}",
    )


def drain(request: pb.GroupRequest, job: Job) -> Chosen:
    share = request.share if request.HasField("share") else None
    return (
        lambda now: job.machine.drain(request.group, now, checks.clip(request.reason), share),
        f"group {request.group} leaves after one of the next commits",
    )


def migrate(request: pb.MigrateRequest, job: Job) -> Chosen:
    node = checks.name(request.to, "a node", empty=not request.whole)
    if request.whole:
        group = request.group
        text = f"group {group} moves to node {node} when it is ready there"
        return lambda now: job.machine.move(group, node, now), text
    group, rank = request.group, checks.rank(request.rank)
    share = request.share if request.HasField("share") else None
    machine, reason = job.machine, checks.clip(request.reason)
    text = f"rank {rank} of group {group} moves when another process is ready to take its place"
    text += f" on node {node}" if node else ""
    if request.drains:
        text += ", and nobody comes to its GPU after it"
        return lambda now: machine.drain_rank(group, rank, now, reason, share), text
    return lambda now: machine.migrate(group, rank, now, reason, share, to=node), text


def drain_node(request: pb.NodeRequest, job: Job) -> Chosen:
    node, device = checks.name(request.node, "a node"), checks.name(request.device, "a GPU", empty=True)
    what = f"GPU {device} of node {node}" if device else f"node {node}"
    if request.undrain:
        return lambda now: job.machine.undrain_node(node, device, now), f"{what} is used again"
    return (
        lambda now: job.machine.drain_node(node, device, now),
        f"what is on {what} leaves after one of the next commits, and nothing is started there until planaria undrain",
    )


def evict(request: pb.GroupRequest, job: Job) -> Chosen:
    return lambda now: job.machine.evict(request.group, now), f"group {request.group} counts as dead from now on"


def scale(request: pb.ScaleRequest, job: Job) -> Chosen:
    checks.integer(request.groups, 1, checks.MAX_GROUP, "the number of groups")
    return lambda now: job.machine.scale(request.groups, now), f"the job goes to {request.groups} groups"
