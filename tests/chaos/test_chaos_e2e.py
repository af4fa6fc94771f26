"""Whole commands: real groups, real faults, and the proof at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pretend import until

from planaria.agent.proc import state_of
from planaria.chaos import netns
from planaria.chaos.session import with_home
from planaria.chaos.watch import Watch, agent_pid, children_of
from planaria.errors import UsageError

# Whole commands, each with a quiet reference: ten times what they take alone.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TINY_LM = Path(__file__).resolve().parents[2] / "examples" / "tiny_lm.py"
SMALL = ("--batch-size", "1", "--length", "16")


def start(*words: str, cwd: Path) -> subprocess.Popen[str]:
    env = {**with_home(os.environ), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "planaria", *words]
    return subprocess.Popen(command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(*words: str, cwd: Path) -> tuple[int, str]:
    with start(*words, cwd=cwd) as process:
        output, _ = process.communicate()
    return process.returncode, output


def chaos(tmp_path: Path, *options: str, steps: int) -> tuple[int, dict[str, Any], str]:
    """Run a verified chaos on a small model; the exit code, the record, what was printed."""
    words = ["chaos", str(TINY_LM), "--shards", "8", "--verify", "--json", "record.json", "--log-dir", "logs"]
    code, output = finish(*words, *options, "--", "--steps", str(steps), *SMALL, cwd=tmp_path)
    record = tmp_path / "record.json"
    return code, json.loads(record.read_text()) if record.exists() else {}, output


def pids_of(*directories: Path) -> set[int]:
    """Agents, their children, and every rank that ever had a page."""
    watch = Watch(*directories)
    watch.poll()
    found = {life.view.pid for life in watch.lives.values()}
    watch.close()
    for agent in filter(None, map(agent_pid, directories)):
        found |= {agent, *children_of(agent)}
    return found


def gone(pids: set[int]) -> bool:
    return all(state_of(pid) in ("", "Z") for pid in pids)


def test_the_demo_holds_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # fewer than it has groups
    code, output = finish("demo", "--steps", "75", "--json", "record.json", "--log-dir", "logs", cwd=tmp_path)
    assert code == 0, output
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["bit_identical"] and record["good"] and record["faults_left"] == 0
    assert (record["steps_committed"], record["steps_discarded"], record["shards_lost"]) == (75, 0, 0)
    kinds = [fault["kind"] for fault in record["faults"]]
    assert kinds == ["kill", "kill", "kill", "kill", "stop", "lighthouse", "kill"]
    assert record["faults"][0]["phase"] == "exchanging"
    assert record["faults"][2]["moment"] == "forming"
    assert "4 groups on the CPU" in output and "bit-identical" in output and "\x1b" not in output
    assert gone(pids_of(tmp_path / "logs"))


def test_kills_stops_and_lost_lighthouses_leave_no_trace_in_the_weights(tmp_path: Path) -> None:
    options = ("--every", "500ms", "--kills", "9", "--kinds", "kill,stop,lighthouse", "--seed", "3")
    code, record, output = chaos(tmp_path, *options, steps=120)
    assert code == 0, output
    assert record["bit_identical"] and len(record["faults"]) + record["faults_left"] == 9
    assert len({fault["kind"] for fault in record["faults"]}) > 1


def test_two_groups_survive_as_well(tmp_path: Path) -> None:
    code, record, output = chaos(tmp_path, "--groups", "2", "--every", "1s", "--kills", "3", steps=80)
    assert code == 0, output
    assert record["bit_identical"] and record["faults"]


def test_a_script_that_is_over_too_soon_is_said_to_be(tmp_path: Path) -> None:
    code, record, output = chaos(tmp_path, "--groups", "2", "--every", "60m", steps=5)
    assert code == 0 and record["faults_left"] == 50
    assert "give the script more steps" in output


def test_curves_go_on_when_the_group_that_writes_them_dies(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    script, board = TINY_LM.with_name("tracked_loop.py"), tmp_path / "board"
    words = ("--groups", "2", "--kills", "3", "--every", "1s", "--log-dir", "logs")
    code, output = finish("chaos", str(script), *words, "--", "--board", str(board), "--steps", "3000", cwd=tmp_path)
    assert code == 0, output
    files = sorted(board.iterdir())
    events = (event for file in files for event in LegacyEventFileLoader(str(file)).Load())
    steps = {event.step for event in events if any(value.tag == "loss" for value in event.summary.value)}
    assert len(files) > 1, "more than one group has written"
    missing = set(range(3000)) - steps
    assert len(missing) <= 3, f"at most the step of each kill, which was committed and not written: {missing}"


def test_a_script_that_fails_is_told_with_its_own_words(tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text("raise SystemExit('out of luck')\n")
    code, output = finish("chaos", str(script), "--groups", "2", cwd=tmp_path)
    assert code == 1 and "out of luck" in output


def orphans() -> set[str]:
    """Network namespaces whose owner is dead. Those of a test that runs at the same time go before their owner does."""
    dead = {
        name for name in netns.namespaces() if not Path("/proc", name.removeprefix(netns.PREFIX).split("-")[0]).exists()
    }
    return dead & set(netns.namespaces())


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A chaos run that would go on for long, with a first fault done."""
    words = ("chaos", str(TINY_LM), "--groups", "2", "--every", "500ms", "--kinds", "stop", "--log-dir", "logs")
    with start(*words, "--", "--steps", "100000", *SMALL, cwd=tmp_path) as process:
        watch = Watch(tmp_path / "logs")

        def trains() -> bool:
            assert process.poll() is None
            watch.poll()
            return watch.step > 20

        until(trains, 240)
        watch.close()
        yield process
        process.kill()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_whatever_ends_the_command_ends_everything(
    running: subprocess.Popen[str], tmp_path: Path, signum: int, code: int
) -> None:
    pids = pids_of(tmp_path / "logs")
    assert len(pids) >= 4  # agent, lighthouse, fork server, groups
    running.send_signal(signum)
    assert running.wait(240) == code
    until(lambda: gone(pids))


def test_partitions_leave_no_trace_either(tmp_path: Path) -> None:
    try:
        netns.require(3)
    except UsageError as error:
        pytest.skip(str(error))
    options = ("--groups", "3", "--every", "2s", "--kills", "3", "--kinds", "partition,kill", "--seed", "1")
    code, record, output = chaos(tmp_path, *options, steps=120)
    assert code == 0, output
    assert record["bit_identical"] and record["faults"]
    assert not orphans()
    assert gone(pids_of(*(tmp_path / "logs").glob("agent*")))
