"""The load on a lighthouse, with a handful of agents: every phase is played to its end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import lighthouse


def test_a_small_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    options = ["--agents", "3", "--seconds", "2.5", "--deaths", "2", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["lighthouse.py", *options])
    assert lighthouse.main() == 0
    found = json.loads(path.read_text())
    assert found["quiet"]["beats"] >= 3 and found["quiet"]["cpu"] > 0.0
    assert len(found["deaths"]) == 2 and all(0.0 < d["first"] <= d["last"] for d in found["deaths"])
    assert "Died to Publish" in capsys.readouterr().out
