"""A keeper's memory in a file, so that one that is started again takes nothing for new."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from planaria.core.plan import GroupState, NodeFailure
from planaria.engines.keeper import Life, Memory
from planaria.errors import UsageError
from planaria.files import write_whole


def read(path: Path) -> Memory:
    """Empty if there is none. UsageError if it cannot be one."""
    try:
        found = json.loads(path.read_text())
        lives = {
            int(group): Life(**{**life, "state": GroupState(life["state"])}) for group, life in found["lives"].items()
        }
        for life in lives.values():
            life.nodes, life.avoid = tuple(life.nodes), tuple(life.avoid)
        failures = [NodeFailure(**failure) for failure in found["node_failures"]]
        wish = tuple(map(int, found.get("wish", (0, 0))))
        return Memory(**{**found, "lives": lives, "node_failures": failures, "wish": wish})
    except FileNotFoundError:
        return Memory()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path} is not what a supervisor remembers ({error}); give another --log-dir") from None


def write(path: Path, memory: Memory, before: str = "") -> str:
    """Whole or not at all, and not if it is what was written ``before``: to have it on the disk takes time, and between
    two looks there is seldom anything new. Returns what is there now. Raises OSError."""
    text = json.dumps(asdict(memory), default=lambda state: state.value)
    if text != before:
        write_whole(path, text)
    return text
