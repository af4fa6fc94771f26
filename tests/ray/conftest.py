"""A real Ray cluster for each test that wants one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.ray.cluster import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    pytest.importorskip("ray", reason="Ray is not installed; make test-ray does that")
    from tests.ray.cluster import Cluster

    # Ray has sockets in there, and their names may not be long.
    directory = Path(tempfile.mkdtemp(prefix="ray-"))
    try:
        with Cluster(directory) as found:
            yield found
    finally:
        shutil.rmtree(directory, ignore_errors=True)
