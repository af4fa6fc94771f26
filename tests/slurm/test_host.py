"""What jobs of Slurm say of a run, and which of them say nothing of it."""

from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from planaria.engines.keeper import HostAway, HostState
from planaria.engines.placing import newest
from planaria.engines.slurm.host import SlurmHost, jobs_before
from planaria.engines.slurm.steps import StepHost
from planaria.errors import UsageError
from tests.slurm.test_scripts import TEMPLATE

ENDED = "7|llama-rg0-i0|COMPLETED|0|n1|2026-11-28T20:46:50|2026-11-28T20:47:50|None|"
WAITS = "8|llama-rg0-i0|PENDING|0||N/A|N/A|Priority|"
OTHERS = "9|llama2-rg0-i0|RUNNING|0|n2|2026-11-28T20:46:50|N/A|None|"


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What squeue prints."""
    (tmp_path / "squeue").write_text(f"#!/bin/sh\ncat {tmp_path}/jobs\n")
    (tmp_path / "squeue").chmod(0o755)
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho '{WAITS}' >> {tmp_path}/jobs; echo 8\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "jobs"


async def test_a_run_of_the_same_name_that_is_over_says_nothing_of_this_one(says: Path, tmp_path: Path) -> None:
    """Else it would be over before it begins: all of its groups have ended with exit code 0."""
    says.write_text(f"{ENDED}\n{OTHERS}\n")
    before = await jobs_before("llama")
    host = SlurmHost(replace(TEMPLATE, directory=tmp_path), lambda *_: None, before)
    assert before == {"7"} and await host.list() == ()
    await host.create(0, 0, ())
    assert [hosted.reason for hosted in await host.list()] == ["Priority"]


async def test_what_a_job_that_waits_is_kept_from_can_be_less_later(says: Path, tmp_path: Path) -> None:
    """It is asked for again; what the user excludes stays."""
    says.write_text(f"{OTHERS}\n")
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/updates\n')
    (tmp_path / "scontrol").chmod(0o755)
    template = replace(TEMPLATE, directory=tmp_path, sbatch=("exclude=n9",))
    host = SlurmHost(template, lambda *_: None)
    await host.create(0, 0, ("n1", "n2"))
    await host.create(0, 0, ("n2",))
    await host.create(0, 0, ())
    assert says.read_text().count("llama-rg0-i0") == 1
    assert (tmp_path / "updates").read_text().splitlines() == [
        "update JobId=8 ExcNodeList=n9,n2",
        "update JobId=8 ExcNodeList=n9",
    ]


@pytest.mark.parametrize(
    ("states", "counts", "cancelled"),
    [
        (("RUNNING", "PENDING"), "8", "9"),
        (("PENDING", "RUNNING"), "9", "8"),
        (("RUNNING", "RUNNING"), "8", "9"),  # the second finds its directory in use, and ends
        (("COMPLETED", "RUNNING"), "9", ""),
        (("RUNNING", "FAILED"), "8", ""),
    ],
)
async def test_a_life_that_was_submitted_twice_is_lived_once(
    says: Path, tmp_path: Path, states: tuple[str, str], counts: str, cancelled: str
) -> None:
    """sbatch gave up, and the controller took both; the numbers have other lengths, too."""
    lines = (f"{8 + i}|llama-rg0-i0|{state}|0|n{8 + i}|2026-11-28T20:46:50|N/A|None|" for i, state in enumerate(states))
    says.write_text("\n".join(lines) + "\n")
    (tmp_path / "scancel").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/cancelled\n')
    (tmp_path / "scancel").chmod(0o755)
    (hosted,) = await SlurmHost(replace(TEMPLATE, directory=tmp_path), lambda *_: None).list()
    assert hosted.state is HostState.RUNNING and hosted.nodes == (f"n{counts}",)
    assert ((tmp_path / "cancelled").read_text().strip() if cancelled else "") == cancelled
    assert bool(cancelled) == (tmp_path / "cancelled").exists()


async def test_one_that_is_not_over_is_not_taken_over(says: Path) -> None:
    says.write_text(f"{ENDED}\n{WAITS}\n")
    with pytest.raises(UsageError, match=r"still there \(llama-rg0-i0\): give another --job, or scancel 8"):
        await jobs_before("llama")


async def test_a_group_whose_directory_cannot_be_made_is_asked_for_later(
    says: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says.write_text("")
    (tmp_path / "full").write_text("")
    host = SlurmHost(replace(TEMPLATE, directory=tmp_path / "full"), lambda *_: None)
    with pytest.raises(UsageError, match=r"full/rg0-i0 cannot be made: Not a directory"):
        await host.create(0, 0, ())

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(HostAway, match="cannot be made: No space left"):
        patched.setattr(Path, "mkdir", full)
        await host.create(0, 0, ())
    assert await host.list() == ()
    (tmp_path / "full").unlink()
    await host.create(0, 0, ())
    assert len(await host.list()) == 1


async def test_a_life_that_is_over_stays_so_though_slurm_shows_its_step(says: Path, tmp_path: Path) -> None:
    """Its node is lost: srun ends, and Slurm may show the step for long."""
    shown = tmp_path / "steps"
    shown.write_text("1.0|llama-rg0-i0|n1|2026-11-28T20:46:50\n")
    (tmp_path / "squeue").write_text(f"#!/bin/sh\ncat {shown}\n")
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "srun").chmod(0o755)
    host = StepHost(replace(TEMPLATE, directory=tmp_path), "1")
    try:
        for life in range(1, 4):
            await host.create(0, life, ())
            shown.write_text(shown.read_text() + f"1.{life}|llama-rg0-i{life}|n1|2026-11-28T20:46:50\n")
            await until_ended(host, life)
        states = {hosted.incarnation: hosted.state for hosted in await host.list()}
        assert {states[life] for life in range(1, 4)} == {HostState.ENDED}
        shown.write_text("")
        await host.list()
        assert [hosted.incarnation for hosted in await host.list()] == [3]
    finally:
        host.close()


async def until_ended(host: StepHost, life: int) -> None:
    async with asyncio.timeout(60):
        while {h.incarnation: h.state for h in await host.list()}.get(life) is not HostState.ENDED:
            await asyncio.sleep(0.02)


def test_only_what_became_of_the_newest_life_of_a_group_is_remembered() -> None:
    assert newest({(0, 0): "a", (1, 3): "b", (0, 2): "c", (0, 1): "d", (1, 2): "e"}) == {(1, 3): "b", (0, 2): "c"}
    assert newest({}) == {}
