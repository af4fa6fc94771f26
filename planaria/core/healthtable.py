"""The table of health rules: the one that holds without a file, and what a file may change in it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from planaria.core.health import Action, Rule, finite

# What the hardware or its driver says of itself is certain: such a group leaves. What may pass (heat) or is evened out
# anyway (a slow group gets fewer shards) is told to people, who know more.
DEFAULT_RULES = (
    Rule("lost", "gpu_lost", Action.DRAIN, above=0),
    Rule("ecc", "ecc_uncorrectable", Action.DRAIN, above=0),
    Rule("remap", "remap_failed", Action.DRAIN, above=0),
    Rule("xid", "xid", Action.DRAIN, above=0),
    Rule("reset", "reset_wanted", Action.DRAIN, above=0, readings=2),
    Rule("link", "nvlink_down", Action.DRAIN, above=0, readings=3),
    # A particle flips a bit once. A device that is caught again is not to be trusted; the third time it goes.
    Rule("corrupt", "corrupt", Action.DRAIN, above=2),
    # A link retries by itself; a hundred times in ten minutes is a cable or a connector. 120 readings are 10 minutes.
    Rule("link-errors", "nvlink_errors", Action.REPORT, above=100, within=120, clear=10),
    Rule("thermal", "thermal", Action.REPORT, above=0, readings=12, clear_readings=12),
    Rule("power", "power_brake", Action.REPORT, above=0, readings=12, clear_readings=12),
    # It must last for minutes: evaluations, checkpoints and neighbours on the machine slow a group down for a while.
    Rule("slow", "slow", Action.REPORT, above=1.25, readings=30, clear=1.125, clear_readings=12),
    Rule("command", "command", Action.DRAIN, above=0, readings=2, clear_readings=2),
)


@dataclass(frozen=True, slots=True)
class Command:
    argv: tuple[str, ...]
    every: float = 30.0  # seconds from one start to the next


@dataclass(frozen=True, slots=True)
class HealthTable:
    rules: tuple[Rule, ...] = DEFAULT_RULES
    every: float = 5.0  # seconds between two readings
    share: float = 0.1  # of the job's groups, which may be missing at once; at least one group
    dry_run: bool = False
    command: Command | None = None
    given: bool = False  # by a file: whoever wrote one wants to know what of it cannot be read


def parse(tree: Mapping[str, Any]) -> HealthTable:
    """The default table with the changes of a file. ValueError, one sentence, for what is unknown or makes no sense."""
    _only(tree, ("every", "share", "dry_run", "command", "rules"), "the table")
    every = _number(tree, "every", HealthTable().every)
    share = _number(tree, "share", HealthTable().share)
    if not 0.05 <= every <= 3600:
        raise ValueError(f"every is {every:g}; it must be between 0.05 and 3600 seconds")
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share:g}; it must be between 0 and 1")
    dry_run = tree.get("dry_run", False)
    if not isinstance(dry_run, bool):
        raise ValueError("dry_run must be true or false")
    command = _command(tree["command"]) if "command" in tree else None
    given = tree.get("rules", {})
    if not isinstance(given, dict) or not all(isinstance(entry, dict) for entry in given.values()):
        raise ValueError("rules must be tables: [rules.NAME]")
    rules = {rule.name: rule for rule in DEFAULT_RULES}
    for name, entry in given.items():
        rules[name] = _rule(name, entry, rules.get(name))
    return HealthTable(tuple(rules.values()), every, share, dry_run, command, given=True)


def _command(entry: object) -> Command:
    if not isinstance(entry, dict):
        raise ValueError("command must be a table: [command]")
    _only(entry, ("run", "every"), "[command]")
    run = entry.get("run")
    try:
        words = shlex.split(run) if isinstance(run, str) else run
    except ValueError as error:
        raise ValueError(f"command.run cannot be split into words: {error}") from None
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
        raise ValueError('command.run must be a command: "check.sh --quick", or a list of words')
    every = _number(entry, "every", Command(()).every)
    if not 0.05 <= every <= 86400:
        raise ValueError(f"command.every is {every:g}; it must be between 0.05 and 86400 seconds")
    return Command(tuple(words), every)


def _rule(name: str, entry: Mapping[str, Any], default: Rule | None) -> Rule:
    where = f"[rules.{name}]"
    known = [f.name for f in fields(Rule) if f.name != "name"]
    _only(entry, known, where)
    values = dict(entry)
    for key in ("above", "below", "clear"):
        if key in values:
            values[key] = _number(values, key, 0.0, where)
    for key in ("readings", "clear_readings", "within"):
        if key in values and (isinstance(values[key], bool) or not isinstance(values[key], int)):
            raise ValueError(f"{where}: {key} must be a whole number")
    if "action" in values:
        names = [action.value for action in Action]
        if values["action"] not in names:
            raise ValueError(f"{where}: there is no action {values['action']!r}; known actions: {', '.join(names)}")
        values["action"] = Action(values["action"])
    if "signal" in values and not isinstance(values["signal"], str):
        raise ValueError(f"{where}: signal must be a name")
    try:
        if default is None or values.get("signal", default.signal) != default.signal:
            if missing := [key for key in ("signal", "action") if key not in values]:
                raise ValueError(f"it needs {' and '.join(missing)}")
            return Rule(name=name, **values)
        if "above" in values or "below" in values:
            default = replace(default, above=values.get("above"), below=values.get("below"), clear=values.get("clear"))
        return replace(default, **values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _only(entry: Mapping[str, Any], known: tuple[str, ...] | list[str], where: str) -> None:
    for key in entry:
        if key not in known:
            raise ValueError(f"there is no key {key} in {where}; known keys: {', '.join(known)}")


def _number(entry: Mapping[str, Any], key: str, default: float, where: str = "") -> float:
    try:
        return finite(entry.get(key, default))
    except ValueError:
        raise ValueError(f"{where}{': ' if where else ''}{key} must be a finite number") from None
