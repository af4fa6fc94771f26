"""Whole jobs in a real control plane: real API server, scheduler and controller manager; pods are processes."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.harness import alone
from tests.kubernetes.cluster import Space

pytestmark = pytest.mark.k8s


@pytest.fixture(scope="session")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the same training, run by itself."""
    return alone(tmp_path_factory.mktemp("quiet"), "--steps", "40")


def test_a_job_trains_and_completes(space: Space, quiet: str) -> None:
    space.job("train", groups=2)
    space.at_work("train", 2)
    space.release.touch()
    status = space.phase("train", "Complete")
    assert status["step"] == 40
    assert space.digests("train") == {quiet}
