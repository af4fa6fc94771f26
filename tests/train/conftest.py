from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.harness import PATIENCE

# Things that a test waits for, each with that patience: whole runs, one after the other.
_WAITS = 5


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(_WAITS * PATIENCE))
