"""``planaria run`` as people use it: real processes, real signals, ranks without torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from planaria.agent.proc import state_of

from .conftest import SCRIPTS, Run, plain_environ, running

StartRun = Callable[..., Run]
SPEAKER = str(SCRIPTS / "speaker.py")


def everything_ended(run: Run, *pids: int) -> None:
    """Nothing of the run is left: neither the given processes nor any that its agent started. What an agent that was
    killed has started dies with it, but nobody has waited for that."""
    while (left := left_of(run, *pids)) and run.process.returncode == -signal.SIGKILL:
        time.sleep(0.02)
    assert not left


def left_of(run: Run, *pids: int) -> list[str]:
    """Forks share the command line of their fork server, and that names the agent."""
    left, agent = [str(pid) for pid in pids if running(pid)], str(run.process.pid)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                words = (entry / "cmdline").read_text().split("\0")
                ours = any(word.startswith("planaria.agent.") for word in words) and agent in words
                if ours and running(int(entry.name)):
                    left.append(" ".join(words))
    return left


def test_a_job_from_start_to_end(start_run: StartRun) -> None:
    run = start_run("--groups", "2", "--job", "first", SPEAKER, "20", "0.01")
    assert run.wait() == 0, run.err.read_text()
    assert "[rg0:rank0] finished 20 steps" in run.out.read_text()
    assert "[rg1:rank0] finished 20 steps" in run.out.read_text()
    assert "planaria: job first finished: all steps are committed (20 steps committed" in run.err.read_text()
    about = json.loads((run.logs / "run.json").read_text())
    assert (about["job"], about["groups"], about["pid"]) == ("first", 2, run.process.pid)
    assert about["lighthouse"].startswith("127.0.0.1:") and about["args"] == ["20", "0.01"]
    kinds = [event["kind"] for event in run.events()]
    assert {"start", "ready", "quorum", "finish", "exit", "end"} <= set(kinds), "the lighthouse's events are there too"
    assert run.summary()["outcome"] == "finished" and run.summary()["first_failure"] is None
    for group in range(2):
        assert {p.name for p in (run.logs / f"rg{group}" / "i0").iterdir()} >= {"stdout.log", "stderr.log", "progress"}
    everything_ended(run)


def test_groups_that_end_with_different_states_are_no_success(start_run: StartRun) -> None:
    run = start_run("--groups", "2", SPEAKER, "20", "0.01", "differ")
    assert run.wait() == 1
    assert "but finished groups hold different states: " in run.err.read_text()
    assert [event["data"]["exit_code"] for event in run.events("end")] == [1]
    assert run.summary()["outcome"] == "failed"
    everything_ended(run)


def test_a_killed_group_is_replaced(start_run: StartRun) -> None:
    run = start_run("--groups", "3", SPEAKER, "150", "0.02", "hold")
    pid = run.pid_of(1)
    run.until(lambda: run.step_of(1) >= 3)
    os.kill(pid, signal.SIGKILL)
    replacement = run.pid_of(1, 1)
    run.until(lambda: run.step_of(1, 1) >= 1)
    assert run.end() == 0, run.err.read_text()
    summary = run.summary()
    assert summary["replacements"] == 1
    first = summary["first_failure"]
    assert (first["group"], first["incarnation"], first["signal"]) == (1, 0, 9)
    (recovered,) = run.events("recovered")
    assert recovered["data"]["group"] == 1 and recovered["data"]["seconds"] > 0 and recovered["data"]["step"] >= 3
    assert "group 1 (incarnation 0) killed by SIGKILL" in run.err.read_text()
    everything_ended(run, pid, replacement)


def test_a_crash_is_shown_and_survived(start_run: StartRun) -> None:
    run = start_run("--groups", "2", SPEAKER, "60", "0.02", "crash-once")
    assert run.wait() == 0, run.err.read_text()
    errors = run.err.read_text()
    assert "[rg1:rank0] ValueError: boom at step 2" in errors
    assert "[planaria] group 1 (incarnation 0) exited with code 1: ValueError: boom at step 2" in errors
    error = json.loads((run.logs / "rg1" / "i0" / "error.json").read_text())
    assert error["message"] == "ValueError: boom at step 2" and "misbehave" in error["traceback"]


def test_a_job_that_always_crashes_ends_within_its_budget(start_run: StartRun) -> None:
    run = start_run(
        "--groups", "2", "--max-replacements", "3", "--restart-backoff", "0.1", SPEAKER, "1000", "0.01", "crash"
    )
    assert run.wait() == 1
    errors = run.err.read_text()
    assert "First failure (root cause):" in errors and "ValueError: boom at step 2" in errors
    summary = run.summary()
    assert summary["outcome"] == "failed" and summary["replacements"] <= 3
    assert summary["first_failure"]["exit_code"] == 1
    assert summary["first_failure"]["message"] == "ValueError: boom at step 2"
    assert summary["first_failure"]["log_file"].endswith("stderr.log")
    everything_ended(run)


def test_bad_input_ends_the_job_with_its_message(start_run: StartRun) -> None:
    run = start_run("--groups", "1", "--quiet", SPEAKER, "1000", "0.2", "bad")
    code = run.wait()
    errors = run.err.read_text()
    assert "the learning rate must be positive" in errors and "Traceback" not in errors
    assert code in (1, 2), errors
    assert run.summary()["replacements"] == 0
    everything_ended(run)


def test_a_script_that_refuses_its_input_at_once(start_run: StartRun, tmp_path_factory: pytest.TempPathFactory) -> None:
    script = tmp_path_factory.mktemp("s") / "picky.py"
    script.write_text("from planaria.errors import UsageError\nraise UsageError('--lr must be positive, not -1')\n")
    run = start_run("--groups", "2", "--quiet", str(script))
    assert run.wait() == 2
    errors = run.err.read_text()
    assert "failed: --lr must be positive, not -1 (" in errors and "Traceback" not in errors
    assert run.summary()["exit_code"] == 2


def test_the_odd_one_is_refused(start_run: StartRun) -> None:
    run = start_run("--groups", "3", SPEAKER, "60", "0.02", "odd")
    run.wait()
    assert "refused: group 1 (incarnation 0) differs from group 0 in kind" in run.err.read_text()
    everything_ended(run)


def test_ctrl_c_once_stops_in_order(start_run: StartRun) -> None:
    run = start_run("--groups", "2", SPEAKER, "100000", "0.02")
    pids = [run.pid_of(0), run.pid_of(1)]
    run.until(lambda: run.step_of(0) >= 2 and run.step_of(1) >= 2)
    run.interrupt()
    assert run.wait() == 130
    assert "stopped by SIGINT after" in run.err.read_text()
    ends = {event["group"]: event["data"]["exit_code"] for event in run.events("exit")}
    assert ends == {0: 130, 1: 130}, "told, not killed"
    assert run.summary()["outcome"] == "stopped" and run.summary()["failures"] == []
    everything_ended(run, *pids)


def test_sigterm_is_told_apart(start_run: StartRun) -> None:
    run = start_run("--groups", "1", SPEAKER, "100000", "0.02")
    run.until(lambda: run.step_of(0) >= 1)
    run.interrupt(signal.SIGTERM)
    assert run.wait() == 143
    everything_ended(run)


def test_ctrl_c_twice_kills(start_run: StartRun) -> None:
    run = start_run("--groups", "2", SPEAKER, "100000", "1000")  # in one endless step
    pids = [run.pid_of(0), run.pid_of(1)]
    run.until(lambda: run.events("quorum"))
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # deaf to the first
    run.interrupt()
    run.until(lambda: run.events("stop"))
    run.interrupt()
    assert run.wait() == 130
    everything_ended(run, *pids)


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGINT])
def test_signals_that_were_ignored_at_the_start_stay_so(start_run: StartRun, signum: signal.Signals) -> None:
    before = signal.signal(signum, signal.SIG_IGN)  # as nohup does, and a shell with &
    try:
        run = start_run("--groups", "1", SPEAKER, "100000", "0.02")
    finally:
        signal.signal(signum, before)
    run.until(lambda: run.step_of(0) >= 1)
    run.interrupt(signum)
    run.interrupt(signal.SIGTERM)
    assert run.wait() == 143, "only of the second one"
    heard = [event["text"].split(":")[0] for event in run.events("stop")]
    assert [text for text in heard if text.startswith("SIG")] == ["SIGTERM"]


def test_ctrl_c_before_anything_runs(start_run: StartRun) -> None:
    run = start_run("--groups", "2", SPEAKER, "100000", "0.02", environ=plain_environ(PLANARIA_PRELOAD="this"))
    run.until(lambda: run.events())
    run.interrupt()
    assert run.wait() == 130
    everything_ended(run)


def test_a_plain_script_sees_ctrl_c_as_sigterm(start_run: StartRun, tmp_path_factory: pytest.TempPathFactory) -> None:
    script = tmp_path_factory.mktemp("s") / "plain.py"
    script.write_text("import time\nprint('up')\ntime.sleep(1000)\n")
    run = start_run("--groups", "1", str(script))
    run.until(lambda: "up" in run.out.read_text())
    run.interrupt()
    assert run.wait() == 130
    everything_ended(run)


def test_the_lighthouse_may_die(start_run: StartRun) -> None:
    run = start_run("--groups", "2", SPEAKER, "200", "0.02", "hold")
    run.until(lambda: run.step_of(0) >= 2)
    lighthouse = run.until(lambda: run.child_named("lighthouse"))
    os.kill(lighthouse, signal.SIGKILL)
    run.until(lambda: [e for e in run.events("epoch") if "epoch 2" in e["text"]])
    pid = run.pid_of(1)
    os.kill(pid, signal.SIGKILL)  # the new one knows the job
    run.until(lambda: run.step_of(1, 1) >= 1)
    assert run.end() == 0, run.err.read_text()
    assert run.summary()["replacements"] == 1
    assert [e for e in run.events("quorum") if "quorum 2." in e["text"]]
    everything_ended(run, lighthouse)


def test_the_fork_server_may_die(start_run: StartRun) -> None:
    run = start_run("--groups", "2", SPEAKER, "150", "0.02", "hold")
    pids = [run.pid_of(0), run.pid_of(1)]
    run.until(lambda: run.step_of(1) >= 2)
    (server,) = [pid for pid in run.children() if pid not in pids and "forkserver" in run.command_of(pid)]
    os.kill(server, signal.SIGKILL)
    os.kill(pids[1], signal.SIGKILL)
    run.until(lambda: run.step_of(1, 1) >= 1)
    assert run.end() == 0, run.err.read_text()
    assert run.summary()["replacements"] == 1
    everything_ended(run, server, *pids)


def test_a_stopped_group_is_suspected_and_replaced(start_run: StartRun) -> None:
    run = start_run("--groups", "2", SPEAKER, "150", "0.02", "hold")
    pid = run.pid_of(1)
    run.until(lambda: run.step_of(1) >= 3)
    os.kill(pid, signal.SIGSTOP)
    run.until(lambda: run.events("suspect"))
    run.until(lambda: run.step_of(1, 1) >= 1)
    assert run.end() == 0, run.err.read_text()
    (kill,) = run.events("kill")
    assert "has been suspected for" in kill["text"]
    assert run.summary()["first_failure"]["signal"] == 9
    assert "suspected" in run.summary()["first_failure"]["message"]


def test_the_agents_death_ends_everything(start_run: StartRun) -> None:
    run = start_run("--groups", "2", SPEAKER, "100000", "0.02")
    pids = [run.pid_of(0), run.pid_of(1)]
    run.until(lambda: run.step_of(0) >= 1)
    pids += run.children()
    run.process.kill()
    run.process.wait()
    while any(running(pid) for pid in pids):
        time.sleep(0.02)
    everything_ended(run, *pids)


def test_daemons_of_ranks_do_not_outlive_the_run(start_run: StartRun, tmp_path_factory: pytest.TempPathFactory) -> None:
    script = tmp_path_factory.mktemp("s") / "daemon.py"
    script.write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True)\n"
        "print('child', child.pid)\n"
    )
    run = start_run("--groups", "1", str(script))
    assert run.wait() == 0
    assert run.summary()["reason"] == "the script ended without taking a step"
    pid = int(run.out.read_text().split()[-1])
    assert not running(pid)


def test_operators_verbs(start_run: StartRun) -> None:
    from planaria.lighthouse.client import OperatorClient

    run = start_run("--groups", "3", SPEAKER, "100000", "0.02")
    run.until(lambda: all(run.step_of(group) >= 1 for group in range(3)))
    with OperatorClient(json.loads((run.logs / "run.json").read_text())["lighthouse"]) as operator:
        victim = run.pid_of(0)
        operator.kill(0, signal.SIGKILL)
        run.until(lambda: run.step_of(0, 1) >= 1)
        assert not running(victim)
        operator.drain(2)
        run.until(lambda: [e for e in run.events("exit") if e["group"] == 2 and e["data"]["state"] == "drained"])
        operator.scale(3)
        assert run.pid_of(3) > 0, "a new group, for two are left"
        run.until(lambda: run.step_of(3) >= 1)
        operator.scale(2)
        run.until(lambda: [e for e in run.events("exit") if e["group"] == 3 and e["data"]["state"] == "drained"])
        status = run.until(lambda: operator.status())
        assert {g.member.group for g in status.groups if g.state == "active"} == {0, 1}
        operator.scale(3)
        run.until(lambda: run.step_of(4) >= 1)
    run.interrupt()
    assert run.wait() == 130
    assert run.summary()["replacements"] == 1


def test_two_agents_meet_at_a_lighthouse(start_run: StartRun) -> None:
    first = start_run("--groups", "1", "--job", "other", SPEAKER, "100000", "0.02")
    address = first.until(
        lambda: (first.logs / "run.json").exists() and json.loads((first.logs / "run.json").read_text())["lighthouse"]
    )
    common = ("--groups", "3", "--job", "shared", "--lighthouse", address)
    left = start_run(*common, "--local-groups", "2", SPEAKER, "150", "0.02", "hold")
    right = start_run(*common, "--first-group", "2", SPEAKER, "150", "0.02", "hold")
    pid = right.pid_of(2)
    right.until(lambda: right.step_of(2) >= 2)
    for run in (left, right):
        run.until(lambda run=run: [e for e in run.events("quorum") if "the job starts" in e["text"]])  # type: ignore[misc]
    os.kill(pid, signal.SIGKILL)
    right.until(lambda: right.step_of(2, 1) >= 1)
    left.release()
    assert (right.end(), left.wait()) == (0, 0), left.err.read_text() + right.err.read_text()
    assert sorted(p.name for p in left.logs.glob("rg*")) == ["rg0", "rg1"]
    assert sorted(p.name for p in right.logs.glob("rg*")) == ["rg2"]
    assert "[planaria] quorum 1.1: groups 0, 1, 2" in left.err.read_text(), "what concerns all is shown once"
    assert "quorum" not in right.err.read_text() and "killed by SIGKILL" not in left.err.read_text()
    assert "[planaria] group 2 (incarnation 0) killed by SIGKILL" in right.err.read_text()
    assert right.summary()["replacements"] == 1 and left.summary()["replacements"] == 0
    first.interrupt()
    assert first.wait() == 130


def test_status_pages_of_the_own_lighthouse(start_run: StartRun) -> None:
    run = start_run("--groups", "1", "--http", "127.0.0.1:0", SPEAKER, "100000", "0.02")
    run.until(lambda: run.step_of(0) >= 1)
    host, port = json.loads((run.logs / "run.json").read_text())["http"].split(":")
    with socket.create_connection((host, int(port))) as page:
        page.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert b"200" in page.recv(100)
    run.interrupt()
    run.wait()


def test_an_earlier_run_in_the_same_directory_is_moved_aside(start_run: StartRun) -> None:
    from planaria.cli.logdir import move_aside

    run = start_run("--groups", "1", SPEAKER, "2", "0.01")
    assert run.wait() == 0
    move_aside(run.logs)
    move_aside(run.logs)  # nothing is left to move
    assert {p.name for p in run.logs.iterdir()} == {"earlier-1", "lock"}
    assert {"run.json", "events.jsonl", "rg0"} <= {p.name for p in (run.logs / "earlier-1").iterdir()}


def test_a_group_that_leaves_by_itself_is_told_and_the_others_go_on(start_run: StartRun) -> None:
    run = start_run("--groups", "2", SPEAKER, "60", "0.02", "leave")
    assert run.wait() == 0, run.err.read_text()
    (left,) = run.events("left")
    text = "group 1 left at step 5 of its own accord (exit code 0 before the last step); the others go on"
    assert left["text"] == text and f"[planaria] {text}" in run.err.read_text()
    summary = run.summary()
    assert (summary["reason"], summary["step"], summary["replacements"]) == ("all steps are committed", 60, 0)
    assert summary["first_failure"] is None


def test_a_preload_that_fails_is_bad_input(start_run: StartRun, tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp("broken")
    (home / "broken_module.py").write_text("1 / 0\n")
    base = plain_environ()
    environ = plain_environ(PLANARIA_PRELOAD="broken_module", PYTHONPATH=f"{home}:{base['PYTHONPATH']}")
    run = start_run("--groups", "1", SPEAKER, "2", "0.01", environ=environ)
    assert run.wait() == 2
    assert "cannot import broken_module in the fork server: ZeroDivisionError" in run.err.read_text()


def test_options_come_from_the_environment(start_run: StartRun) -> None:
    run = start_run(SPEAKER, "5", "0.01", environ=plain_environ(PLANARIA_RUN_GROUPS="2", PLANARIA_RUN_QUIET="1"))
    assert run.wait() == 0
    assert run.out.read_text() == ""
    assert json.loads((run.logs / "run.json").read_text())["groups"] == 2
    assert state_of(run.process.pid) == ""
