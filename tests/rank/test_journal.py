from __future__ import annotations

import json
from pathlib import Path

from planaria.rank.journal import Journal


def test_lines_and_result(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in range(3):
        journal.commit(step, 8, {"loss": 1.0 / (step + 1)})
    journal.result(3, "abc", {"loss": 0.5})
    journal.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(x["step"], x["shards"], x["loss"]) for x in lines] == [(0, 8, 1.0), (1, 8, 0.5), (2, 8, 1.0 / 3)]
    assert json.loads((tmp_path / "result.json").read_text()) == {"step": 3, "digest": "abc", "metrics": {"loss": 0.5}}
    assert not (tmp_path / "result.json.new").exists()


def test_what_is_flushed_is_there_whatever_comes(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.commit(0, 8, {})
    journal.flush()
    journal.commit(1, 8, {})
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [0]
    journal.close()
    journal.flush()


def test_floats_keep_their_bits(tmp_path: Path) -> None:
    value = 0.1 + 0.2
    journal = Journal(tmp_path)
    journal.commit(0, 1, {"loss": value})
    journal.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == value


def test_without_a_directory() -> None:
    journal = Journal(None)
    journal.commit(0, 1, {})
    journal.result(1, "", {})
    journal.close()
