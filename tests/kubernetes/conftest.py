from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest

from tests.kubernetes.cluster import PATIENCE, Cluster, Space
from tools.kube_control_plane import Unavailable, binaries, there

_WAITS = 10
_numbers = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("k8s") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_WAITS * PATIENCE))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if not there() and not os.environ.get("PLANARIA_BUILD_KUBERNETES"):
        pytest.skip("no control plane was built yet: make test-k8s does it")
    try:
        binaries()
    except Unavailable as error:
        pytest.skip(f"no control plane: {error}")
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        made.start()
        for node in ("n1", "n2", "n3"):
            made.kubelet.add(node)
        yield made
    finally:
        made.stop()


@pytest.fixture
def space(cluster: Cluster) -> Iterator[Space]:
    """A namespace of its own with an operator."""
    made = cluster.space(f"t{next(_numbers)}")
    made.operate()
    yield made
    made.close()
