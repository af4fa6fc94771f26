from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import alone


@pytest.fixture(scope="session")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The quiet reference's digest for the script's arguments; each is computed once."""
    known: dict[tuple[str, ...], str] = {}

    def digest(*args: str) -> str:
        # Time changes no bit: the reference does without.
        slow = ("--pause", "--hold")
        kept = tuple(a for i, a in enumerate(args) if a not in slow and (i == 0 or args[i - 1] not in slow))
        if kept not in known:
            directory: Path = tmp_path_factory.mktemp("quiet")
            known[kept] = alone(directory, *kept)
        return known[kept]

    return digest
