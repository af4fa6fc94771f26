"""Groups of several pods in a real control plane: they find each other by name, and end together."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.harness import Run
from tests.e2e.layouts import LAYOUTS, SCRIPT
from tests.kubernetes.cluster import Space

pytestmark = pytest.mark.k8s
LAYOUT = "fsdp-tp"
PODS_OF_A_GROUP = 2
WORDS = (LAYOUT, "--steps", "80")


@pytest.fixture
def quiet(tmp_path: Path) -> str:
    """The digest of the same training in one group on one node."""
    options = ("--nproc-per-group", str(LAYOUTS[LAYOUT]), "--device", "cpu")
    with Run(tmp_path / "quiet", *WORDS, groups=1, options=options, script=SCRIPT) as run:
        assert run.end() == 0, run.log()
        (found,) = run.digests()
        return found


def test_a_pod_that_is_killed_takes_its_group_along_and_leaves_no_trace(space: Space, quiet: str) -> None:
    body = space.job("wide", groups=2, submit=False, shards=4, nodesPerGroup=PODS_OF_A_GROUP)
    body["spec"]["procsPerNode"] = LAYOUTS[LAYOUT] // PODS_OF_A_GROUP
    container = body["spec"]["template"]["spec"]["containers"][0]
    container["args"] = ["--quiet", "--device", "cpu", str(SCRIPT), *WORDS, "--hold", str(space.release)]
    space.submit(body)
    status = space.at_work("wide", 2)

    # Another node than that of the agent that speaks for the group; then that one, of the other group.
    for replaced, (group, node) in enumerate([(1, 1), (0, 0)], start=1):
        pods = [space.pod_of("wide", group, each) for each in range(PODS_OF_A_GROUP)]
        before = [pod["metadata"]["name"] for pod in pods if pod is not None]
        assert len(before) == PODS_OF_A_GROUP
        os.kill(space.cluster.kubelet.process(before[node]), signal.SIGKILL)
        space.until(lambda n=replaced: space.status("wide")["replaced"] == n, "the replacement of a group")  # type: ignore[misc]
        status = space.at_work("wide", 2, status["step"])
        pods = [space.pod_of("wide", group, each) for each in range(PODS_OF_A_GROUP)]
        assert not {pod["metadata"]["name"] for pod in pods if pod is not None} & {*before}, "no half of it goes on"
    space.release.touch()
    space.phase("wide", "Complete")
    assert space.digests("wide") == {quiet}
