"""A real Slurm for these tests, one for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    directory: Path = tmp_path_factory.mktemp("slurm")
    with Cluster(directory) as found:
        yield found
