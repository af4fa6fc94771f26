from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pretend import Cluster

from planaria.chaos.watch import Watch


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "run")
    yield made
    made.close()


@pytest.fixture
def watch(cluster: Cluster) -> Iterator[Watch]:
    made = Watch(cluster.directory)
    yield made
    made.close()
