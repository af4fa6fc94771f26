from __future__ import annotations

from pathlib import Path

import pytest

from planaria.wire import authority


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with credentials of all roles; not to be changed."""
    directory = tmp_path_factory.mktemp("site") / "credentials"
    authority.init(directory, 1)
    return directory
