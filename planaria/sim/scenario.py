"""A run as plain data: what is simulated, with which seed, and what goes wrong when. Readable as JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from planaria.core.messages import Policy


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, or one operator's command.

    ``at``: virtual seconds, from the start or, with ``on``, from the ``nth`` event of that name (see ``World.emit``;
    of group ``whose`` only, if that is not negative). ``target``, ``other``: a group, a node or a number, as
    ``kind`` needs it. ``seconds``: how long it lasts.
    """

    kind: str
    at: float = 0.0
    target: int = 0
    other: int = 0
    seconds: float = 0.0
    on: str = ""
    whose: int = -1
    nth: int = 1


@dataclass(frozen=True, slots=True)
class Scenario:
    """``expect``: "finished", or "stopped" if every holder of the state is meant to be lost; empty: either, as long
    as it is right. ``finishers``: who is meant to be there at the end, as "group.incarnation"; empty: whoever is."""

    about: str = ""
    seed: int = 0
    groups: int = 4
    nodes: int = 4
    shards: int = 6
    steps: int = 10
    shard_seconds: float = 0.06
    policy: Policy = Policy.REDISTRIBUTE
    standbys: int = 0  # of every node
    spare_wait: float = 0.0  # with the policy spare
    save_every: int = 0  # steps between two durable checkpoints; 0: none are written
    copy_every: int = 0  # steps between two copies in memory; 0: none are made
    check_every: int = 0  # steps between two looks at all that members hold (--check-state); 0: nothing is compared
    lighthouses: int = 1  # of which one leads
    shared: bool = True  # one directory for them, or one for each node
    faults: tuple[Fault, ...] = field(default=())
    expect: str = ""
    finishers: tuple[str, ...] = ()

    def to_json(self) -> str:
        whole = asdict(self)
        whole["policy"] = self.policy.value
        whole["faults"] = []
        head = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in whole.items() if k != "faults" and v not in ("", ())]
        lines = "{\n" + ",\n".join(head)
        defaults = asdict(Fault(""))
        faults = [{k: v for k, v in asdict(f).items() if v != defaults[k]} for f in self.faults]
        listed = ",\n".join("  " + json.dumps(f) for f in faults)
        return f'{lines},\n "faults": [\n{listed}\n ]\n}}\n' if faults else f'{lines},\n "faults": []\n}}\n'

    @staticmethod
    def from_json(text: str) -> Scenario:
        found = json.loads(text)
        known = {f.name for f in fields(Scenario)}
        if unknown := set(found) - known:
            raise ValueError(f"a scenario has no {sorted(unknown)}; it has {sorted(known)}")
        found["policy"] = Policy(found.get("policy", "redistribute"))
        found["finishers"] = tuple(found.get("finishers", ()))
        found["faults"] = tuple(Fault(**f) for f in found.get("faults", ()))
        return Scenario(**found)

    @staticmethod
    def load(path: Path) -> Scenario:
        return Scenario.from_json(path.read_text())

    def without(self, position: int) -> Scenario:
        return replace(self, faults=self.faults[:position] + self.faults[position + 1 :])


# What random runs are made of. Members fail most: that is what the protocol is about.
MEMBER_FAULTS = ("kill", "kill", "kill", "kill", "pause", "pause", "alarm", "slow", "cut data")
# Of several lighthouses.
ELECTION_FAULTS = (
    "kill lighthouse",
    "pause lighthouse",
    "pause lighthouse",
    "freeze lighthouse",
    "cut store",
    "cut store",
    "cut agent",
)
# After which another life of it, or another one, leads.
LIGHTHOUSE_ENDS = {*ELECTION_FAULTS[:-1], "crash between effects", "fail over"}
CONTROL_FAULTS = (
    "kill lighthouse",
    "kill lighthouse",
    "crash between effects",
    "fail over",
    "pause lighthouse",
    "jump clock",
    "cut agent",
    "snap agent",
    "snap agent",
    "echo",
    "echo",
    "pause agent",
)
NODE_FAULTS = ("kill agent",)
LOSSES = ("kill all", "kill all", "kill all agents", "kill everything")
WISHES = ("drain", "drain node", "undrain node", "migrate", "migrate", "move", "scale", "operator kill", "evict")
# A group that loses one of its ranks keeps its memory.
RANK_LOSSES = ("lose rank", "lose rank", "lose rank", "hurt all", "hurt all", "kill", "kill all", "kill everything")
# Bits flip beside whatever else a run is made of, above all around the exchanges that shall show it.
FLIPPING = ("exchange", "exchanged", "commit", "recount", "recount", "heal", "healed", "spoilt", "rolled", "broken")
# Messages that are lost though nobody dies; after one or two of them a job has waited for long.
LOST_MESSAGES = ("lose message", "lose message", "lose message", "kill", "pause", "drain", "scale", "move")
MOST_LOST = 2
# What must not cost a step.
PLANNED = ("drain", "drain node", "undrain node", "migrate", "move", "scale", "slow")
MENUS = (
    MEMBER_FAULTS,
    MEMBER_FAULTS + CONTROL_FAULTS,
    MEMBER_FAULTS + CONTROL_FAULTS + NODE_FAULTS + WISHES,
    CONTROL_FAULTS,
    PLANNED,
)
EVERY_STEP = ("exchange", "exchanged", "commit")
SAVING = ("part", "durable", "saved", "look", "begin", "resume", "commit", "start")
MOMENTS = (*EVERY_STEP, *EVERY_STEP, "hear", "formed", "rolled", "heal", "healed", "broken", "finish", "start")


def random_scenario(seed: int, base: Scenario, menu: tuple[str, ...] = ()) -> Scenario:
    """The scenario of a seed: sizes vary around ``base``, faults come alone, in bursts and at tender moments.
    ``menu``: the kinds of faults to choose from; empty: one of MENUS."""
    rng = random.Random(seed * 2654435761 + 1)
    groups = rng.choice((1, 2, *range(2, base.groups + 1), *range(2, base.groups + 1)))
    shape = replace(
        base,
        seed=seed,
        groups=groups,
        nodes=rng.choice((groups, groups, max(1, groups // 2), 1)),
        shards=max(groups, rng.randint(2, base.shards)),
        steps=rng.randint(2, base.steps),
        policy=Policy.SHRINK if rng.random() < 0.15 else base.policy,
    )
    shape = _with_standbys(shape) if shape.policy is Policy.REDISTRIBUTE else shape
    menu = menu or rng.choice(MENUS)
    if base.lighthouses > 1 or set(menu) & set(CONTROL_FAULTS):
        shape = _with_lighthouses(shape, base)
    faults: list[Fault] = []
    at = rng.choice((rng.uniform(0.0, 1.5), rng.uniform(1.0, 2.5)))  # jobs start at about 1.5 s
    for _ in range(rng.choice((1, 2, 3, 4, 6, 8, 10))):
        at += rng.uniform(0.0, 0.3) if rng.random() < 0.6 else rng.uniform(0.3, 3.0)
        faults.append(_random_fault(rng, rng.choice(menu), at, shape))
    if shape.lighthouses > 1 and set(menu) & set(CONTROL_FAULTS):
        faults += _election_faults(shape)
    lost = [fault for fault in faults if fault.kind == "lose message"]
    shape = replace(shape, faults=tuple(fault for fault in faults if fault not in lost[MOST_LOST:]))
    kinds = {fault.kind for fault in shape.faults}
    if "kill agent" in kinds and kinds & LIGHTHOUSE_ENDS:
        shape = replace(shape, faults=_remembered(shape.faults))
    if base.copy_every:
        shape = _with_copies(shape, base)
    elif base.save_every or (any(menu is each for each in MENUS[1:3]) and random.Random(-seed).random() < 0.4):
        shape = _with_checkpoints(shape)
    return _with_flips(shape) if base.check_every else shape


def _remembered(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """If agents and the lighthouse end, nobody is left who knows of groups that were added, or that were on nodes which
    start nothing now. They would be waited for until an operator evicts them."""
    return tuple(fault for fault in faults if fault.kind not in ("scale", "drain node"))


def _with_lighthouses(shape: Scenario, base: Scenario) -> Scenario:
    """Some jobs have several lighthouses, or all if ``base`` has."""
    rng = random.Random(shape.seed * 2654435761 + 4)
    if base.lighthouses == 1 and rng.random() < 0.7:
        return shape
    return replace(shape, lighthouses=rng.choice((2, 2, 3)))


def _election_faults(shape: Scenario) -> list[Fault]:
    rng = random.Random(shape.seed * 2654435761 + 5)
    at, faults = 1.0, []
    for _ in range(rng.choice((1, 2, 3, 5))):
        at += rng.uniform(0.0, 0.5) if rng.random() < 0.4 else rng.uniform(0.5, 4.0)
        faults.append(_random_fault(rng, rng.choice(ELECTION_FAULTS), at, shape))
    return faults


def _with_standbys(shape: Scenario) -> Scenario:
    """Some jobs wait for standbys, from hardly at all to longer than any of them takes."""
    rng = random.Random(shape.seed * 2654435761 + 3)
    if rng.random() < 0.7:
        return shape
    wait = rng.choice((0.05, rng.uniform(0.2, 2.0), 5.0))
    return replace(shape, policy=Policy.SPARE, standbys=rng.choice((0, 1, 1, 2)), spare_wait=round(wait, 3))


def _with_checkpoints(shape: Scenario) -> Scenario:
    """The job writes checkpoints, and every group is lost once or more often, at tender moments."""
    rng = random.Random(shape.seed * 2654435761 + 2)
    faults = list(shape.faults)
    at = 1.5
    for _ in range(rng.choice((1, 1, 2, 3))):
        at += rng.uniform(0.0, 1.5)
        fault = _random_fault(rng, rng.choice(LOSSES), at, shape)
        spread = rng.choice((0.0, 0.0, rng.uniform(0.0, 0.05)))
        if fault.on:
            moment = rng.choice(SAVING)
            fault = replace(fault, on=moment, whose=-1, nth=rng.randint(1, 6))
        faults.append(replace(fault, seconds=round(spread, 4)))
    if any(fault.kind in ("kill all agents", "kill everything") for fault in faults):
        faults = [*_remembered(faults)]
    rng.shuffle(faults)
    return replace(shape, save_every=rng.randint(1, max(1, shape.steps // 2)), faults=tuple(faults))


def _with_copies(shape: Scenario, base: Scenario) -> Scenario:
    """The job keeps copies in memory, and perhaps checkpoints; groups lose ranks, again and again, and some more."""
    if base.save_every and random.Random(~shape.seed).random() < 0.5:
        shape = _with_checkpoints(shape)
    rng = random.Random(shape.seed * 2654435761 + 3)
    faults = list(shape.faults)
    at = 1.5
    for _ in range(rng.choice((1, 2, 2, 3, 4))):
        at += rng.uniform(0.0, 1.5)
        fault = _random_fault(rng, rng.choice(RANK_LOSSES), at, shape)
        if fault.on:
            fault = replace(fault, on=rng.choice((*SAVING, "copied", "copied")), whose=-1, nth=rng.randint(1, 6))
        if fault.kind in ("hurt all", "kill all", "kill everything"):
            fault = replace(fault, seconds=round(rng.choice((0.0, rng.uniform(0.0, 0.05), rng.uniform(0.0, 0.6))), 4))
        faults.append(fault)
    if any(fault.kind in ("kill all agents", "kill everything") for fault in faults):
        faults = [*_remembered(faults)]
    rng.shuffle(faults)
    saves = shape.save_every if shape.save_every != base.save_every or not base.save_every else 0
    return replace(shape, save_every=saves, copy_every=rng.randint(1, 3), faults=tuple(faults))


def _with_flips(shape: Scenario) -> Scenario:
    """Bits flip, mostly one at a time. Under the policy shrink nobody knows the right state of a step beforehand."""
    rng = random.Random(shape.seed * 2654435761 + 6)
    faults = list(shape.faults) if rng.random() < 0.8 else []
    at = 1.5
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        at += rng.uniform(0.0, 1.5)
        fault = _random_fault(rng, "flip", at, shape)
        if fault.on:
            moment = rng.choice(FLIPPING)
            often = shape.steps * shape.groups if moment in EVERY_STEP else 4
            fault = replace(fault, on=moment, whose=-1, nth=rng.randint(1, often))
        faults.append(replace(fault, other=rng.randrange(2), seconds=0.0))
    rng.shuffle(faults)
    policy = Policy.REDISTRIBUTE if shape.policy is Policy.SHRINK else shape.policy
    return replace(shape, policy=policy, check_every=rng.choice((1, 1, 2, 5)), faults=tuple(faults))


def _random_fault(rng: random.Random, kind: str, at: float, shape: Scenario) -> Fault:
    seconds = rng.choice((rng.uniform(0.01, 0.5), rng.uniform(0.5, 3.0), rng.uniform(3.0, 9.0)))
    target, other = rng.randrange(shape.groups), rng.randrange(shape.groups)
    if kind == "crash between effects":
        other = rng.randrange(6)
    elif kind == "scale":
        target = rng.randint(1, min(shape.shards, shape.groups + 2))
    elif kind in ("cut agent", "snap agent", "echo", "pause agent", "kill agent", "drain node", "undrain node"):
        target = rng.randrange(shape.nodes)
    if rng.random() < 0.4:
        return Fault(kind, round(at, 3), target, other, round(seconds, 3))
    delay = rng.choice((0.0, rng.uniform(0.0, 0.02), rng.uniform(0.0, 0.2)))
    whose = rng.choice((-1, -1, target, rng.randrange(shape.groups)))
    times = shape.steps if whose >= 0 else shape.steps * shape.groups
    moment = rng.choice(MOMENTS)
    nth = rng.randint(1, times) if moment in EVERY_STEP else rng.randint(1, 4 if whose >= 0 else 9)
    if moment in EVERY_STEP and rng.random() < 0.15:
        nth = times  # the last step is special: whoever leaves after it can help nobody any more
    return Fault(kind, round(delay, 4), target, other, round(seconds, 3), moment, whose, nth)
