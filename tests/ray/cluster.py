"""A Ray cluster of several raylets on this machine, each with an address of its own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster as RayCluster

from planaria.engines.ray.host import NAMESPACE

# The least that Ray takes: nothing is stored in it.
_STORE = 80_000_000


class Cluster:
    """Use as a context. The head has no place for groups; so it has no CPUs."""

    def __init__(self, directory: Path, cpus: int = 2) -> None:
        """``cpus``: of every node, as far as Ray is told."""
        self._cpus, self._nodes, self._made = cpus, dict[str, Any](), 1
        # Its processes are children of this one, and find our package like this one does.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        place = {"include_dashboard": False, "temp_dir": str(directory), "node_ip_address": "127.10.0.1"}
        args = {"num_cpus": 0, "object_store_memory": _STORE, **place}
        self._ray = _begun(lambda: RayCluster(initialize_head=True, head_node_args=args))
        ray.init(self._ray.address, namespace=NAMESPACE, log_to_driver=False)
        self.env = os.environ | {"RAY_ADDRESS": self._ray.address}

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()
        self._ray.shutdown()

    def add(self) -> str:
        """Another node; its name."""
        self._made += 1
        name = f"127.10.0.{self._made}"
        args = {"num_cpus": self._cpus, "object_store_memory": _STORE, "node_ip_address": name, "node_name": name}
        self._nodes[name] = _begun(lambda: self._ray.add_node(**args))
        return name

    def lose(self, name: str) -> None:
        """The node loses its power, as far as Ray's processes are its own: its raylet is killed, and so are its
        workers with all that they have started, for those cannot outlive a machine."""
        for each in self._nodes.pop(name).all_processes["raylet"]:
            os.kill(each.process.pid, signal.SIGKILL)

    def actors(self) -> set[str]:
        """The names of those that are alive."""
        return set(ray.util.list_named_actors())

    def places(self) -> set[str]:
        """The names of placement groups that hold something."""
        return {each["name"] for each in ray.util.placement_group_table().values() if each["state"] != "REMOVED"}


def _begun(begin: Callable[[], Any]) -> Any:
    """Ray gives a raylet 30 s to start, however busy the machine is."""
    for _ in range(4):
        before = set(psutil.Process().children())
        try:
            return begin()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            left = [child for child in psutil.Process().children() if child not in before]
            for process in left:
                process.kill()
            psutil.wait_procs(left)
    return begin()
