"""Who the operator says that it is."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest
import yaml

from planaria.engines.kubernetes.access import find_access
from planaria.engines.kubernetes.api import PODS, Api, ApiError

_PLUGIN = """
import json, pathlib, sys, time
asked = pathlib.Path(sys.argv[1])
asked.write_text(asked.read_text() + "." if asked.exists() else ".")
time.sleep(1.0)
print(json.dumps({"status": {"token": "t"}}))
"""


async def test_while_a_plugin_is_asked_for_a_token_the_operator_goes_on_and_asks_it_once(tmp_path: Path) -> None:
    """An identity service may be slow, and the operator must renew its Lease and look after other jobs."""
    (tmp_path / "plugin.py").write_text(_PLUGIN)
    how = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": sys.executable,
        "args": [str(tmp_path / "plugin.py"), str(tmp_path / "asked")],
    }
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "http://127.0.0.1:9"}}],
        "users": [{"name": "u", "user": {"exec": how}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    api = Api(find_access(tmp_path / "config"))

    async def call() -> None:
        with pytest.raises(ApiError):  # nobody listens there
            await api.list(PODS, "n")

    calls = [asyncio.ensure_future(call()) for _ in range(3)]
    longest, before = 0.0, time.monotonic()
    while not all(task.done() for task in calls):
        await asyncio.sleep(0.01)
        now = time.monotonic()
        longest, before = max(longest, now - before), now
    await asyncio.gather(*calls)
    await api.close()
    assert longest < 0.9, "the loop stood still as long as the plugin took"
    assert (tmp_path / "asked").read_text() == "."
