"""What is told of a run, from records as runs leave them: whole, cut short, spoilt, of two nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from planaria.cli.explain import explain
from planaria.errors import UsageError
from planaria.explain.incidents import tell
from planaria.explain.record import Spoilt, entries, turns
from planaria.explain.words import phases
from planaria.wire import stacks

START = 1_795_899_888.0


def event(at: float, kind: str, text: str, group: int = -1, **data: object) -> dict[str, Any]:
    return {"at": START + at, "kind": kind, "text": text, "group": group, "data": data}


def killed(group: int, at: float, number: int, step: int) -> list[dict[str, Any]]:
    """A group of a job of three is killed, and comes back. What the lighthouse says has words for numbers."""
    who = f"group {group} (incarnation {number - 2})"
    numbers = {"joined": "", "founding": "False"}
    facts = {"incarnation": number - 2, "state": "dead", "exit_code": -9, "rank": 0, "step": step}
    newer = {"quorum": f"1.{number + 1}", "lost": "", "joined": f"{group}", "founding": "False"}
    without = f"quorum 1.{number}: two (group {group} lost)"
    return [
        event(at + 0.01, "exit", f"{who} killed by SIGKILL", group, **facts),
        event(at, "lost", f"{who} is gone: killed by SIGKILL", group, cause="killed by SIGKILL"),
        event(at, "quorum", without, quorum=f"1.{number}", lost=f"{group}", **numbers),
        event(at + 0.3, "start", f"group {group} (incarnation {number - 1}) runs as pid 7", group),
        event(at + 0.2, "recovered", "they went on", group, seconds=0.2, step=step + 1),
        event(at + 0.8, "plan", "quorum", **newer),
    ]


_FIRST = {"quorum": "1.1", "lost": "", "joined": "0,1,2", "founding": "True"}
FOUNDING = event(0, "quorum", "quorum 1.1: three (the job starts)", **_FIRST)


def record(run: Path, events: list[dict[str, Any]], more: bytes = b"") -> Path:
    run.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(one) + "\n" for one in events)
    (run / "events.jsonl").write_bytes(lines.encode() + more)
    return run


def turn(run: Path, group: int, quorum: str, at: float, step: int, taken_over: list[int]) -> None:
    """A survivor: 0.01 s to form, 0.02 s for the roll, 0.1 s for the rest."""
    directory = run / f"rg{group}" / "i0"
    directory.mkdir(parents=True, exist_ok=True)
    said = [
        {"at": START + at, "what": "heard", "urgent": True},
        {"at": START + at + 0.01, "what": "formed"},
        {"at": START + at + 0.03, "what": "rolled", "step": step, "taken_over": taken_over},
        {"at": START + at + 0.13, "what": "committed", "step": step + 1},
    ]
    with (directory / "quorums.jsonl").open("a") as file:
        file.writelines(json.dumps(line | {"quorum": quorum}) + "\n" for line in said)


def shown(capsys: pytest.CaptureFixture[str], *runs: Path, at: str | None = None) -> str:
    explain(list(runs), at)
    return capsys.readouterr().out


def test_a_kill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path / "run", [FOUNDING, *killed(2, 10.0, 2, 40), event(20, "end", "all steps", exit_code=0)])
    turn(run, 0, "1.2", 10.07, 40, [])
    turn(run, 1, "1.2", 10.08, 40, [4, 5])
    text = shown(capsys, run)
    assert "1 loss\n" in text and "(+10.0 s, at step 40)" in text
    assert "group 2 lost (killed by SIGKILL), taken over: shards 4, 5 by group 1, next commit after 0.20 s" in text
    for line in (
        "noticed by: its agent, the parent of the process: at once",
        "word of the next quorum at all groups here: 0.080 s",
        "new one formed: 0.010 s",
        "roll call: 0.020 s",
        "exchange and step: 0.100 s",
        "computed again of step 40: group 1: shards 4, 5",
        "the end: all steps (exit code 0)",
    ):
        assert line in text
    assert "could not be read" not in text


def test_a_standstill_in_which_nobody_was_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    why = "quorum 1.1: all members have waited in the exchange of step 40 for 20.1 s (limit 20 s)"
    broke = event(9.9, "trouble", "group 1 (incarnation 0): planned quorum 1.0: rank 1 is gone", 1)
    again = event(30.1, "quorum", "quorum 1.2: three (it stood still)", quorum="1.2", lost="", founding="False")
    formed = event(9.95, "quorum", "quorum 1.1: again", quorum="1.1", lost="", founding="False")
    run = record(tmp_path / "run", [FOUNDING, broke, formed, event(30.0, "still", why), again])
    turn(run, 0, "1.2", 30.11, 40, [])
    text = shown(capsys, run)
    assert "nothing was lost; 1 standstill\n" in text and "(+30.0 s): nobody was lost, and all waited" in text
    for line in (f"why: {why}", "noticed by: the lighthouse", "then: quorum 1.2", f"(+30.000 s) {why}", "one formed"):
        assert line in text
    assert "rank 1 is gone" not in text


def test_a_hang_shows_where_each_rank_stood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    why = "no progress while computing a shard for 10.0 s"
    stood = [
        {"group": 0, "rank": 0, "pid": 1, "process": "S", "phase": "forming", "seconds": 0.1, "step": 12, "shard": -1},
        {"group": 1, "rank": 1, "pid": 2, "process": "S", "phase": "computing", "seconds": 10.1, "step": 12, "shard": 3,
         "collectives": 41, "stacks": "rg1/i0/stacks.txt", "from": 5},
        {"group": 1, "rank": 0, "pid": 3, "process": "T", "stacks": "../outside", "from": 0},
    ]  # fmt: skip
    run = record(
        tmp_path / "run",
        [
            FOUNDING,
            event(10, "suspect", f"group 1 (incarnation 0): {why}", 1, incarnation=0, why=why, step=12),
            event(10, "quorum", "quorum 1.2: two (group 1 lost)", quorum="1.2", lost="1", joined="", founding="False"),
            event(10.05, "hang", "where they stood", 1, incarnation=0, ranks=stood),
            event(12, "kill", "group 1 (incarnation 0) is killed", 1),
            event(12.1, "exit", "group 1 (incarnation 0) killed by SIGKILL", 1, incarnation=0, state="dead", step=12),
        ],
    )
    (run / "rg1" / "i0").mkdir(parents=True)
    first = "Thread 0x1 (most recent call first):\n  File control\n"
    answer = f"older\n{first}\nThread 0x2 (most recent call first):\n  File hung\n"
    (run / "rg1" / "i0" / "stacks.txt").write_text(answer)
    (tmp_path / "outside").write_text("Thread 0x1 (most recent call first):\n  secret\n")
    text = shown(capsys, run)
    assert f"group 1 lost (a hang: {why})" in text and "1 loss\n" in text
    assert "group 1, rank 1 (pid 2): computing shard 3 for 10.1 s, step 12" in text and "41 collectives begun" in text
    assert "File hung" in text and "File control" not in text and "secret" not in text
    assert "(pid 3, stopped)" in text


def test_a_run_that_crashed_and_a_line_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [FOUNDING, *killed(2, 10.0, 2, 40)[:3]]
    run = record(tmp_path / "run", events, b'{"at": 1, "kind": 7}\n[1]\n\xff\xfe\n{"at": 1795899899.0, "ki')
    text = shown(capsys, run)
    assert "group 2 lost (killed by SIGKILL), no commit after it is recorded" in text
    assert "the record has no end: the agent still runs, or died" in text
    assert "4 lines of the record could not be read" in text


def test_everybody_lost_and_no_quorum_after_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exits = [
        event(9, "exit", f"group {g} (incarnation 0) exited with code 1: no memory", g, state="dead") for g in (0, 1)
    ]
    text = shown(capsys, record(tmp_path / "run", [FOUNDING, *exits, event(10, "end", "too few", exit_code=1)]))
    assert "group 0 lost (exited with code 1: no memory); group 1 lost" in text and "no quorum came after it" in text
    assert "the end: too few (exit code 1)" in text


def test_one_is_chosen_by_step_or_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = [one for n in range(8) for one in killed(2, 10.0 * (n + 1), 2 + 2 * n, 40 * (n + 1))]
    run = record(tmp_path / "run", [FOUNDING, *many])
    text = shown(capsys, run)
    assert text.count("next commit after 0.20 s") == 8 and "why:" not in text and "--at STEP" in text
    for at in ("118", "+30.5s", str(START + 31)):
        text = shown(capsys, run, at=at)
        assert text.count("why:") == 1 and "at step 120" in text
    for at, words in (("+1s", "nothing was lost until then"), ("noon", "give a step"), ("+inf", "")):
        if words:
            with pytest.raises(UsageError, match=words):
                explain([run], at)
        else:
            assert "at step 320" in shown(capsys, run, at=at)


def test_clocks_of_two_nodes_are_not_compared(tmp_path: Path) -> None:
    """Node b is an hour ahead, and knows of the loss by the lighthouse's word alone."""
    losses = killed(2, 10.0, 2, 40)
    a, b = record(tmp_path / "a", [FOUNDING, *losses]), record(tmp_path / "b", [FOUNDING, losses[1], losses[2]])
    turn(a, 0, "1.2", 10.07, 40, [])
    turn(b, 1, "1.2", 3610.08, 40, [4, 5])
    spoilt = Spoilt()
    found = [(tell(entries(run / "events.jsonl", spoilt)).incidents[0], turns(run, spoilt).of("1.2")) for run in (a, b)]
    took = [phases(incident, of) for incident, of in found]
    assert took[0].total == pytest.approx(0.2) and took[0].quorum == pytest.approx(0.07, abs=1e-5)
    assert took[1].form == pytest.approx(0.01, abs=1e-5) and took[1].commit == pytest.approx(0.1, abs=1e-5)
    assert took[1].total is None and took[1].quorum is None


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not the directory of a run"):
        explain([tmp_path], None)
    with pytest.raises(UsageError, match="nothing happened there yet"):
        explain([record(tmp_path / "run", [])], None)
    with pytest.raises(UsageError, match="nothing was lost in this run"):
        explain([record(tmp_path / "quiet", [FOUNDING])], "5")


STUCK = """
import ctypes, sys, threading, time
from pathlib import Path
from planaria.wire.stacks import answer_in, answer_on_a_thread

def stuck():
    print("here", flush=True)
    if how == "keeps the lock":
        ctypes.PyDLL(None).sleep(600)
    time.sleep(600)

def busy():
    while True:  # with code that is made, and gone
        exec("def deep(left):\\n    return deep(left - 1) if left else 0\\ndeep(200)", {})

how, *where = sys.argv[1:]
for each in where:
    answer_in(Path(each))
    answer_on_a_thread()
if how == "works":
    for _ in range(3):
        threading.Thread(target=busy, daemon=True).start()
stuck()
"""


@contextmanager
def stuck(how: str, *where: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", STUCK, how, *where], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "here\n"
            yield process
        finally:
            process.kill()


def answered(process: subprocess.Popen[str], directory: Path, before: int = 0) -> None:
    """Until the stack of its main thread, the last, has been written there."""
    while "in stuck" not in (directory / stacks.FILE).read_text()[before:]:
        assert process.poll() is None


def test_a_process_answers_with_its_stacks_and_one_that_does_not_listen_lives(tmp_path: Path) -> None:
    with stuck("sleeps", str(tmp_path)) as answering, stuck("sleeps") as deaf:
        for insist in (False, True):
            assert not stacks.ask(deaf.pid, insist) and deaf.poll() is None
            before = stacks.size(tmp_path)
            assert stacks.ask(answering.pid, insist)
            answered(answering, tmp_path, before)
    assert not stacks.ask(2**22 + 1)  # nobody


def test_one_that_keeps_the_interpreter_lock_answers_who_insists(tmp_path: Path) -> None:
    with stuck("keeps the lock", str(tmp_path)) as process:
        assert stacks.ask(process.pid) and stacks.ask(process.pid, insist=True)
        answered(process, tmp_path)


def test_one_that_works_is_not_hurt_by_being_asked(tmp_path: Path) -> None:
    """By ``faulthandler``'s own signal it is, after some hundred times: it reads stacks while they change."""
    with stuck("works", str(tmp_path)) as process:
        for _ in range(100):
            before = stacks.size(tmp_path)
            assert stacks.ask(process.pid)
            answered(process, tmp_path, before)


def test_another_place_for_the_answers(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    with stuck("sleeps", str(tmp_path / "a"), str(tmp_path / "b")) as process:
        assert stacks.ask(process.pid)
        answered(process, tmp_path / "b")
        assert stacks.size(tmp_path / "a") == 0
