"""The build of a control plane as a process: beside other things, and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
# A hang is what is looked for: what runs here gets only what all else on the machine leaves.
PATIENCE = 500.0


@pytest.fixture
def building(tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a build that gets as far as the first thing to fetch, which never comes."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("apt-get", "dpkg"):
        (programs / name).write_text("#!/bin/sh\nsleep 600 &\nwait\n")
        (programs / name).chmod(0o755)
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    environ["PATH"] = f"{programs}:{environ['PATH']}"
    return [sys.executable, "-m", "tools.kube_control_plane", "--background"], environ


def children(of: int, how_many: int) -> list[psutil.Process]:
    deadline = time.monotonic() + PATIENCE
    while len(found := psutil.Process(of).children(recursive=True)) < how_many:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def ends(process: psutil.Process) -> bool:
    """Killed with its group, it may need a moment; and whose child it is now may take its time to hear of it."""
    deadline = time.monotonic() + PATIENCE
    with suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    return True


def test_a_build_in_the_background_is_last_of_all_and_leaves_nothing_when_it_is_ended(
    building: tuple[list[str], dict[str, str]], tmp_path: Path
) -> None:
    command, environ = building
    with subprocess.Popen(command, env=environ) as process:
        try:
            started = children(process.pid, 2)  # apt-get, and what that has started
            for each in started:
                assert os.sched_getscheduler(each.pid) == os.SCHED_IDLE and each.nice() == 19
                assert os.getsid(each.pid) == process.pid, "of a session of its own it would get as much as the tests"
            autogroup = Path(f"/proc/{started[-1].pid}/autogroup")
            if autogroup.exists():
                assert autogroup.read_text().endswith("nice 19\n")
        finally:
            process.terminate()
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    assert all(map(ends, started))
    assert [path.name for path in (tmp_path / "cache/planaria/kube-1.20.2").iterdir()] == ["lock"]


def test_a_build_in_the_background_ends_with_whoever_wanted_it(building: tuple[list[str], dict[str, str]]) -> None:
    command, environ = building
    with subprocess.Popen(["sh", "-c", '"$@" & wait', "sh", *command], env=environ) as shell:
        try:
            started = children(shell.pid, 3)  # the build, apt-get, and what that has started
        finally:
            shell.kill()
    assert all(map(ends, started))


def test_of_two_builds_the_second_waits_and_one_that_takes_too_long_is_given_up(
    building: tuple[list[str], dict[str, str]],
) -> None:
    command, environ = building
    with subprocess.Popen(command, env=environ) as first:
        try:
            children(first.pid, 2)
            # It would end at once if it began.
            second = subprocess.Popen([*command, "--minutes", "0"], env=environ, stderr=subprocess.PIPE, text=True)
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(2.0)
        finally:
            first.terminate()
    _, said = second.communicate(timeout=PATIENCE)
    assert second.returncode == 1
    assert said == "no control plane: the list of source packages cannot be read: it takes too long\n"
