"""Jobs whose groups have several ranks, by how these share the model."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.harness import Run

SCRIPT = Path(__file__).parent / "scripts" / "parallel.py"
LAYOUTS = {"fsdp": 2, "tp": 2, "pp": 2, "fsdp-tp": 4, "pp-fsdp": 4}


def start(directory: Path, layout: str, *words: str, groups: int = 2, more: tuple[str, ...] = ()) -> Run:
    options = ("--nproc-per-group", str(LAYOUTS[layout]), "--device", "cpu", *more)
    return Run(directory, layout, *words, groups=groups, options=options, script=SCRIPT)
