"""``planaria run --engine slurm`` on a real Slurm of three nodes, hurt as operators and machines do."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from planaria.engines.keeper import HostState
from planaria.engines.slurm import commands
from tests.e2e.harness import TRAIN, alone
from tests.placed import PATIENCE, planaria
from tests.slurm.cluster import Cluster
from tests.slurm.supervised import Supervised

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
# The second half takes five minutes if nobody releases it.
STEPS = ("--steps", "300")
HELD = (*STEPS, "--hold-for", "1.0")


def test_groups_are_replaced_whatever_happens_to_their_jobs(cluster: Cluster, tmp_path: Path) -> None:
    """Two groups fit on a node, so one node is free."""
    options = ("--groups", "3", "--sbatch", "cpus-per-task=2", "--quiet")
    with Supervised(cluster, tmp_path / "run", "long", *HELD, options=options) as run:
        run.start()
        run.quorum({0, 1, 2})

        # The agent is killed, and with it all that it looks after.
        before, (name, _) = run.member(1), run.job_of(1)
        os.kill(run.agent_of(name), signal.SIGKILL)
        run.job_of(1, 1)
        run.quorum({0, 1, 2}, but=(before,))

        # The supervisor is killed: nobody notices, and the next one goes on with what there is.
        there = run.jobs()
        run.kill()
        run.start()
        run.said("adopted: groups 0, 1, 2")
        run.quorum({0, 1, 2})
        assert run.jobs() == there

        # A node loses its power. Slurm would notice after 20 s; the lighthouse has by then.
        before, (_, number) = run.member(2), run.job_of(2)
        node = cluster.node_of(number)
        cluster.lose(node)
        _, number = run.job_of(2, 1)
        run.quorum({0, 1, 2}, but=(before,))
        assert cluster.node_of(number) != node
        cluster.start_node(node)

        # Somebody cancels a group's job: it leaves in order, and comes back.
        before, (_, number) = run.member(0), run.job_of(0)
        cluster.run("scancel", number)
        run.job_of(0, 1)
        run.quorum({0, 1, 2}, but=(before,))

        # Fewer groups, and more again.
        assert planaria(cluster.env, "scale", "2", "--log-dir", str(run.directory)).returncode == 0
        run.quorum({0, 1})
        run.until(lambda: len(run.jobs()) == 2, "two jobs")
        assert planaria(cluster.env, "scale", "3", "--log-dir", str(run.directory)).returncode == 0
        run.quorum({0, 1, 3})

        assert run.end() == 0, run.log()
        assert run.digests() == {alone(tmp_path / "alone", *STEPS, patience=PATIENCE)}
        assert not run.jobs()


async def test_slurm_lets_a_job_that_waits_run_where_it_was_not_to(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose node was lost when it was asked for, and is back. Variables of a shell lead nobody astray."""
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    others = {
        "SBATCH_JOB_NAME": "x",
        "SQUEUE_STATES": "CANCELLED",
        "SBATCH_ARRAY_INX": "0-3",
        "SCANCEL_STATE": "PENDING",
    }
    for name, value in others.items():
        monkeypatch.setenv(name, value)
    head = "#!/bin/bash\n#SBATCH --cpus-per-task=4\n#SBATCH --output=/dev/null\n"
    body = "#SBATCH --job-name=eased-NAME\nsleep 600\n"
    taken = await commands.submit(f"{head}#SBATCH --exclude=n1,n2\n{body.replace('NAME', 'other')}")
    waits = await commands.submit(f"{head}#SBATCH --exclude=n1,n2\n{body.replace('NAME', 'waits')}")

    async def seen(number: str, state: HostState) -> commands.SlurmJob:
        async with asyncio.timeout(PATIENCE):
            while True:
                (job,) = (job for job in await commands.jobs() if job.id == number)
                if job.state is state:
                    return job
                await asyncio.sleep(0.2)

    try:
        assert (await seen(taken, HostState.RUNNING)).nodes == ("n3",)
        assert (await seen(waits, HostState.PENDING)).name == "eased-waits"
        await commands.exclude(waits, ["n1"])
        assert (await seen(waits, HostState.RUNNING)).nodes == ("n2",)
        await commands.exclude(waits, [])  # it may have begun meanwhile
    finally:
        await commands.cancel(taken, waits)
    await seen(taken, HostState.ENDED)
    await seen(waits, HostState.ENDED)


def test_ctrl_c_ends_all_jobs_in_order_and_one_that_waits_says_why(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--groups", "2", "--sbatch", "time=30-0", "--sbatch", "cpus-per-task=4")
    with Supervised(cluster, tmp_path / "run", "waits", *HELD, options=options) as run:
        run.start()
        run.said("group 1 waits: PartitionTimeLimit")
        assert run.interrupt() == 130
        assert not run.jobs()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--sbatch", "partition=nowhere"), "invalid partition specified: nowhere"),
        (("--sbatch", "no-such-option=3"), "no-such-option"),
        (("--sbatch", "mem=900G"), "node configuration is not available"),
        (("--sbatch", "job-name=mine"), "--sbatch job-name=mine: planaria says this itself"),
        (("--first-group", "1"), "--first-group: --engine slurm places the groups itself"),
    ],
)
def test_what_slurm_or_we_do_not_understand_is_one_sentence(
    cluster: Cluster, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    more = ("--groups", "2", "--host", "127.0.0.1", "--log-dir", str(tmp_path / "run"), "--job", "bad")
    done = planaria(cluster.env, "run", "--engine", "slurm", *more, *options, str(TRAIN))
    assert done.returncode == 2
    assert words in done.stderr and "Traceback" not in done.stderr
    assert not [name for name in cluster.jobs() if name.startswith("bad-")]


def test_without_slurm_only_a_dry_run_is_possible(cluster: Cluster, tmp_path: Path) -> None:
    path = str(Path(sys.executable).parent)
    more = ("--groups", "2", "--host", "127.0.0.1", "--log-dir", str(tmp_path / "run"), "--job", "dry")
    done = planaria(cluster.env, "run", "--engine", "slurm", *more, str(TRAIN), path=path)
    assert done.returncode == 2 and "there is no sbatch on PATH" in done.stderr
    done = planaria(cluster.env, "run", "--engine", "slurm", "--dry-run", *more, str(TRAIN), path=path)
    assert done.returncode == 0 and done.stdout.count("#!/bin/bash") == 2
    for text in done.stdout.split("#!/bin/bash\n")[1:]:
        script = tmp_path / "script"
        script.write_text("#!/bin/bash\n" + text)
        cluster.run("sbatch", "--test-only", str(script))
