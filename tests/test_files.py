"""Whoever dies while a file is written, and whatever the disk says: the file is the old one or the new one, whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planaria.files import sync_directory, write_whole

WRITER = """
import itertools, json, sys
from pathlib import Path
from planaria.files import write_whole
for number in itertools.count():
    write_whole(Path(sys.argv[1]), json.dumps([number] * 20_000), durable=False)
"""


def test_killed_at_any_moment_it_leaves_a_whole_file(tmp_path: Path) -> None:
    path, seen = tmp_path / "state.json", set()
    for life in range(6):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
        try:
            while not path.exists() or json.loads(path.read_text())[0] < life:
                assert writer.poll() is None
            time.sleep(0.003 * life)
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        numbers = json.loads(path.read_text())
        assert len(numbers) == 20_000 and len(set(numbers)) == 1
        seen.add(numbers[0])
        path.unlink()
    write_whole(path, "after them")
    assert path.read_text() == "after them" and os.listdir(tmp_path) == ["state.json"]


def test_it_is_nobody_elses_at_any_moment_even_if_a_draft_was(tmp_path: Path) -> None:
    path, draft = tmp_path / "secret", tmp_path / ".secret.partial"
    draft.write_text("left by one that died")
    draft.chmod(0o666)
    reader = draft.open()  # somebody has it open, and would see what is written into it
    write_whole(path, "a secret", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600 and reader.read() == "left by one that died"
    reader.close()


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    write_whole(path, "before")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "after")
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["state"]
    with pytest.raises(OSError, match="No space left"):
        sync_directory(tmp_path)


def test_a_file_system_that_cannot_sync_directories_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(descriptor: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", cannot)
    sync_directory(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_directory(tmp_path / "nowhere")
