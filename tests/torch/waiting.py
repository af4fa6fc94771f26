"""Waiting for what ranks leave in a directory."""

from __future__ import annotations

import time
from pathlib import Path

from tests.torch.pretend_agent import PATIENCE


def appear(*paths: Path) -> None:
    """Until all of them are there."""
    until = time.monotonic() + PATIENCE
    while missing := [path for path in paths if not path.exists()]:
        assert time.monotonic() < until, missing
        time.sleep(0.02)
