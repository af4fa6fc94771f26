"""From events to incidents: each is the loss of one or more groups, what told of it, and what came of it; or a time in
which nobody was lost, and nobody got on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from planaria.explain.record import Entry

# What may tell of a loss, or of why it came.
_SIGNS = frozenset(
    {"kill", "signal", "suspect", "exit", "lost", "evict", "health", "corrupt", "trouble", "still", "late", "hang",
     "agent", "alive", "diverged", "mismatch"}
)  # fmt: skip
_ENDED_WELL = frozenset({"finished", "drained"})
_KEPT_SIGNS = 200  # that have not led to a loss: a job that is in trouble all the time has many


@dataclass(slots=True)
class Loss:
    """One group. ``signs`` in the order of the record."""

    group: int
    incarnation: int | None = None
    signs: list[Entry] = field(default_factory=list)
    recovered: Entry | None = None  # the agent's measure
    started: Entry | None = None  # its next life
    regrouped: Entry | None = None  # the same, under its living ranks
    ready: Entry | None = None
    joined: Entry | None = None  # the planned quorum with it

    def first(self, *kinds: str) -> Entry | None:
        return next((sign for sign in self.signs if sign.kind in kinds), None)

    @property
    def exit(self) -> Entry | None:
        return self.first("exit")


@dataclass(slots=True)
class Incident:
    """``quorum``: the urgent one that went on without the lost. None: it did not come to that."""

    losses: dict[int, Loss]
    at: float
    quorum: Entry | None = None
    resumed: Entry | None = None  # nobody was left: the job went back to a checkpoint or a copy
    still: Entry | None = None  # nobody was lost, and nobody got on: what the lighthouse said of that

    @property
    def step(self) -> int | None:
        """The step that was being made, as far as is known: as many were committed."""
        for loss in self.losses.values():
            for kinds in (("suspect",), ("exit",)):
                found = loss.first(*kinds)
                if found is not None and (step := found.number("step")) is not None:
                    return step
        return None


@dataclass(slots=True)
class Story:
    incidents: list[Incident] = field(default_factory=list)
    first: Entry | None = None
    last: Entry | None = None
    end: Entry | None = None  # the agent's last word
    events: int = 0
    newest: dict[int, Loss] = field(default_factory=dict)  # of each group that was ever lost
    loose: list[Entry] = field(default_factory=list)  # signs of trouble that came to nothing yet


def tell(entries: Iterable[Entry]) -> Story:
    """In the order in which the node wrote them down."""
    story = Story()
    for entry in entries:
        take(story, entry)
    last = [sign for sign in story.loose if sign.kind in ("exit", "lost") and not _ended_well(sign)]
    if last:  # losses after which there was no quorum any more
        incident = Incident({}, last[0].at)
        for group in dict.fromkeys(sign.group for sign in last):
            incident.losses[group] = _loss_of(group, story.loose)
        story.incidents.append(incident)
    return story


def take(story: Story, entry: Entry) -> None:
    """The next line of the record."""
    story.events += 1
    story.first = story.first or entry
    story.last = entry
    newest = story.incidents[-1] if story.incidents else None
    match entry.kind:
        case "quorum":
            _open(story, entry)
        case "resume" if newest is not None:
            newest.resumed = entry
        case "plan":
            for group in entry.numbers("joined"):
                if (loss := _loss(story, group)) is not None and loss.joined is None:
                    loss.joined = entry
        case "recovered":
            if (loss := _loss(story, entry.group)) is not None and loss.recovered is None:
                loss.recovered = entry
        case "start":
            if (loss := _loss(story, entry.group)) is not None and loss.started is None:
                loss.started = entry
        case "regroup":
            if (loss := _loss(story, entry.group)) is not None and loss.regrouped is None:
                loss.regrouped = entry
        case "ready":
            if (loss := _loss(story, entry.group)) is not None and loss.joined is None:
                loss.ready = entry
        case "end":
            story.end = entry
        case kind if kind in _SIGNS:
            _sign(story, entry)


def _open(story: Story, quorum: Entry) -> None:
    lost = quorum.numbers("lost")
    if not lost and quorum.data.get("founding") == "True" and not story.loose:
        return  # the job starts
    if not lost:  # a quorum was formed again: building its communicator failed, or all waited for each other
        still = next((sign for sign in reversed(story.loose) if sign.kind == "still"), None)
        if still is not None:
            story.loose.remove(still)
            story.incidents.append(Incident({}, still.at, quorum, still=still))
        return
    losses = {}
    for group in lost:
        losses[group] = _loss_of(group, story.loose)
    others = [sign for sign in story.loose if sign.group < 0]
    for loss in losses.values():
        if not loss.signs:
            loss.signs = others[-1:]  # an agent that is out of reach took its groups along
    story.loose = [sign for sign in story.loose if sign.group not in losses and sign.group >= 0]
    story.newest.update(losses)
    times = [sign.at for loss in losses.values() for sign in loss.signs]
    story.incidents.append(Incident(losses, min(times, default=quorum.at), quorum))


def _loss_of(group: int, loose: list[Entry]) -> Loss:
    signs = [sign for sign in loose if sign.group == group]
    known = [number for sign in signs if (number := sign.number("incarnation")) is not None]
    return Loss(group, known[0] if known else None, signs)


def _sign(story: Story, entry: Entry) -> None:
    """What is said of a group after a quorum went on without it belongs to that loss, until its next life starts."""
    if _ended_well(entry):
        return
    loss = _loss(story, entry.group)
    if loss is not None and loss.started is None and loss.regrouped is None and loss.joined is None:
        incarnation = entry.number("incarnation")
        if incarnation is None or loss.incarnation in (None, incarnation):
            loss.incarnation = incarnation if loss.incarnation is None else loss.incarnation
            loss.signs.append(entry)
            return
    if entry.kind == "alive":
        story.loose = [sign for sign in story.loose if sign.group != entry.group]
        return
    story.loose.append(entry)
    del story.loose[:-_KEPT_SIGNS]


def _loss(story: Story, group: int) -> Loss | None:
    """The newest loss of the group."""
    return story.newest.get(group)


def _ended_well(entry: Entry) -> bool:
    return entry.kind == "exit" and entry.data.get("state") in _ENDED_WELL
