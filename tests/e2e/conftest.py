from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.e2e.harness import PATIENCE, alone
from tests.e2e.layouts import start

# Things that a test waits for, each with that patience. On a machine with ten times as much to do as it can, a start of
# two nodes took 30 s and a command of an operator 15 s: then tests in which nothing was wrong were ended in mid-job.
_WAITS = 5


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_WAITS * PATIENCE))


@pytest.fixture(scope="session")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The quiet reference's digest for the script's arguments; each is computed once."""
    known: dict[tuple[str, ...], str] = {}

    def digest(*args: str) -> str:
        # Time changes no bit: the reference does without.
        slow = ("--pause", "--hold", "--linger")
        kept = tuple(a for i, a in enumerate(args) if a not in slow and (i == 0 or args[i - 1] not in slow))
        if kept not in known:
            directory: Path = tmp_path_factory.mktemp("quiet")
            known[kept] = alone(directory, *kept)
        return known[kept]

    return digest


@pytest.fixture(scope="session")
def unhurt(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The digest of a layout's quiet run: one group. Each is computed once."""

    @cache
    def digest(layout: str) -> str:
        with start(tmp_path_factory.mktemp(layout) / "run", layout, groups=1) as run:
            assert run.end() == 0, run.log()
            (found,) = run.digests()
            return found

    return digest
