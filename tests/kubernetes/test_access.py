"""Who the operator says that it is."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
import yaml

from planaria.engines.kubernetes.access import find_access
from planaria.engines.kubernetes.api import PODS, Api, ApiError

# Gives its token only when it is told to, by somebody who can only do so if the plugin is not waited for.
_PLUGIN = """
import json, pathlib, sys, time
asked, on = map(pathlib.Path, sys.argv[1:])
asked.write_text(asked.read_text() + "." if asked.exists() else ".")
while not on.exists():
    time.sleep(0.01)
print(json.dumps({"status": {"token": "t"}}))
"""


async def test_while_a_plugin_is_asked_for_a_token_the_operator_goes_on_and_asks_it_once(tmp_path: Path) -> None:
    """An identity service may be slow, and the operator must renew its Lease and look after other jobs."""
    (tmp_path / "plugin.py").write_text(_PLUGIN)
    how = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": sys.executable,
        "args": [str(tmp_path / name) for name in ("plugin.py", "asked", "on")],
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
        with pytest.raises(ApiError, match="does not answer"):  # nobody listens there
            await api.list(PODS, "n")

    calls = [asyncio.ensure_future(call()) for _ in range(3)]
    while not (tmp_path / "asked").exists():
        await asyncio.sleep(0.01)
    (tmp_path / "on").touch()  # or the plugin is killed after a while, and there is no token
    await asyncio.gather(*calls)
    await api.close()
    assert (tmp_path / "asked").read_text() == "."
