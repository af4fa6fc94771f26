"""With --log-format json every line that anybody sees is a JSON object, whatever happens."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planaria.core.messages import Event
from planaria.logs import LogFormat, configure, event_line, json_line, json_of

from .conftest import SCRIPTS, Run, plain_environ

SPEAKER = str(SCRIPTS / "speaker.py")


def objects(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert all({"at", "level", "text"} <= each.keys() and each["at"].endswith("Z") for each in found)
    return found


def test_a_run_with_a_kill(start_run: Callable[..., Run]) -> None:
    run = start_run("--groups", "2", "--log-format", "json", SPEAKER, "60", "0.02", "hold")
    run.until(lambda: run.step_of(1) >= 3)
    os.kill(run.pid_of(1), signal.SIGKILL)
    run.until(lambda: run.step_of(1, 1) >= 30)  # by a planned quorum
    assert run.end() == 0
    told = objects(run.err)
    job = json.loads((run.logs / "run.json").read_text())["job"]
    assert {each["job"] for each in told} == {job}
    (exit,) = [each for each in told if each.get("kind") == "exit" and each["state"] != "finished"]
    assert (exit["group"], exit["incarnation"], exit["rank"]) == (1, 0, 0)
    assert {each["kind"] for each in told if "kind" in each} >= {"start", "quorum", "plan", "recovered", "summary"}
    assert told[-1]["kind"] == "summary" and told[-1]["exit_code"] == 0


def test_what_ranks_print(start_run: Callable[..., Run], tmp_path: Path) -> None:
    script = tmp_path / "prints.py"
    script.write_text("print('an \"odd\" line\\u2028of one rank')\nraise SystemExit(3)\n")
    run = start_run("--groups", "1", "--max-replacements", "0", "--log-format", "json", str(script))
    assert run.wait() != 0
    (line,) = [each for each in objects(run.out) if each.get("stream") == "stdout"]
    assert line["text"] == 'an "odd" line\u2028of one rank'
    assert (line["group"], line["incarnation"], line["rank"]) == (0, 0, 0)


def test_an_event_keeps_its_numbers_and_its_own_words() -> None:
    event = Event(1.5, "exit", "group 3 is gone", 3, (("rank", "2"), ("quorum", "1.2"), ("text", "x"), ("gpu", "")))
    line = json.loads(event_line(event, "train"))
    assert line == {
        "at": "1970-01-01T00:00:01.500Z", "level": "info", "text": "group 3 is gone", "job": "train", "kind": "exit",
        "group": 3, "rank": 2, "quorum": "1.2", "text_": "x",
    }  # fmt: skip
    assert "group" not in json.loads(event_line(Event(0.0, "link", "up", -1, ()), "train"))
    assert json.loads(json_line("a\nb", 0.0, odd=object()))["text"] == "a\nb"


def test_what_is_called_as_the_line_s_own_gets_another_name() -> None:
    event = Event(0.0, "exit", "text", 3, (("job", "x"), ("group", "9"), ("logger", "y"), ("step", "?")))
    line = json.loads(event_line(event, "train"))
    assert (line["job"], line["group"], line["job_"], line["group_"]) == ("train", 3, "x", "9")
    assert (line["logger_"], line["step"]) == ("y", "?")


def test_what_is_such_a_line_already_is_left_alone() -> None:
    told = event_line(Event(0.0, "link", "up", -1, ()), "train")
    assert json_of(told, job="train", group=1) == told
    assert json.loads(json_of("srun: error", job="train", group=1))["group"] == 1


def test_a_service_logs_objects_and_their_tracebacks(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    try:
        configure(LogFormat.JSON)
        try:
            raise ValueError("no")
        except ValueError:
            logging.getLogger("planaria.lighthouse").exception("it %s", "failed")
        logging.getLogger("x").warning("w", extra={"facts": {"job": "train", "text": "better"}})
    finally:
        root.handlers = before
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["text"], first["level"], first["logger"]) == ("it failed", "error", "planaria.lighthouse")
    assert "ValueError: no" in first["traceback"]
    assert (second["text"], second["job"], second["level"]) == ("better", "train", "warning")


def test_a_lighthouse(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "planaria", "lighthouse", "--bind", "127.0.0.1:0", "--store", str(tmp_path / "db")]
    environ = plain_environ(PLANARIA_LOG_FORMAT="json")
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and "address" in json.loads(process.stdout.readline())
    process.terminate()
    _, told = process.communicate(timeout=60)
    lines = [json.loads(line) for line in told.splitlines()]
    assert lines[-1]["text"] == "stopping" and lines[0]["logger"] == "planaria.lighthouse"
