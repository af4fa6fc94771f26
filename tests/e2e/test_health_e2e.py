"""A group that is slower than the others leaves in order, and nothing of the result changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Run

pytestmark = pytest.mark.e2e
RULES = """
every = 0.1
[rules.slow]
action = "drain"
readings = 5
"""


def test_a_slow_group_is_drained(tmp_path: Path, quiet: Callable[..., str]) -> None:
    table = tmp_path / "rules.toml"
    table.write_text(RULES)
    words = ("--pause", "0.01", "--odd", "slow")
    with Run(tmp_path / "run", *words, options=("--health", str(table))) as run:
        run.step(1)
        run.until(lambda: any("drained" in event["text"] for event in run.events("health")), "the verdict")
        (event,) = run.events("health")
        assert event["group"] == 1 and event["data"]["value"] > 1.25
        assert "group 1 takes" in event["text"] and "as long for a shard as the median of the other" in event["text"]
        run.until(lambda: not run.life(1).alive, "group 1 to leave")
        assert run.end() == 0, run.log()
        assert run.digests() == {quiet()}, run.log()
        assert not run.events("trouble")
