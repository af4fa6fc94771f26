"""The lighthouse's figures in Prometheus' format. Read from the jobs when asked for; nothing is counted
twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric

from planaria.core.messages import Phase
from planaria.core.roster import JobStatus
from planaria.lighthouse.jobs import RECOVERY_BUCKETS, Job
from planaria.lighthouse.seat import Seat


def exposition(seat: Seat) -> tuple[str, bytes]:
    """(content type, body)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(seat))
    return CONTENT_TYPE_LATEST, generate_latest(registry)


class _Collector:
    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def collect(self) -> Iterator[Metric]:
        jobs = self._seat.jobs.all() if self._seat.jobs is not None else []
        yield from families(jobs, self._seat.status().leads)


def families(jobs: Sequence[Job], leads: bool) -> Iterator[Metric]:
    """All figures, in the order in which they are shown. ``leads``: whether this lighthouse does."""
    yield GaugeMetricFamily("planaria_leads", "1 if this lighthouse leads, 0 if it stands by", value=int(leads))
    yield GaugeMetricFamily("planaria_jobs", "Jobs that the lighthouse knows", value=len(jobs))
    seen = [job.status() for job in jobs]
    yield from _gauges(jobs, seen)
    yield _groups(seen)
    yield from _each_group(seen)
    yield from _links(seen)
    yield _events(jobs)
    yield _recoveries(jobs)


def _gauges(jobs: Iterable[Job], seen: Iterable[JobStatus]) -> Iterator[Metric]:
    epoch = GaugeMetricFamily("planaria_epoch", "Epoch under which the job is served", labels=["job"])
    number = GaugeMetricFamily("planaria_quorum_number", "Number of the quorum in force", labels=["job"])
    members = GaugeMetricFamily("planaria_quorum_members", "Members of the quorum in force", labels=["job"])
    desired = GaugeMetricFamily("planaria_desired_groups", "Groups that the job should have", labels=["job"])
    step = GaugeMetricFamily("planaria_step", "Highest step committed by any group", labels=["job"])
    agents = GaugeMetricFamily("planaria_agents", "Agents connected", labels=["job"])
    since = GaugeMetricFamily(
        "planaria_seconds_since_commit", "Since the newest step was committed; 0 once all are", labels=["job"]
    )
    for job, status in zip(jobs, seen, strict=True):
        labels = [job.name]
        epoch.add_metric(labels, status.epoch)
        number.add_metric(labels, status.quorum.id.number if status.quorum else 0)
        members.add_metric(labels, len(status.quorum.members) if status.quorum else 0)
        desired.add_metric(labels, status.desired)
        step.add_metric(labels, max((group.step for group in status.groups), default=0))
        agents.add_metric(labels, len(job.streams))
        since.add_metric(labels, job.seconds_since_commit)
    yield from (epoch, number, members, desired, step, agents, since)


def _groups(seen: Iterable[JobStatus]) -> Metric:
    family = GaugeMetricFamily("planaria_groups", "Groups by state and phase", labels=["job", "state", "phase"])
    for status in seen:
        groups = Counter((group.state, group.phase) for group in status.groups)
        for (state, phase), count in sorted(groups.items(), key=lambda item: (item[0][0], item[0][1].value)):
            family.add_metric([status.job, state, Phase(phase).name.lower()], count)
    return family


def _each_group(seen: Iterable[JobStatus]) -> Iterator[Metric]:
    labels = ["job", "group"]
    member = GaugeMetricFamily("planaria_group_member", "1 if a group is in the quorum in force, else 0", labels=labels)
    step = GaugeMetricFamily("planaria_group_step", "Steps that a group has committed", labels=labels)
    took = GaugeMetricFamily("planaria_group_step_seconds", "What a step takes a group", labels=labels)
    loss = GaugeMetricFamily("planaria_group_loss", "Loss of a group's newest step, NaN if it has none", labels=labels)
    for status in seen:
        inside = {each.group for each in status.quorum.members} if status.quorum is not None else set()
        for group in status.groups:
            which = [status.job, str(group.member.group)]
            values = (int(group.member.group in inside), group.step, group.step_seconds, group.loss)
            for family, value in zip((member, step, took, loss), values, strict=True):
                family.add_metric(which, value)
    yield from (member, step, took, loss)


def _links(seen: Iterable[JobStatus]) -> Iterator[Metric]:
    labels = ["job", "from", "to"]
    bits = GaugeMetricFamily("planaria_link_bits_per_second", "What a link carried while it was in use", labels=labels)
    trip = GaugeMetricFamily("planaria_link_round_trip_seconds", "Round trip of a link", labels=labels)
    lost = GaugeMetricFamily("planaria_link_resent_ratio", "Share of a link's packets sent again", labels=labels)
    for status in seen:
        for group in status.groups:
            for link in group.links:
                ends = [status.job, str(group.member.group), str(link.group)]
                for family, value in ((bits, link.bits), (trip, link.round_trip), (lost, link.lost)):
                    family.add_metric(ends, value)
    yield from (bits, trip, lost)


def _events(jobs: Iterable[Job]) -> Metric:
    family = CounterMetricFamily("planaria_events", "Events by kind", labels=["job", "kind"])
    for job in jobs:
        for kind, count in sorted(job.events_by_kind.items()):
            family.add_metric([job.name, kind], count)
    return family


def _recoveries(jobs: Iterable[Job]) -> Metric:
    family = HistogramMetricFamily(
        "planaria_recovery_seconds",
        "From the first sign of a loss until all members of the next quorum have adopted it",
        labels=["job"],
    )
    bounds = [*(str(bound) for bound in RECOVERY_BUCKETS), "+Inf"]
    for job in jobs:
        buckets = list(zip(bounds, accumulate(job.recoveries), strict=True))
        family.add_metric([job.name], buckets, sum_value=job.recovery_seconds)
    return family
