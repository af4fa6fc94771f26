"""Suspicion from silence, with every limit derived from what was seen in this job.

A limit that is a guess is either too short (a busy machine is accused) or too long (everybody waits for the
dead). So each kind of sign of life keeps the longest silence that turned out to be harmless, and only a
multiple of that is suspicious; floors and ceilings bound it. Suspicion is not proof: whoever shows life again
is cleared.

Silence is measured in *watched* time (``WatchedClock``): a watcher that was paused itself accuses nobody.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from planaria.core.messages import Phase


class WatchedClock:
    """Time that passes only while the watcher looks.

    A machine that sleeps, a stopped watcher or a clock that is set make ``now`` jump, for all that is watched
    at once. So each look lets at most ``step`` seconds pass, and none if ``now`` went backwards. With
    ``step`` at a fraction of the shortest limit, no verdict rests on fewer looks than that fraction says. The
    price: a watcher that regularly looks less often than every ``step`` seconds judges later by that factor.
    """

    def __init__(self, step: float) -> None:
        self.step = step
        self.now: float | None = None  # of the last look
        self.watched = 0.0

    def at(self, now: float) -> float:
        """Watched seconds at ``now``."""
        return self.watched if self.now is None else self.watched + min(max(now - self.now, 0.0), self.step)

    def look(self, now: float) -> float:
        self.watched = self.at(now)
        self.now = now
        return self.watched


@dataclass(frozen=True, slots=True)
class Rule:
    """How long a silence may be: ``floor`` <= ``factor`` x longest harmless silence <= ``ceiling``, in
    seconds.

    ``unseen`` is the limit before anything was seen. ``half_life`` is the number of silences after which the
    longest one counts for half; 0: it is never forgotten.
    """

    floor: float
    factor: float
    ceiling: float
    unseen: float
    half_life: int = 0


class Silences:
    """The longest harmless silence of one kind, and the limit that follows from it."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.longest: float | None = None

    @property
    def limit(self) -> float:
        if self.longest is None:
            return self.rule.unseen
        return min(max(self.rule.floor, self.rule.factor * self.longest), self.rule.ceiling)

    def ended(self, silence: float) -> None:
        """A silence ended by itself, so it was harmless.

        One that had been suspected raises the limit as well (slow is not dead), but at most doubles it: a
        frozen container that thaws after an hour must not blind the watch.
        """
        if silence > self.limit:
            silence = 2 * self.limit / self.rule.factor
        kept = self.longest or 0.0
        if self.rule.half_life:
            kept *= 0.5 ** (1 / self.rule.half_life)
        self.longest = max(kept, silence)

    def describe(self) -> str:
        seen = "nothing seen yet" if self.longest is None else f"longest seen {self.longest:.2g} s"
        return f"limit {self.limit:.3g} s, {seen}"


# --- a rank, watched by its agent through the progress page -------------------------------------------------

# The control thread beats every 50 ms: 2 s are 40 beats missed. Longer silences come from code that keeps the
# interpreter lock (a large sort, unpickling); three times the longest of them, remembered for about ten
# minutes (12,000 beats), covers the next. Ceiling: half a minute, after which a person would call it frozen
# too.
CONTROL = Rule(floor=2.0, factor=3.0, ceiling=30.0, unseen=2.0, half_life=12_000)

# Ten minutes is what PyTorch gives a collective before its watchdog ends the process, so scripts already have
# to keep their longest silent stretch (cold compilation, loading a checkpoint) below it.
GENEROUS = 600.0

# Shards are alike, but a lost page cache, a slow read or a new batch shape can make one several times longer
# than any before; the floor is for jobs whose shards take milliseconds, where such things weigh most.
COMPUTING = Rule(floor=10.0, factor=5.0, ceiling=GENEROUS, unseen=GENEROUS)
# Between two steps users log, evaluate and save, each for the first time at some late step: unlike all
# before.
APPLYING = Rule(floor=60.0, factor=5.0, ceiling=GENEROUS, unseen=GENEROUS)
# Later starts find caches warm or cold. Nobody waits for a group that starts, so there is no hurry.
STARTING = Rule(floor=60.0, factor=5.0, ceiling=GENEROUS, unseen=GENEROUS)

# Whole states are written and read, perhaps on slow disks, and too seldom to be learnt from; but who hangs there holds
# up all others.
LOADING = Rule(floor=GENEROUS, factor=1.0, ceiling=GENEROUS, unseen=GENEROUS)

# In every life the first passes through a phase are unlike the later ones: code is compiled at the first,
# again at the second batch shape, and caches and memory pools settle by the third. They are judged, and
# learnt, separately, and only a whole pass teaches: the first beats of the very first come before its
# compilation.
EARLY_PASSES = 3

# A stop must be seen at two polls in a row: profilers and debuggers stop a process for a moment as they read
# it.
STOP_POLLS = 2

# A quarter of the shortest limit: no verdict on fewer than four polls. Agents poll more often than twice a
# second.
AGENT_STEP = CONTROL.floor / 4

_RULES = {Phase.COMPUTING: COMPUTING, Phase.APPLYING: APPLYING, Phase.STARTING: STARTING, Phase.LOADING: LOADING}
_DOING = {
    Phase.COMPUTING: "computing a shard",
    Phase.APPLYING: "between two steps (optimizer, logging, evaluation)",
    Phase.STARTING: "starting (imports, model, data)",
    Phase.LOADING: "saving or loading the state (the script's own functions)",
}
# While it starts, a rank imports and loads, which keeps the interpreter lock for long, and nobody waits for
# it. When it has finished, its threads end before the process does.
_NO_CONTROL = frozenset({Phase.STARTING, Phase.FINISHED})


@dataclass(frozen=True, slots=True)
class ProgressSample:
    """What one poll of a rank finds."""

    phase: Phase
    beat: int  # rises whenever the training thread makes progress
    control_beat: int  # raised by the control thread every 50 ms; 0 until that thread runs
    stopped: bool  # state T or t in the process table
    collectives: int = 0  # that it has begun with the other ranks of its group; 0 if they may differ in that
    guarded: bool = False  # it outlives the loss of another rank of its group
    copies: bool = False  # it knows of whole copies of its group's state


class JobTimes:
    """What is known of silences in one job, shared by the watches of all its ranks and incarnations."""

    def __init__(self) -> None:
        self.control = Silences(CONTROL)
        self._training: dict[tuple[Phase, bool], Silences] = {}

    def training(self, phase: Phase, early: bool) -> Silences | None:
        """None for a phase in which the training thread waits for others: its silence is not its fault."""
        if phase not in _RULES:
            return None
        return self._training.setdefault((phase, early), Silences(_RULES[phase]))


class ProgressWatch:
    """Watches one incarnation of one rank. ``times``: what the job's ranks have taught (default: nothing)."""

    def __init__(self, times: JobTimes | None = None) -> None:
        self.times = times or JobTimes()
        self._clock = WatchedClock(AGENT_STEP)
        self._last: ProgressSample | None = None
        self._passes: dict[Phase, int] = {}
        self._training_at = 0.0  # watched time of the last sign of life
        self._control_at = 0.0
        self._stops = 0  # polls in a row that found it stopped
        # Silences during which it was stopped, or one that it may wait for, are explained by that and teach nothing.
        self._training_explained = self._control_explained = False
        self._pass_longest = 0.0  # longest silence of this pass through the phase

    def observe(self, now: float, sample: ProgressSample) -> None:
        """One poll, at ``now`` on any clock of the watcher's, in seconds."""
        at = self._clock.look(now)
        last, self._last = self._last, sample
        if last is None:
            self._passes[sample.phase] = 1
            self._training_at = self._control_at = at
            last = sample
        self._observe_stop(last, sample)
        self._observe_control(at, last, sample)
        self._observe_training(at, last, sample)

    @property
    def last(self) -> ProgressSample | None:
        """What the newest poll found."""
        return self._last

    @property
    def stopped(self) -> bool:
        """Whether the newest poll found the process stopped."""
        return self._last is not None and self._last.stopped

    def excuse(self) -> None:
        """Another rank of its group is stopped, and its training thread may be waiting for that one: while it is
        silent now, it teaches nothing."""
        self._training_explained = True

    def pardon(self) -> None:
        """What its training thread may have been waiting for has ended: its silence counts from now on."""
        self._training_at, self._training_explained = self._clock.watched, True

    def verdict(self, now: float) -> str | None:
        """None if all is well, else a sentence that says why the rank is suspected."""
        return self.frozen(now) or self.silent(now)

    @property
    def judged(self) -> bool:
        """Whether it is in a phase in which it is expected to get on by itself."""
        return self._last is not None and self._training(self._last.phase) is not None

    def frozen(self, now: float) -> str | None:
        """Why the process as a whole does not run, if it does not."""
        sample = self._last
        if sample is None:
            return None
        if self._stops >= STOP_POLLS:
            return "the process is stopped (state T in the process table: a stop signal or a debugger)"
        at = self._clock.at(now)
        control, silence = self.times.control, at - self._control_at
        if _control_judged(sample) and silence > control.limit:
            return (
                f"no sign of life from the control thread for {silence:.1f} s ({control.describe()}): "
                "the process is frozen, or something keeps the interpreter lock"
            )
        return None

    def silent(self, now: float) -> str | None:
        """Why its training thread seems to hang, if it does."""
        sample = self._last
        if sample is None:
            return None
        at = self._clock.at(now)
        training, silence = self._training(sample.phase), at - self._training_at
        if training is not None and silence > training.limit:
            return f"no progress while {_DOING[sample.phase]} for {silence:.1f} s ({training.describe()})"
        return None

    def _early(self, phase: Phase) -> bool:
        return self._passes[phase] <= EARLY_PASSES

    def _training(self, phase: Phase) -> Silences | None:
        return self.times.training(phase, self._early(phase))

    def _observe_stop(self, last: ProgressSample, sample: ProgressSample) -> None:
        if not sample.stopped:
            self._stops = 0
            return
        # One that is being read by a profiler runs between two polls.
        self._stops = self._stops + 1 if sample.control_beat == last.control_beat else 1
        self._training_explained = self._control_explained = True

    def _observe_control(self, at: float, last: ProgressSample, sample: ProgressSample) -> None:
        judged = _control_judged(last) and _control_judged(sample)
        if sample.control_beat == last.control_beat and judged:
            return
        if judged and not self._control_explained:
            self.times.control.ended(at - self._control_at)
        self._control_at, self._control_explained = at, sample.stopped

    def _observe_training(self, at: float, last: ProgressSample, sample: ProgressSample) -> None:
        if (sample.beat, sample.phase) == (last.beat, last.phase):
            return
        silence = 0.0 if self._training_explained else at - self._training_at
        self._pass_longest = max(self._pass_longest, silence)
        over = sample.phase is not last.phase
        training = self._training(last.phase)
        if training is not None and (over or not self._early(last.phase)):
            training.ended(self._pass_longest if self._early(last.phase) else silence)
        if over:
            self._passes[sample.phase] = self._passes.get(sample.phase, 0) + 1
            self._pass_longest = 0.0
        self._training_at, self._training_explained = at, sample.stopped


def _control_judged(sample: ProgressSample) -> bool:
    return sample.control_beat > 0 and sample.phase not in _NO_CONTROL


# --- an agent, watched by the lighthouse through its stream -------------------------------------------------

# Agents beat once a second. Three beats missed are suspicious; a busy agent may beat later, and three times
# the longest of the last ten minutes (600 beats) covers that. A dead node is noticed within the ceiling, four
# times the floor, however slow its agent once was. A new agent has processes to start: it gets ten seconds.
HEARTBEAT_SECONDS = 1.0
HEARTBEAT = Rule(
    floor=3 * HEARTBEAT_SECONDS,
    factor=3.0,
    ceiling=12 * HEARTBEAT_SECONDS,
    unseen=10 * HEARTBEAT_SECONDS,
    half_life=600,
)


class HeartbeatWatch:
    """Watches one stream. Whoever watches several gives them one ``clock``, and looks at it once per
    ``HEARTBEAT_SECONDS`` at least."""

    def __init__(self, clock: WatchedClock) -> None:
        self.silences = Silences(HEARTBEAT)
        self._clock = clock
        self._heard_at: float | None = None  # watched time

    @property
    def due(self) -> float:
        """Watched time from which on the stream is overdue, if nothing is heard before."""
        return math.inf if self._heard_at is None else self._heard_at + self.silences.limit

    def observe(self, now: float) -> None:
        """Something was heard. What comes between two beats shows life, but teaches nothing of beats."""
        at = self._clock.look(now)
        if self._heard_at is not None and at - self._heard_at >= HEARTBEAT_SECONDS / 2:
            self.silences.ended(at - self._heard_at)
        self._heard_at = at

    def overdue(self, now: float) -> str | None:
        """None if all is well, else a sentence. This is a look: without looks no time passes."""
        at = self._clock.look(now)
        if self._heard_at is None or at < self.due:
            return None
        return f"nothing heard for {at - self._heard_at:.1f} s ({self.silences.describe()})"
