"""Rules over signs of health: readings go in, verdicts come out. No clock and no I/O.

Every rule has hysteresis in two senses: it takes a number of bad readings in a row to fire, and a number of good ones,
beyond a threshold of their own, to take that back. Time is counted in readings, whose interval the caller keeps; a sign
that nobody reads changes nothing.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum

from planaria.core.assignment import SAME_SPEED

# Of a normal distribution: three standard deviations, by the median of the distances from the median.
_SCATTER = 3 * 1.4826
_LONGEST_TEXT = 200


class Action(Enum):
    DRAIN = "drain"  # the group leaves, and starts again on other devices if there are any
    REPORT = "report"  # people are told
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Signal:
    """``words``: what is said of a subject, with {n} for the value. Of a counter the increase counts, not the value."""

    words: str
    counter: bool = False


SIGNALS: Mapping[str, Signal] = {
    "gpu_lost": Signal("is lost to its driver"),
    "ecc_uncorrectable": Signal("has uncorrectable ECC errors ({n} since {since})", counter=True),
    "ecc_correctable": Signal("has corrected ECC errors ({n} since {since})", counter=True),
    "remap_failed": Signal("has memory rows that could not be remapped"),
    "remap_pending": Signal("has memory rows to be remapped at its next reset"),
    "reset_wanted": Signal("is in need of recovery, says its driver (action {n} of NVML)"),
    "xid": Signal("has had Xid errors of the hardware ({n} since {since})", counter=True),
    "xid_other": Signal("has had Xid errors of the kinds that programs cause ({n} since {since})", counter=True),
    "thermal": Signal("is slowed down because it is hot"),
    "power_brake": Signal("is slowed down by the power supply"),
    "temperature": Signal("has {n} degrees Celsius"),
    "nvlink_errors": Signal("has errors on its NVLinks ({n} since {since})", counter=True),
    "nvlink_down": Signal("has lost {n} of its NVLinks"),
    "pcie_replays": Signal("has replays on its PCIe link ({n} since {since})", counter=True),
    "slow": Signal("takes {n} times as long for a shard as the median of the other groups"),
    "corrupt": Signal("was caught with a wrong state or wrong gradients {n} times"),
    "command": Signal("failed the site's health command"),
}
# The site's command makes up names of its own behind this.
SITE = "command."


def signal_named(name: str) -> Signal | None:
    if name.startswith(SITE) and name != SITE:
        return Signal(f"shows {name.removeprefix(SITE)} = {{n}} in the site's health command")
    return SIGNALS.get(name)


@dataclass(frozen=True, slots=True)
class Rule:
    """Exactly one of ``above`` and ``below`` says what is bad. ValueError, a sentence, for what makes no sense."""

    name: str
    signal: str
    action: Action
    above: float | None = None
    below: float | None = None
    readings: int = 1  # so many bad ones in a row, and it fires
    clear: float | None = None  # good is what is not beyond this; None: beyond the threshold itself
    clear_readings: int = 3  # so many good ones in a row, and it is taken back
    within: int | None = None  # of a counter: its increase over so many readings; None: since the first one

    def __post_init__(self) -> None:
        if signal_named(self.signal) is None:
            known = ", ".join([*SIGNALS, f"{SITE}NAME"])
            raise ValueError(f"there is no signal {self.signal}; known signals: {known}")
        if (self.above is None) is (self.below is None):
            raise ValueError("give one of above and below: the threshold beyond which a reading is bad")
        if any(x is not None and not math.isfinite(x) for x in (self.above, self.below, self.clear)):
            raise ValueError("thresholds must be finite numbers")
        if self.clear is not None and self.is_bad(self.clear):
            raise ValueError(f"clear = {self.clear:g} is itself a bad reading; it must lie on the good side")
        if self.within is not None and not self.counts:
            raise ValueError(f"within is for signals that count, and {self.signal} does not")
        if min(self.readings, self.clear_readings, 1 if self.within is None else self.within) < 1:
            raise ValueError("readings, clear_readings and within must be at least 1")

    @property
    def counts(self) -> bool:
        signal = signal_named(self.signal)
        return signal is not None and signal.counter

    def is_bad(self, value: float) -> bool:
        return value > self.above if self.above is not None else value < (self.below or 0.0)

    def is_good(self, value: float) -> bool:
        if self.clear is None:
            return not self.is_bad(value)
        return value <= self.clear if self.above is not None else value >= self.clear


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read of one subject: a ``device`` of a ``node``, or else a ``group`` (or ``rank`` of it), or a node."""

    signal: str
    value: float
    device: str = ""  # as CUDA_VISIBLE_DEVICES names it
    group: int = -1  # for a device: whose it is now; -1: nobody's
    rank: int = -1
    text: str = ""  # in the site's own words
    node: int = 0

    @property
    def about_group(self) -> bool:
        """Whether its subject is a group itself (or a rank of it), and not what that runs on."""
        return not self.device and self.group >= 0

    @property
    def subject(self) -> str:
        """The same as long as it is about the same thing, whoever uses that."""
        where = f" of node {self.node}" if self.node else ""
        if self.device:
            return (f"GPU {self.device}" if self.device.isdecimal() else self.device) + where
        if self.about_group:
            return f"group {self.group}" + (f", rank {self.rank}" if self.rank >= 0 else "")
        return f"node {self.node}"


def shown(text: str) -> str:
    """What a stranger wrote, made fit for a terminal."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text[:_LONGEST_TEXT])


def finite(value: object) -> float:
    """``value`` as a float; ValueError if it is no finite number. JSON and TOML have whole numbers of any length."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("it is no number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("it is not finite")
    return number


def reading_from(facts: object) -> Reading:
    """A reading from what JSON makes of it. ValueError, with what is wrong, for anything else."""
    if not isinstance(facts, dict):
        raise ValueError("it is no JSON object")
    if unknown := sorted(set(facts) - {f.name for f in fields(Reading)}):
        raise ValueError(f"unknown key {unknown[0]!r}; known keys: {', '.join(f.name for f in fields(Reading))}")
    signal, value, device = facts.get("signal"), facts.get("value"), facts.get("device", "")
    if not isinstance(signal, str) or not signal:
        raise ValueError('it needs a "signal", a name')
    try:
        value = finite(value)
    except ValueError:
        raise ValueError('it needs a "value", a finite number') from None
    if isinstance(device, int) and not isinstance(device, bool):
        device = str(device)
    text, numbers = facts.get("text", ""), [facts.get(key, -1) for key in ("group", "rank")] + [facts.get("node", 0)]
    if not isinstance(device, str) or not isinstance(text, str):
        raise ValueError('"device" and "text" must be text')
    if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
        raise ValueError('"group", "rank" and "node" must be whole numbers')
    return Reading(shown(signal), value, shown(device), numbers[0], numbers[1], shown(text), numbers[2])


@dataclass(frozen=True, slots=True)
class Verdict:
    """A rule has fired for a subject, or takes that back. ``value``: what the rule compared."""

    rule: Rule
    reading: Reading  # the newest
    value: float
    bad: bool

    def words(self, since: str) -> str:
        """What is the matter, said of its subject. ``since``: when its counters were first read."""
        signal = signal_named(self.rule.signal)
        assert signal is not None
        said = signal.words.replace("{n}", f"{self.value:.4g}").replace("{since}", since)
        return said + (f" ({self.reading.text})" if self.reading.text else "")


@dataclass(slots=True)
class _Case:
    """One rule and one subject."""

    bad: bool = False
    streak: int = 0  # readings in a row that speak for a change
    last: float | None = None  # of a counter
    total: float = 0.0  # its increase since the first reading
    totals: deque[float] = field(default_factory=deque)  # the total at each of the readings in question


class Watch:
    """Applies rules. ``standing`` are the verdicts that are not taken back, each with its newest reading."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = [rule for rule in rules if rule.action is not Action.OFF]
        self._cases: dict[tuple[str, str], _Case] = {}
        self.standing: dict[tuple[str, str], Verdict] = {}

    def take(self, readings: Iterable[Reading]) -> list[Verdict]:
        """What changes because of these readings."""
        changes = []
        for reading in readings:
            for rule in self._rules:
                if rule.signal == reading.signal and (verdict := self._apply(rule, reading)) is not None:
                    changes.append(verdict)
        return changes

    def forget(self, subject: str) -> None:
        """It is another one of that name from now on."""
        self._cases = {key: case for key, case in self._cases.items() if key[1] != subject}
        self.standing = {key: verdict for key, verdict in self.standing.items() if key[1] != subject}

    def _apply(self, rule: Rule, reading: Reading) -> Verdict | None:
        key = (rule.name, reading.subject)
        case = self._cases.setdefault(key, _Case())
        value = _increase(case, rule, reading.value) if rule.counts else reading.value
        turns = rule.is_good(value) if case.bad else rule.is_bad(value)
        case.streak = case.streak + 1 if turns else 0
        changed = case.streak >= (rule.clear_readings if case.bad else rule.readings)
        if changed:
            case.bad, case.streak = not case.bad, 0
        verdict = Verdict(rule, reading, value, case.bad)
        if case.bad:
            self.standing[key] = verdict
        else:
            self.standing.pop(key, None)
        return verdict if changed else None


def _increase(case: _Case, rule: Rule, value: float) -> float:
    if case.last is not None:
        # One that is lower than before began anew: its device was reset.
        case.total += value - case.last if value >= case.last else value
    case.last = value
    if rule.within is None:
        return case.total
    case.totals.append(case.total)
    while len(case.totals) > rule.within + 1:
        case.totals.popleft()
    return case.total - case.totals[0]


def slowness(own: float, others: Iterable[float]) -> float:
    """How many times as long ``own`` is as the median of ``others`` (seconds per shard; 0 is no measurement).

    1.0 if it is no more than the others differ among themselves, by three standard deviations of what is observed, or
    than equal machines may: whoever is within the crowd is not slow. Never less than 1.0.
    """
    known = [seconds for seconds in others if math.isfinite(seconds) and seconds > 0]
    if not known or not (math.isfinite(own) and own > 0):
        return 1.0
    usual = statistics.median(known)
    scatter = statistics.median(abs(seconds - usual) for seconds in known)
    return own / usual if own > max(usual + _SCATTER * scatter, usual * SAME_SPEED) else 1.0


def slow_rank(seconds: Sequence[float]) -> int:
    """Which rank of a slow group makes it so, by the seconds per shard of each; -1 if that cannot be told.

    Ranks that wait for each other inside a shard (FSDP, tensor and pipeline parallelism) all take as long as the
    slowest of them, so one stands out only where they do not.
    """
    if len(seconds) == 1:
        return 0
    slowest = max(range(len(seconds)), key=lambda rank: seconds[rank], default=-1)
    others = [each for rank, each in enumerate(seconds) if rank != slowest]
    return slowest if others and min(others) > 0 and slowness(seconds[slowest], others) > 1.0 else -1


def allowed(share: float, groups: int) -> int:
    """How many of a job's groups may be missing at once for a group to be moved for its health: at least one."""
    return max(1, math.floor(share * groups))
