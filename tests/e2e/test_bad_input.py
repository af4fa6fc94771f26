"""Bad input gets one clear sentence and exit code 2: no traceback, no hang, nothing started again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from planaria.chaos.session import with_home
from tests.e2e.harness import PATIENCE, TRAIN

pytestmark = pytest.mark.e2e


def planaria(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in with_home(os.environ).items() if not k.startswith("PLANARIA_")}
    command = [sys.executable, "-m", "planaria", *words]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE)


def refused(done: subprocess.CompletedProcess[str], *said: str) -> None:
    text = done.stderr + done.stdout
    assert done.returncode == 2, text
    assert "Traceback" not in text, text
    for words in said:
        assert words in text, text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run",), "SCRIPT"),
        (("run", "no_such_script.py"), "no_such_script.py"),
        (("run", "--groups", "0", str(TRAIN)), "groups"),
        (("run", "--groups", "4", "--shards", "2", str(TRAIN)), "shards"),
        (("run", "--policy", "hope", str(TRAIN)), "hope"),
        (("run", "--reduction", "magic", str(TRAIN)), "magic"),
        (("run", "--nproc-per-group", "0", str(TRAIN)), "nproc"),
        (("run", "--exact", "most", str(TRAIN)), "known promises: bits, samples"),
        (("status", "--lighthouse", "127.0.0.1:1"), "127.0.0.1:1"),
        (("chaos", "no_such_script.py"), "no_such_script.py"),
        (("chaos", str(TRAIN), "--kinds", "earthquake"), "earthquake"),
    ],
)
def test_command_lines(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    refused(planaria(*words, cwd=tmp_path), said)


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(planaria("lighthouse", "--bind", f"127.0.0.1:{port}", cwd=tmp_path), str(port))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--samples", "10"), ["10 samples", "24"]),
        (("--odd", "frozen"), ["no parameters that need gradients"]),
        (("--odd", "threads"), ["group 1", "threads"]),
        (("--odd", "start"), ["group 1", "start"]),
        (("--odd", "unused"), ["extra.weight", "shards"]),
        (("--odd", "nan"), ["step 5", "not finite", "from shard "]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_scripts(args: tuple[str, ...], said: list[str], tmp_path: Path) -> None:
    words = ("run", "--groups", "2", "--log-dir", str(tmp_path / "run"), str(TRAIN), "--steps", "20", *args)
    refused(planaria(*words, cwd=tmp_path), *said)


def test_a_script_with_more_groups_than_its_shards(tmp_path: Path) -> None:
    refused(planaria("run", "--groups", "7", str(TRAIN), cwd=tmp_path), "7 groups", "6 shards")
