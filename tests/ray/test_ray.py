"""``planaria run --engine ray`` on a real Ray of several nodes, hurt as operators and machines do."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from planaria.engines.keeper import HostState
from tests.e2e.harness import TRAIN, alone
from tests.e2e.layouts import SCRIPT, start
from tests.placed import PATIENCE, planaria
from tests.ray.supervised import Supervised

if TYPE_CHECKING:
    from tests.ray.cluster import Cluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
# The second half takes five minutes if nobody releases it.
STEPS = ("--steps", "300")
HELD = (*STEPS, "--hold-for", "1.0")


def test_groups_are_replaced_whatever_happens_to_their_actors(cluster: Cluster, tmp_path: Path) -> None:
    """Two groups fit on a node, so there is always room for one more."""
    for _ in range(3):
        cluster.add()
    with Supervised(cluster, tmp_path / "run", "long", *HELD, options=("--groups", "3", "--quiet")) as run:
        run.start()
        run.quorum({0, 1, 2})

        # A rank is killed: its agent sees to that.
        before = run.member(0)
        os.kill(run.rank(0), signal.SIGKILL)
        run.quorum({0, 1, 2}, but=(before,))
        assert run.life(0) == "rg0-i0"

        # The actor's process is killed: nothing of the group outlives it, and the next one comes.
        before, agent = run.member(1), psutil.Process(run.agent(run.life(1)))
        inner = [agent, *agent.children(recursive=True)]
        assert len(inner) > 2, "an agent, what it forks from, and a rank"
        agent.parent().kill()
        assert not psutil.wait_procs(inner, timeout=PATIENCE)[1]
        run.quorum({0, 1, 2}, but=(before,))
        assert run.life(1) == "rg1-i1"

        # The supervisor is killed: nobody notices, and the next one goes on with what there is.
        there = cluster.actors()
        run.kill()
        run.start()
        run.said("adopted: groups 0, 1, 2")
        run.quorum({0, 1, 2})
        assert cluster.actors() == there == {"long-rg0-i0-n0", "long-rg1-i1-n0", "long-rg2-i0-n0"}

        # A node is lost, and whatever is on it.
        before, node = run.member(2), run.node_of("rg2-i0")
        others = {life for life in ("rg0-i0", "rg1-i1") if run.node_of(life) == node}
        cluster.lose(node)
        run.quorum({0, 1, 2}, but=(before,))
        assert run.node_of(run.life(2, 1)) != node
        for life in others:
            run.life(int(life[2]), int(life[5]) + 1)

        # Fewer groups, and more again.
        assert planaria(cluster.env, "scale", "2", "--log-dir", str(run.directory)).returncode == 0
        run.quorum({0, 1})
        run.until(lambda: len(cluster.actors()) == 2, "two actors")
        assert planaria(cluster.env, "scale", "3", "--log-dir", str(run.directory)).returncode == 0
        run.quorum({0, 1, 3})

        # One leaves for good.
        assert planaria(cluster.env, "drain", "1", "--log-dir", str(run.directory)).returncode == 0
        run.quorum({0, 3})
        run.until(lambda: len(cluster.actors()) == 2, "two actors")

        assert run.end() == 0, run.log()
        assert run.digests() == {alone(tmp_path / "alone", *STEPS, patience=PATIENCE)}
        assert not cluster.actors() and not cluster.places()


def helper_of(job: str, group: int) -> int:
    """The pid of the agent on the group's second node."""
    words = ("planaria.cli.beneath", f" --job {job} ", f" --first-group {group} ", " --node-rank 1 ")
    called = {p.pid: " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])}
    (pid,) = [pid for pid, line in called.items() if all(each in line for each in words)]
    return pid


def test_groups_of_two_nodes_with_credentials(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        cluster.add()
    certs = tmp_path / "certs"
    assert planaria(cluster.env, "certs", "init", str(certs)).returncode == 0
    monkeypatch.setenv("PLANARIA_CREDENTIALS", str(certs))
    options = ("--groups", "2", "--nnodes", "2", "--device", "cpu", "--credentials", str(certs), "--quiet")
    with Supervised(cluster, tmp_path / "run", "wide", "fsdp", options=options, script=SCRIPT) as run:
        run.start()
        run.quorum({0, 1})
        before = run.member(1)
        os.kill(helper_of("wide", 1), signal.SIGKILL)
        run.quorum({0, 1}, but=(before,))
        assert run.end() == 0, run.log()
        with start(tmp_path / "quiet", "fsdp", groups=1) as quiet:
            assert quiet.end() == 0, quiet.log()
        assert run.digests() == quiet.digests()
        assert not cluster.actors() and not cluster.places()


def test_ctrl_c_ends_all_in_order_and_a_group_that_waits_says_why(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add()
    with Supervised(cluster, tmp_path / "run", "waits", *HELD, options=("--groups", "3", "--quiet")) as run:
        run.start()
        run.said("waits: no node has CPU 1 free for it")
        run.quorum({0, 1})
        assert run.interrupt() == 130
        assert not cluster.actors() and not cluster.places()


async def test_an_actor_that_is_being_made_when_nobody_waits_for_it_any_more_is_ended_too(
    cluster: Cluster, tmp_path: Path
) -> None:
    from planaria.engines.placing import Template
    from planaria.engines.ray.host import RayHost

    cluster.add()
    words = (sys.executable, "-m", "planaria"), (), ("train.py",)
    template = Template("cut", *words, tmp_path, tmp_path, tmp_path / "lighthouse.addr")
    host = RayHost(template, {"CPU": 1.0}, lambda kind, text, group: None)
    asked = asyncio.create_task(host.create(0, 0, ()))
    await asyncio.sleep(0.01)  # it is another thread that asks
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert asked.cancelled()
    (life,) = await host.list()
    await host.delete(life.group, life.incarnation)
    async with asyncio.timeout(PATIENCE):
        while (await host.list())[0].state is not HostState.ENDED:
            await host.changed()
    host.close()
    assert not cluster.actors() and not cluster.places()


def test_a_script_that_cannot_run_ends_the_job_after_so_many_replacements(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add()
    script = tmp_path / "bad.py"
    script.write_text("import planaria.torch as pt\npt.init()\nraise SystemExit(3)\n")
    options = ("--engine", "ray", "--groups", "1", "--log-dir", str(tmp_path / "run"), "--max-replacements", "1")
    done = planaria(cluster.env, "run", *options, "--quiet", str(script))
    assert done.returncode == 1 and "the budget of 1 replacements" in done.stderr, done.stderr
    assert not cluster.actors() and not cluster.places()


@pytest.mark.parametrize(
    ("options", "address", "words"),
    [
        (("--resource", "GPU=many"), "", "--resource GPU=many: give what a node of a group takes as NAME=AMOUNT"),
        (("--first-group", "1"), "", "--first-group: --engine ray places the groups itself"),
        (("--sbatch", "time=1"), "", "--sbatch: only --engine slurm knows it"),
        ((), "127.0.0.1:1", "--engine ray: there is no cluster at 127.0.0.1:1"),
        ((), "noted", "--engine ray: there is no cluster at 127.0.0.1:1"),
        ((), "ray://127.0.0.1:1", "the supervisor runs in the cluster itself"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, options: tuple[str, ...], address: str, words: str) -> None:
    if address:
        pytest.importorskip("ray", reason="Ray is not installed; make test-ray does that")
    more = ("--groups", "2", "--log-dir", str(tmp_path / "run"), "--job", "bad")
    env = os.environ | ({"RAY_ADDRESS": address} if address else {})
    if address == "noted":  # of a cluster that is gone
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
        env |= {"RAY_ADDRESS": "", "RAY_TMPDIR": str(tmp_path)}
    done = planaria(env, "run", "--engine", "ray", *more, *options, str(TRAIN))
    assert done.returncode == 2
    assert words in done.stderr and "Traceback" not in done.stderr
