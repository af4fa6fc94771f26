"""What engines have in common that give each life of a group a place somewhere in a cluster, with an agent in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Template:
    """What all groups have in common."""

    run: str  # the job's name for planaria
    planaria: tuple[str, ...]  # how it is called
    words: tuple[str, ...]  # the options of ``planaria run`` that are every group's
    script: tuple[str, ...]  # what it runs, and that one's arguments
    directory: Path  # of the run; each life of a group has its own below it
    cwd: Path
    lighthouse: Path  # the file that says where it is
    nodes: int = 1  # of a group


def name_of(run: str, group: int, incarnation: int) -> str:
    return f"{run}-rg{group}-i{incarnation}"


def life_in(name: str, run: str) -> tuple[int, int] | None:
    """(group, incarnation) of what is called so and belongs to this run; None for everything else."""
    match = re.fullmatch(re.escape(run) + r"-rg(\d+)-i(\d+)", name)
    return (int(match[1]), int(match[2])) if match else None


def directory_of(base: Path, group: int, incarnation: int) -> Path:
    """What this life leaves: its output, and all that an agent writes."""
    return base / f"rg{group}-i{incarnation}"


def newest(lives: Mapping[tuple[int, int], T]) -> dict[tuple[int, int], T]:
    """Of (group, incarnation), the last of each group: nobody asks what became of those before."""
    last = dict(sorted(lives))
    return {life: each for life, each in lives.items() if last[life[0]] == life[1]}


def last_words(base: Path, group: int, incarnation: int) -> tuple[int, str] | None:
    """(exit code, reason) of the life's first agent; None if it has said nothing."""
    try:
        said = json.loads((directory_of(base, group, incarnation) / "summary.json").read_text())
        return int(said["exit_code"]), str(said["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def agent_words(template: Template, group: int, incarnation: int) -> list[str]:
    """How the agent of this life is called on each of its nodes: its address, its place among several, and the script
    come after that."""
    words = [*template.planaria, "run", *template.words, "--job", template.run, "--placed"]
    words += ["--first-group", str(group), "--local-groups", "1", "--lighthouse", f"@{template.lighthouse}"]
    return [*words, "--log-dir", str(directory_of(template.directory, group, incarnation))]
