"""Whole trainings from the command line, and what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from planaria.chaos.session import with_home

# A hang is what is looked for: far beyond what anything here takes on a loaded machine, where a start takes a minute.
PATIENCE = 400.0
CONFIG = """
[data]
files = "{texts}/*.txt"
[training]
steps = 6
seq_len = 32
local_batch_size = 2
seed = 5
[lr_scheduler]
warmup_steps = 2
[metrics]
log_freq = 1
"""


def write_config(directory: Path) -> Path:
    """A small run on a page of text, complete but for what a test says on the command line."""
    texts = directory / "texts"
    texts.mkdir(exist_ok=True)
    (texts / "page.txt").write_text("".join(f"The square of {n} is {n * n}, its cube {n**3}.\n" for n in range(200)))
    path = directory / "config.toml"
    path.write_text(CONFIG.format(texts=texts))
    return path


def environment() -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PLANARIA_")}
    return with_home(env | {"OMP_NUM_THREADS": "1"})


def train(config: Path, out: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """``planaria train`` to its end."""
    command = [sys.executable, "-m", "planaria", "train", str(config), f"--job.dump_folder={out}", *words]
    return subprocess.run(
        command, env=environment() | (env or {}), capture_output=True, text=True, timeout=PATIENCE, cwd=config.parent
    )


def lines(out: Path) -> list[dict[str, Any]]:
    """Of its metrics; of one that is being written only what is whole."""
    path = out / "metrics.jsonl"
    return [json.loads(row) for row in path.read_text().split("\n")[:-1]] if path.exists() else []


def digests(logs: Path) -> set[str]:
    """Of the final states of all groups that finished."""
    return {json.loads(path.read_text())["digest"] for path in logs.glob("rg*/i*/result.json")}
