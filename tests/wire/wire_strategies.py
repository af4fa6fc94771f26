"""Hypothesis strategies for every message that travels."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from planaria.core.messages import (
    Adopted,
    Cast,
    Close,
    Desired,
    Died,
    Drain,
    Event,
    Finished,
    Heartbeat,
    Hello,
    Host,
    JobSpec,
    Kill,
    Leaving,
    Link,
    Member,
    Migrate,
    Order,
    Phase,
    Policy,
    Prepared,
    Present,
    Publish,
    Pulse,
    Quorum,
    QuorumId,
    Ready,
    Refuse,
    Regroup,
    Report,
    Resume,
    Saved,
    Stay,
    Stop,
    Suspected,
    Synced,
    Trouble,
    Welcome,
)
from planaria.core.roster import GroupStatus, JobStatus
from planaria.wire import checks

# How long an example takes says more about the machine than about the code.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60)
many = settings(patient, max_examples=200)

groups = st.integers(0, checks.MAX_GROUP)
sizes = st.integers(1, checks.MAX_GROUP)
ranks = st.integers(0, checks.MAX_RANK)
counts = st.integers(0, checks.MAX_COUNT)
numbers = st.integers(0, checks.MAX_NUMBER)
# Without what names must not have, and texts lose: control characters, and what turns the direction of text.
_letters = st.characters(codec="utf-8", exclude_categories=("Cc", "Cf", "Zl", "Zp"))
texts = st.text(_letters, max_size=60)
names = st.text(_letters, min_size=1, max_size=30)
# Each NaN of Python's math module is one object, so that messages with it compare equal by identity of the
# value.
floats = st.floats(allow_nan=False) | st.just(math.nan)
phases = st.sampled_from(Phase)
members = st.builds(Member, groups, st.integers(0, checks.MAX_INCARNATION))
quorum_ids = st.builds(QuorumId, numbers, numbers)
facts = st.lists(st.tuples(names, texts), max_size=4).map(tuple)


@st.composite
def quorums(draw: st.DrawFn) -> Quorum:
    chosen = draw(st.lists(members, min_size=1, max_size=6, unique_by=lambda member: member.group))
    addresses = draw(st.lists(texts, min_size=len(chosen), max_size=len(chosen)))
    return Quorum(
        draw(quorum_ids),
        tuple(sorted(chosen)),
        tuple(addresses),
        draw(st.booleans()),
        draw(texts),
        draw(texts),
        draw(st.booleans()),
    )


waits = st.floats(0, allow_infinity=False)
specs = st.builds(JobSpec, names, sizes, sizes, st.sampled_from(Policy), st.integers(1, checks.MAX_RANK), waits)
figures = st.floats(0, allow_infinity=False)
links = st.lists(st.builds(Link, groups, figures, figures, figures), max_size=3).map(tuple)
pulses = st.builds(
    Pulse, members, phases, counts, quorum_ids, floats, floats, counts, st.lists(texts, max_size=3).map(tuple), links
)
reports: st.SearchStrategy[Report] = st.one_of(
    st.builds(
        Hello,
        names,
        texts,
        specs,
        st.booleans(),
        *[st.lists(texts, max_size=3).map(tuple)] * 2,
        st.lists(ranks, max_size=3).map(tuple),
        st.integers(0, checks.MAX_NUMBER),
    ),
    st.builds(Synced),
    st.builds(
        Heartbeat,
        st.lists(pulses, max_size=4).map(tuple),
        ranks,
        st.lists(st.tuples(ranks, names), max_size=3).map(tuple),
    ),
    st.builds(Present, members, ranks, facts),
    st.builds(
        Ready,
        members,
        names,
        facts,
        texts,
        counts,
        counts,
        quorum_ids,
        counts,
        st.booleans(),
        quorum_ids,
        st.booleans(),
        quorum_ids,
        st.booleans(),
    ),
    st.builds(Adopted, members, quorum_ids, counts),
    st.builds(Trouble, members, quorum_ids, counts, texts),
    st.builds(Finished, members, counts, texts),
    st.builds(Saved, members, counts, floats, texts),
    st.builds(Died, members, texts, st.booleans(), st.booleans()),
    st.builds(Leaving, members),
    st.builds(Prepared, members, texts),
    st.builds(Suspected, members, texts),
)
orders: st.SearchStrategy[Order] = st.one_of(
    st.builds(Welcome, numbers, st.lists(members, max_size=4).map(tuple)),
    st.builds(Publish, members, quorums()),
    st.builds(Refuse, members, texts),
    st.builds(Drain, members, st.booleans()),
    st.builds(Host, members, st.booleans(), st.booleans()),
    st.builds(Kill, groups, st.integers(1, 64), st.none() | ranks),
    st.builds(Desired, groups),
    st.builds(Stop, texts),
    st.builds(Resume, texts, quorum_ids),
    st.builds(Regroup, members, st.integers(1, 65535)),
    st.builds(Cast, members, ranks, facts),
    st.builds(Migrate, groups, ranks, st.booleans(), st.none() | ranks),
    st.builds(Close, texts, st.booleans()),
    st.builds(Stay, ranks, st.booleans()),
)
events = st.builds(Event, floats, names, texts, st.integers(-1, checks.MAX_GROUP), facts)
group_statuses = st.builds(
    GroupStatus,
    members,
    names,
    counts,
    quorum_ids,
    phases,
    floats,
    floats,
    counts,
    texts,
    st.booleans(),
    texts,
    links,
)
statuses = st.builds(
    JobStatus,
    names,
    numbers,
    st.none() | quorums(),
    st.none() | quorums(),
    groups,
    st.booleans(),
    st.lists(group_statuses, max_size=3).map(tuple),
    st.lists(events, max_size=3).map(tuple),
    st.lists(texts, max_size=2).map(tuple),
)
