"""What goes wrong and when: a pure function of a seed, or a list for a demonstration.

A schedule names groups and moments, not processes: whether a fault can be done now (somebody must be left
who holds the state) is seen only at run time, by ``planaria.chaos.inject``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from planaria.core.bitflips import TARGETS
from planaria.errors import UsageError


class Kind(Enum):
    KILL = "kill"  # SIGKILL of a group's process
    STOP = "stop"  # SIGSTOP, and SIGCONT after a while: a hang
    PARTITION = "partition"  # the group's network is cut for a while
    BITFLIP = "bitflip"  # one bit of a rank's memory: of a parameter, of what the optimizer keeps, or of a gradient
    LIGHTHOUSE = "lighthouse"  # SIGKILL of the lighthouse; whoever runs it starts it again


class Moment(Enum):
    """At which point of the victim's work the fault strikes."""

    ANY = "any"
    EXCHANGING = "exchanging"  # between the first and the last word of an exchange
    FORMING = "forming"  # while a quorum is taken up: after another loss, before work goes on


class Victim(Enum):
    GROUP = "group"  # the one named by the fault
    HOST = "host"  # the group that hosts the rendezvous of the quorum in force: its lowest member
    OTHER = "other"  # the lowest group that does not host it


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong. It is due when both ``after`` seconds of training and ``step`` commits
    have passed.

    ``group`` is the one struck if it can be struck then; otherwise the next one, in a circle, that can.
    ``rank`` is the one of its ranks that is struck, counted round those it has.
    ``target`` and ``number``: which bit of its memory, see planaria.core.bitflips.
    ``duration``: seconds until a stopped group goes on, or a cut one is connected again; 0 for the rest.
    """

    kind: Kind
    after: float = 0.0
    step: int = 0
    group: int = 0
    duration: float = 0.0
    moment: Moment = Moment.ANY
    victim: Victim = Victim.GROUP
    note: str = ""
    rank: int = 0
    target: str = ""
    number: int = 0


# Around the time in which an agent notices a stop (two polls): some pass unnoticed, like a slow step.
SHORT_STOP = (0.02, 0.3)
# Well past it: the group is replaced in the quorum, and returns as one that was fenced.
LONG_STOP = (1.0, 4.0)
# Divisible by every usual number of ranks, so that all are struck equally often.
_RANKS = 5040
# From unnoticed (TCP sends lost segments again) to longer than three missed heartbeats.
CUT = (0.2, 8.0)


def parse_kinds(text: str) -> tuple[Kind, ...]:
    """``"kill,stop"`` to kinds, in that order. Raises UsageError naming the unknown one."""
    known = ", ".join(kind.value for kind in Kind)
    kinds: list[Kind] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        try:
            kind = Kind(word)
        except ValueError:
            raise UsageError(f"unknown kind of fault {word!r}; known kinds: {known}") from None
        if kind not in kinds:
            kinds.append(kind)
    if not kinds:
        raise UsageError(f"name at least one kind of fault: {known}")
    return tuple(kinds)


def parse_seconds(text: str) -> float:
    """``"2s"``, ``"500ms"``, ``"1.5"`` (seconds) or ``"2m"`` to seconds. Raises UsageError."""
    units = {"ms": 1e-3, "s": 1.0, "m": 60.0}
    number = text.strip().rstrip("ms")
    unit = text.strip()[len(number) :] or "s"
    try:
        seconds = float(number) * units[unit]
    except (ValueError, KeyError):
        raise UsageError(f"{text!r} is not a time; write 2s, 500ms or 1m") from None
    if not 0 < seconds < float("inf"):
        raise UsageError(f"a time must be more than zero, not {text!r}")
    return seconds


def parse_targets(text: str) -> tuple[str, ...]:
    """What bits flip in, of ``parameter,moment``."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := [name for name in names if name not in TARGETS]:
        raise UsageError(f"no bits flip in {unknown[0]!r}; there are {', '.join(TARGETS)}")
    if not names:
        raise UsageError(f"name at least one thing that bits flip in, of {', '.join(TARGETS)}")
    return names


def random_schedule(
    seed: int,
    kinds: Sequence[Kind],
    groups: int,
    count: int,
    every: float,
    targets: Sequence[str] = TARGETS,
) -> tuple[Fault, ...]:
    """``count`` faults, on average ``every`` seconds apart, in the order of ``after``. ``targets``: of bit flips.

    Each of ``kinds`` is drawn equally often within one; groups and durations are drawn uniformly. The gaps
    are 0.5 to 1.5 times ``every``, so that faults meet all phases of a step whatever its length.
    """
    draw = random.Random(f"planaria chaos {seed}")  # by name: independent of any other use of the same seed
    bag = [kinds[index % len(kinds)] for index in range(count)]
    draw.shuffle(bag)
    ranks = random.Random(f"planaria chaos {seed} ranks")  # of its own: how many ranks a group has changes nothing else
    flips = random.Random(f"planaria chaos {seed} flips")
    at = 0.0
    faults = []
    for kind in bag:
        at += draw.uniform(0.5, 1.5) * every
        faults.append(
            Fault(
                kind,
                after=at,
                group=draw.randrange(groups),
                duration=_duration(kind, draw),
                rank=ranks.randrange(_RANKS),
                target=flips.choice(targets) if kind is Kind.BITFLIP else "",
                number=flips.randrange(1 << 31) if kind is Kind.BITFLIP else 0,
            )
        )
    return tuple(faults)


def _duration(kind: Kind, draw: random.Random) -> float:
    if kind is Kind.STOP:
        return draw.uniform(*draw.choice((SHORT_STOP, LONG_STOP)))
    return draw.uniform(*CUT) if kind is Kind.PARTITION else 0.0


def demo_schedule(steps: int) -> tuple[Fault, ...]:
    """Everything that a group or the lighthouse can suffer, at chosen moments spread over ``steps`` steps.

    Two kills belong together: the second strikes while the quorum after the first one forms.
    """

    def at(share: float) -> int:
        return int(share * steps)

    return (
        Fault(Kind.KILL, step=at(0.08), group=3, moment=Moment.EXCHANGING, note="in mid-exchange"),
        Fault(Kind.KILL, step=at(0.24), group=2, note="and at once another"),
        Fault(Kind.KILL, step=at(0.24), group=1, moment=Moment.FORMING, note="while the quorum forms"),
        Fault(Kind.KILL, step=at(0.42), victim=Victim.HOST, note="the host of the rendezvous"),
        Fault(Kind.STOP, step=at(0.56), group=2, duration=1.5, note="a hang"),
        Fault(Kind.LIGHTHOUSE, step=at(0.72), note="the coordinator"),
        Fault(Kind.KILL, step=at(0.8), victim=Victim.OTHER, note="under the new lighthouse"),
    )
