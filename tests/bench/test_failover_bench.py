"""The fail-over bench: both blows are dealt, and the next lighthouse's answer is waited for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import failover


def test_a_leader_that_dies_and_one_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    options = ["--stores", "file", "--lease", "2", "--agents", "3", "--times", "1", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["failover.py", *options])
    assert failover.main() == 0
    found = json.loads(path.read_text())["found"]["file"]
    for name in failover.SIGNALS:
        (times,) = found[name]
        assert 0.0 < times["first"] <= times["last"] and times["first"] < times["answer"]
    assert "answer to a death" in capsys.readouterr().out


def test_an_unknown_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["failover.py", "--stores", "paper"])
    with pytest.raises(failover.BenchError, match="no store 'paper'"):
        failover.main()
