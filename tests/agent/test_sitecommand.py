"""The site's health command, run for real, however it behaves."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from planaria.agent import sitecommand
from planaria.agent.sitecommand import Done, SiteCommand
from planaria.core.health import Reading

from .conftest import running

EVERY = 30.0  # so its limit is never in the way of a machine that is slow


def done(script: str, tmp_path: Path, every: float = EVERY) -> Done:
    return SiteCommand(["sh", "-c", script], every, str(tmp_path)).run()


def test_exit_codes_are_the_verdict_and_the_last_remark_the_reason(tmp_path: Path) -> None:
    assert done("echo fine", tmp_path) == Done((Reading("command", 0.0),))
    assert done("echo looking; echo; echo 'disk full on /scratch'; exit 3", tmp_path) == Done(
        (Reading("command", 1.0, text="disk full on /scratch"),)
    )
    assert done("exit 3", tmp_path).readings == (Reading("command", 1.0, text="exit code 3"),)


def test_lines_of_json_are_readings_of_its_own_signals(tmp_path: Path) -> None:
    script = (
        """echo '{"signal": "disk", "value": 3, "device": 5, "text": "nvme0"}'; echo '{"signal":"fan","value":0.5}'"""
    )
    assert done(script, tmp_path).readings == (
        Reading("command", 0.0),
        Reading("command.disk", 3.0, "5", text="nvme0"),
        Reading("command.fan", 0.5),
    )


def test_rubbish_is_told_and_what_makes_sense_still_counts(tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 2 + b"\n{\x1b[31mred\n")
    good = """echo '{"signal": "fan", "value": 1}'"""
    found = done(f"""echo '{{"signal": "disk"}}'; cat noise; {good}; cat noise; exit 1""", tmp_path)
    assert [reading.signal for reading in found.readings] == ["command", "command.fan"]
    said = "the health command sh printed a line that is no reading "
    assert found.problem == said + """(it needs a "value", a finite number): {"signal": "disk"}"""
    assert found.kind == "rubbish"
    found = done("cat noise; exit 1", tmp_path)
    assert found.problem.startswith(said) and (found.problem + found.readings[0].text).isprintable()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"signal": "a", "value": 1, "rank": 0}', 'a "rank" is one of a "group"'),
        ('{"signal": "a", "value": 1, "group": -2}', '"group" and "rank" count from 0'),
        ('{"a": ' * 20_000, "nested too deep"),
    ],
)
def test_lines_that_can_be_no_reading(line: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "line").write_text(line)
    found = done("cat line", tmp_path)
    assert found.readings == (Reading("command", 0.0),) and why in found.problem


@pytest.mark.parametrize("script", ["kill -SEGV $$", "exec /no/such/program", "exit 126"])
def test_a_command_that_is_broken_says_nothing_of_the_node(script: str, tmp_path: Path) -> None:
    found = done(script, tmp_path)
    assert found.readings == () and "that says nothing of the node" in found.problem


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    found = SiteCommand(["/no/such/check"], EVERY, str(tmp_path)).run()
    assert found == Done(
        problem="the health command /no/such/check cannot be run: No such file or directory", kind="start"
    )


def test_a_hang_ends_in_a_kill_of_it_and_its_children(tmp_path: Path) -> None:
    found = done("sleep 1000 & echo $! > child; echo begun; wait", tmp_path, every=0.2)
    assert found.readings == () and found.kind == "hang"
    assert re.search(r"did not end within [0-9.e+]+ s \(limit 2 s, nothing seen yet\): it was killed", found.problem)
    child = int((tmp_path / "child").read_text())
    while running(child):
        time.sleep(0.01)


def test_one_that_cannot_be_killed_is_not_run_again_until_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As one that sudo has begun, or that waits for a sick driver in the kernel.
    monkeypatch.setattr(sitecommand, "kill_group", lambda pid: None)
    monkeypatch.setattr(sitecommand, "_GONE_SECONDS", 0.1)
    (tmp_path / "on").touch()
    script = "echo >> runs; while [ -e on ]; do sleep 0.01; done"
    command = SiteCommand(["sh", "-c", script], 0.02, str(tmp_path))
    while not (tmp_path / "runs").exists():  # from the first of these, which has long given it up
        assert command.run().kind == "undead"
        time.sleep(0.01)
    for _ in range(3):
        assert command.run() == Done(
            (), "the health command sh was killed and does not end; it is not run until it has", "undead"
        )
    assert len((tmp_path / "runs").read_text()) == 1
    (tmp_path / "on").unlink()
    while command.run().kind == "undead":
        time.sleep(0.01)
    assert len((tmp_path / "runs").read_text()) > 1


def test_one_that_hangs_is_given_more_time_but_not_for_ever(tmp_path: Path) -> None:
    command = SiteCommand(["sleep", "1000"], 0.02, str(tmp_path))
    limits = [command._silences.limit for _ in range(4) if command.run().kind == "hang"]
    assert limits == sorted(limits) and limits[-1] <= 10 * 0.02


@pytest.mark.parametrize("flood", ["yes", "yes >&2"])
def test_a_flood_is_cut_off(tmp_path: Path, flood: str) -> None:
    found = done(flood, tmp_path)
    assert found.readings == () and "printed more than 131072 bytes" in found.problem


def test_what_it_leaves_behind_is_not_waited_for(tmp_path: Path) -> None:
    found = done("sleep 1000 & echo $! > child; echo well", tmp_path)
    assert found.readings == (Reading("command", 0.0),)
    child = int((tmp_path / "child").read_text())
    while running(child):
        time.sleep(0.01)


def test_one_that_closes_its_output_is_waited_for(tmp_path: Path) -> None:
    assert done("exec >&-; sleep 0.1; exit 4", tmp_path).readings == (Reading("command", 1.0, text="exit code 4"),)
