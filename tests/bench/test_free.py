"""One contestant after the other, whatever becomes of each."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import free, recovery
from bench.contestants import BenchError, Contestant


def test_a_contestant_that_fails_is_noted_in_the_file_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["recovery.py", "--peers", "", "--ours", "tree,fast", "--json", str(path)])
    monkeypatch.setattr(free, "end_in_order", lambda: None)  # SIGTERM is pytest's here
    args = recovery.parse()

    def measure(c: Contestant, _: argparse.Namespace) -> list[dict[str, Any]]:
        if c.name == "planaria fast":
            raise BenchError("it did not come back")
        figures = ("slowest", "first", "healthy_step", "back", "others")
        return [{"name": c.name, "crashed": 0, "discarded": 0, "samples_lost": 0, **dict.fromkeys(figures, 0.5)}] * 2

    result = free.compare(args, "kills", measure)
    written = json.loads(path.read_text())
    assert written["failed"] == result["failed"] == {"planaria fast": "it did not come back"}
    assert [record["name"] for record in written["kills"]] == ["planaria tree"] * 2
    assert [row[:2] for row in recovery.rows(result)] == [["planaria tree", "2"], ["planaria fast", "failed"]]
    assert "it did not come back" in capsys.readouterr().err
