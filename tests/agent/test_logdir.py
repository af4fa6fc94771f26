"""The directory of a run: whose it is, and what is in it already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planaria.cli import logdir
from planaria.errors import UsageError

RUN = {"job": "j", "lighthouse": "h:1", "pid": os.getpid()}


def test_traces_of_a_run_are_moved_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    mine = ["rgb.png", "rg_notes", "rg1.txt", "lighthouse.db.backup", "train.py"]
    for name in mine:
        (tmp_path / name).touch()
    (tmp_path / "rgx").mkdir()
    (tmp_path / "earlier-2").mkdir()
    for name in ("rg0", "rg12", "rg3-i14", "standbys"):
        (tmp_path / name).mkdir()
    for name in ("events.jsonl", "summary.json", "lighthouse.db", "lighthouse.db-wal"):
        (tmp_path / name).touch()
    logdir.move_aside(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*mine, "rgx", "earlier-2", "earlier-3"}
    moved = {path.name for path in (tmp_path / "earlier-3").iterdir()}
    runs = {"run.json", "rg0", "rg12", "rg3-i14", "standbys", "events.jsonl", "summary.json"}
    runs |= {"lighthouse.db", "lighthouse.db-wal"}
    assert moved == runs


def test_without_a_run_nothing_is_moved(tmp_path: Path) -> None:
    (tmp_path / "rg0").mkdir()
    (tmp_path / "summary.json").touch()
    logdir.move_aside(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"rg0", "summary.json"}


@pytest.mark.parametrize("content", ["{}", "[1]", "nonsense", '{"job": "j"}'])
def test_a_file_of_somebody_elses_is_not_overwritten(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(UsageError, match="a run would overwrite it; give another --log-dir"):
        logdir.move_aside(tmp_path)
    assert (tmp_path / "run.json").read_text() == content


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_log_dir_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--log-dir is empty"):
        logdir.directory_given(text)
    assert logdir.directory_given("a/b") == Path("a/b")


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with logdir.held(tmp_path):
        said = rf"another run \(pid {os.getpid()}\) uses .*; give another --log-dir"
        with pytest.raises(UsageError, match=said), logdir.held(tmp_path):
            pass
        words = [sys.executable, "-m", "planaria", "run", "--log-dir", str(tmp_path), "-m", "json.tool"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and f"another run (pid {os.getpid()}) uses" in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    with logdir.held(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("name", ["lock", "events.jsonl"])
def test_a_directory_in_which_a_run_cannot_write(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    words = [sys.executable, "-m", "planaria", "run", "--log-dir", str(tmp_path), "-m", "json.tool"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    said = f"planaria: cannot write {tmp_path / name} (Is a directory); give another --log-dir\n"
    assert done.stderr == said


def test_whether_a_run_lives(tmp_path: Path) -> None:
    assert logdir.lives(tmp_path, RUN)
    assert not logdir.lives(tmp_path, {**RUN, "pid": 1 << 30}) and not logdir.lives(tmp_path, {**RUN, "pid": None})
    (tmp_path / "summary.json").write_text(json.dumps({"job": "other"}))
    assert logdir.lives(tmp_path, RUN)
    (tmp_path / "summary.json").write_text(json.dumps({"job": "j"}))
    assert not logdir.lives(tmp_path, RUN), "its pid may be another's by now"


def test_an_agent_that_died_is_known_again_by_what_it_left(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"job": "mine", "lighthouse": "h:1", "agent": "host-1"}))
    for life in ("rg0/i0", "rg0/i3", "rg1/i0", "earlier-1/rg1/i5", "earlier-1/rgx/i9"):
        (tmp_path / life).mkdir(parents=True)
    assert logdir.former_life(tmp_path, "mine") == ("host-1", {0: 4, 1: 6})
    assert logdir.former_life(tmp_path, "another") == logdir.former_life(tmp_path / "none", "mine") == ("", {})
    (tmp_path / "summary.json").write_text(json.dumps({"job": "mine"}))
    assert logdir.former_life(tmp_path, "mine") == ("", {}), "it has ended in order"
