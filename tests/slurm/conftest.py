"""A real Slurm for these tests, one for all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing
from tools.debian import Unavailable
from tools.slurm_daemons import unpacked


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = missing()
    if reason and os.geteuid() == 0 and os.environ.get("PLANARIA_FETCH_SLURM"):
        try:
            unpacked()
            reason = missing()
        except Unavailable as error:
            reason = str(error)
    if reason:
        pytest.skip(reason)
    directory: Path = tmp_path_factory.mktemp("slurm")
    with Cluster(directory) as found:
        yield found
