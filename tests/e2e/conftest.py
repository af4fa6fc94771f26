from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from planaria.files import write_whole
from tests.e2e.harness import PATIENCE, Once, alone, ended
from tests.e2e.layouts import start

# Things that a test waits for, each with that patience. On a machine with ten times as much to do as it can, a start of
# two nodes took 30 s and a command of an operator 15 s: then tests in which nothing was wrong were ended in mid-job.
_WAITS = 5


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_WAITS * PATIENCE))


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """What a quiet run of ``name`` ends with, made in a directory of its own: once, also if several workers of pytest
    want it."""
    place = tmp_path_factory.getbasetemp()
    place = place.parent if "PYTEST_XDIST_WORKER" in os.environ else place

    def made(name: str, make: Callable[[Path], str]) -> str:
        directory = place / f"quiet-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        directory.mkdir(exist_ok=True)
        known = directory / "digest"
        with (directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not known.exists():
                write_whole(known, make(directory / "run"), durable=False)
        return known.read_text()

    return made


@pytest.fixture(scope="session")
def quiet(once: Once) -> Callable[..., str]:
    """The quiet reference's digest for the script's arguments."""

    def digest(*args: str) -> str:
        # Time changes no bit: the reference does without.
        slow = ("--pause", "--hold", "--linger")
        kept = tuple(a for i, a in enumerate(args) if a not in slow and (i == 0 or args[i - 1] not in slow))
        return once(f"train {kept}", lambda directory: alone(directory, *kept))

    return digest


@pytest.fixture(scope="session")
def unhurt(once: Once) -> Callable[[str], str]:
    """The digest of a layout's quiet run: one group."""
    return lambda layout: once(f"parallel {layout}", lambda directory: ended(start(directory, layout, groups=1)))
