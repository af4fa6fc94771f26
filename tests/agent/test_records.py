"""What people and programs read of a run: events, followed logs, the summary."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from planaria.agent.events import EventLog
from planaria.agent.lives import Failure
from planaria.agent.logs import LogPump
from planaria.agent.summary import Summary
from planaria.core.messages import Event, Member


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_are_lines(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: 12.5)
    heard: list[Event] = []
    relayed: list[Event] = []
    log.listen(heard.append)
    log.listen(relayed.append, relayed=True)
    log.add("exit", "group 1 is gone", 1, {"exit_code": None, "step": 3})
    log.take(Event(9.0, "quorum", "a new one", -1, (("id", "1.2"),)))
    log.close()
    log.add("late", "after the end")  # no harm
    assert lines(tmp_path / "events.jsonl") == [
        {"at": 12.5, "kind": "exit", "text": "group 1 is gone", "group": 1, "data": {"exit_code": None, "step": 3}},
        {"at": 9.0, "kind": "quorum", "text": "a new one", "group": -1, "data": {"id": "1.2"}},
    ]
    assert [event.kind for event in log.newest] == ["exit", "quorum", "late"]
    assert [event.kind for event in heard] == ["exit", "late"], "what this process saw"
    assert [event.kind for event in relayed] == ["quorum"], "what the lighthouse said"
    assert heard[0].data == (("exit_code", "None"), ("step", "3"))


def test_a_full_disk_stops_nobody() -> None:
    log = EventLog(Path("/dev/full"))
    heard: list[Event] = []
    log.listen(heard.append)
    log.add("start", "first")
    log.add("exit", "second")
    log.close()
    assert [event.kind for event in heard] == ["start", "unwritten", "exit"], "told once"
    assert heard[1].text == "/dev/full cannot be written (No space left on device); the run goes on without its record"


def test_a_line_that_was_cut_short_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, clock=lambda: 1.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))  # as if the disk were full then
        log.add("start", "too long for the disk")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    log.add("exit", "there is space again")
    log.close()
    torn, *whole = path.read_text().splitlines()
    assert len(torn) == 20 and [json.loads(line)["text"] for line in whole] == ["there is space again"]


def test_events_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    for text in ("one", "two"):
        log = EventLog(tmp_path / "events.jsonl")
        log.add("x", text)
        log.close()
    assert [line["text"] for line in lines(tmp_path / "events.jsonl")] == ["one", "two"]


# --- the ranks' output -------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for long at the end of a run, but a loaded machine may show nothing in that time."""
    monkeypatch.setattr("planaria.agent.logs._LAST_WORDS_SECONDS", 60.0)


def test_lines_are_prefixed_and_whole(tmp_path: Path) -> None:
    out = io.StringIO()
    pump = LogPump()
    path = tmp_path / "stdout.log"
    pump.follow("rg1:rank0", path, out)
    with path.open("w", buffering=1) as file:
        file.write("first\nsec")
        file.flush()
        while "first" not in out.getvalue():
            time.sleep(0.01)
        assert "sec" not in out.getvalue()
        file.write("ond\nno newline at the end")
    pump.close()
    assert out.getvalue().splitlines() == [
        "[rg1:rank0] first",
        "[rg1:rank0] second",
        "[rg1:rank0] no newline at the end",
    ]


def test_a_progress_bar_is_one_line(tmp_path: Path) -> None:
    out = io.StringIO()
    (tmp_path / "log").write_bytes(b"\r 10%\r 50%\r100%\r\nwindows\r\n\xff\n")
    pump = LogPump()
    pump.follow("a", tmp_path / "log", out)
    pump.close()
    assert out.getvalue() == "[a] 100%\n[a] windows\n[a] \ufffd\n"


def test_released_files_are_shown_to_the_end(tmp_path: Path) -> None:
    out = io.StringIO()
    pump = LogPump()
    path = tmp_path / "log"
    pump.follow("a", path, out)
    path.write_text("x" * 200_000 + "\nlast")
    pump.release(path)
    while "last" not in out.getvalue():
        time.sleep(0.01)
    path.write_text("what comes later is another's")
    pump.close()
    assert "another" not in out.getvalue() and len(out.getvalue()) == 200_000 + len("[a] \n[a] last\n")


def test_a_file_that_never_comes_is_no_matter(tmp_path: Path) -> None:
    pump = LogPump()
    pump.follow("a", tmp_path / "nothing", io.StringIO())
    pump.close()


def test_our_own_lines_go_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    pump = LogPump()
    pump.say("[planaria] hello")
    pump.close()
    assert capfd.readouterr().err == "[planaria] hello\n"


def test_a_terminal_that_is_gone_stops_nobody(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    broken, good = os.fdopen(writer, "w"), io.StringIO()
    (tmp_path / "log").write_text("line\n")
    pump = LogPump()
    pump.follow("a", tmp_path / "log", broken)
    pump.follow("b", tmp_path / "log", good)
    pump.close()
    assert good.getvalue() == "[b] line\n"
    with pytest.raises(BrokenPipeError):
        broken.close()


def test_a_terminal_that_blocks_does_not_hold_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planaria.agent.logs._LAST_WORDS_SECONDS", 0.1)
    release = threading.Event()

    class Paused(io.StringIO):
        def write(self, text: str) -> int:
            release.wait()
            return super().write(text)

    (tmp_path / "log").write_text("line\n")
    pump = LogPump()
    pump.follow("a", tmp_path / "log", Paused())
    pump.close()
    assert pump._thread.is_alive(), "still in its write, and nobody waits for it"
    release.set()
    pump._thread.join()


# --- the summary --------------------------------------------------------------------------------------------------


def failure(group: int, code: int | None, message: str, log: Path) -> Failure:
    return Failure(Member(group, 1), code, 1_700_000_000.0, 12, message, log, True)


def test_summary_of_a_good_run(tmp_path: Path) -> None:
    killed = failure(1, -9, "killed by SIGKILL", tmp_path / "err")
    summary = Summary("j", 0, "all steps are committed", 4, 200, 1, 12.34, tmp_path, (killed,))
    text = summary.text()
    assert text == (
        "planaria: job j finished: all steps are committed "
        f"(200 steps committed, 1 group lost, 1 replaced, 12.3 s, logs in {tmp_path})"
    )
    summary.write()
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content["outcome"] == "finished" and content["exit_code"] == 0 and content["step"] == 200
    assert content["first_failure"]["signal"] == 9 and content["first_failure"]["exit_code"] is None


def test_summary_of_a_failure_names_the_first(tmp_path: Path) -> None:
    failures = [failure(1, 1, "ValueError: boom\nsecond line", tmp_path / "err")]
    failures += [failure(2, -11, "killed by SIGSEGV", tmp_path / "err") for _ in range(7)]
    summary = Summary("j", 1, "the budget is used up", 4, 12, 3, 5.0, tmp_path, tuple(failures))
    text = summary.text()
    assert "job j failed: the budget is used up" in text
    for part in (
        "First failure (root cause):",
        "group     : 1 (incarnation 1)",
        "exit code : 1",
        "step      : 12",
        "message   : ValueError: boom\n              second line",
        f"log file  : {tmp_path / 'err'}",
        "group 2 (incarnation 1) killed by SIGSEGV: killed by SIGSEGV",
        "and 2 more",
    ):
        assert part in text
    summary.write()
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content["first_failure"] == {
        "group": 1,
        "incarnation": 1,
        "rank": 0,
        "exit_code": 1,
        "signal": None,
        "time": 1_700_000_000.0,
        "step": 12,
        "message": "ValueError: boom\nsecond line",
        "log_file": str(tmp_path / "err"),
    }
    assert len(content["failures"]) == 8


def test_summary_of_a_signal_and_of_nothing(tmp_path: Path) -> None:
    text = Summary("j", 1, "gone", 1, 0, 0, 1.0, tmp_path, (failure(0, -9, "m", tmp_path),)).text()
    assert "signal    : SIGKILL (9)" in text
    never_ran = replace(failure(0, None, "m", tmp_path), ran=False)
    text = Summary("j", 1, "gone", 1, 0, 0, 1.0, tmp_path, (never_ran,)).text()
    assert "exit code : could not be started" in text
    assert Summary("j", 130, "stopped", 1, 0, 0, 1.0, tmp_path).outcome == "stopped"
    assert "\n" not in Summary("j", 1, "never began", 1, 0, 0, 1.0, tmp_path).text()
