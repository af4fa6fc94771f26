"""Ranks come to other nodes, by standbys that are there: the others of their group keep their processes, and the bits
are the quiet run's."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from planaria.engines.local import hold_port
from tests.e2e.harness import Once, Run, ended
from tests.e2e.layouts import SCRIPT, start
from tests.e2e.test_checkpoints_e2e import lighthouse

pytestmark = pytest.mark.e2e
# More steps than others: several things happen one after the other, on however slow a machine.
LONG = ("--steps", "100")
WORDS = ("fsdp", "--guard", "--pause", "0.01", *LONG)


def node(directory: Path, address: str, number: int, *more: str) -> Run:
    options = ("--node-rank", str(number), "--group-addr", address, "--device", "cpu", *more)
    return Run(directory, *WORDS, groups=2, options=options, script=SCRIPT)


@pytest.fixture(scope="module")
def digest(once: Once) -> str:
    """Of the quiet run."""
    return once(f"parallel fsdp {LONG}", lambda directory: ended(start(directory, "fsdp", *LONG, groups=1)))


@pytest.fixture
def address() -> Iterator[str]:
    """Where nodes meet. Held until the test is over: of two tests at once each asks the kernel for many ports."""
    with hold_port() as held:
        yield f"127.0.0.1:{held.getsockname()[1]}"


def warm(run: Run, count: int, at: int) -> int:
    """The pid of the newest standby of a node, once so many were warm there in all."""

    def found() -> list[int]:
        facts = [event["data"] for event in run.events("standby") if "is warm" in event["text"]]
        return [fact["pid"] for fact in facts if fact["node"] == at]

    return int(run.until(lambda: len(found()) >= count and found(), f"{count} warm standbys on node {at}")[-1])


def pids(run: Run, group: int, incarnation: int, groups: int = 2) -> dict[int, int]:
    """Of both ranks, as the agent knows them, once the incarnation is at work."""
    run.incarnation(group, incarnation)
    run.settled(groups, beyond=run.watch.step)
    found: dict[int, int] = {}
    for facts in (event["data"] for event in run.events("start") if event["group"] == group):
        if facts["incarnation"] <= incarnation:
            found[facts["rank"]] = facts["pid"]
    return found


def kill(run: Run) -> None:
    """A node, with all that runs there."""
    os.kill(int(json.loads((run.directory / "node1" / "run.json").read_text())["pid"]), signal.SIGKILL)


def failures(run: Run) -> list[dict[str, object]]:
    return list(json.loads((run.directory / "summary.json").read_text())["failures"])


def test_ranks_go_to_a_node_that_has_standbys_and_come_back(tmp_path: Path, digest: str, address: str) -> None:
    ranks = ("--nproc-per-group", "2")
    with (
        node(tmp_path / "run", address, 0, *ranks) as run,
        node(tmp_path / "far", address, 1, *ranks, "--standbys", "1") as far,
    ):
        before, standby = pids(run, 1, 0), warm(run, 1, at=1)
        refused = run.operate("migrate", "1", "--rank", "0", "--to", "1")
        assert refused.returncode == 2 and "stays on node 0" in refused.stderr
        refused = run.operate("migrate", "1", "--rank", "1", "--to", "2")
        assert refused.returncode == 2 and "2 is none of them" in refused.stderr
        done = run.operate("migrate", "1", "--rank", "1", "--to", "1")
        assert done.returncode == 0, done.stderr
        assert pids(run, 1, 1) == {**before, 1: standby}, run.log()
        assert not run.events("lost") and not run.events("recovered"), run.log()
        again = run.operate("migrate", "1", "--rank", "1", "--to", "0")  # a standby is prepared there for it
        assert again.returncode == 0, again.stderr
        near = pids(run, 1, 2)
        assert near[0] == before[0] and near[1] not in (before[1], standby), run.log()
        assert not run.events("lost"), run.log()

        before, standby = pids(run, 0, 0), warm(run, 2, at=1)
        os.kill(before[1], signal.SIGKILL)
        assert pids(run, 0, 1) == {**before, 1: standby}, run.log()
        kill(far)  # the whole node: a new process starts where the group began
        after = pids(run, 0, 2)
        assert after[0] == before[0] and after[1] not in (before[1], standby), run.log()
        assert run.end() == 0, run.log()
        assert run.digests() == {digest}, run.log()
        assert [failure["rank"] for failure in failures(run)] == [1, 1]


def test_a_node_whose_ranks_would_have_other_bits(
    tmp_path: Path, digest: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its standby is refused when it is warm. Taken in, it would cost the group all of its ranks."""
    ranks = ("--nproc-per-group", "2")
    with node(tmp_path / "run", address, 0, *ranks) as run:
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        with node(tmp_path / "far", address, 1, *ranks, "--standbys", "1"):
            before = pids(run, 1, 0)
            (said,) = run.until(lambda: run.events("unprepared"), "the standby to be refused")
            assert "differs from group 0 in threads (1 there, 2 here)" in said["text"], run.log()
            asked = run.operate("migrate", "1", "--rank", "1", "--to", "1")  # once more, for it is asked for by name
            assert asked.returncode == 0, asked.stderr
            stays = "rank 1 of group 1 stays where it is: a process on node 1 differs from group 0 in threads"
            run.until(lambda: any(event["text"].startswith(stays) for event in run.events("move")), "a refusal")
            assert pids(run, 1, 0) == before
            assert run.end() == 0, run.log()
            assert run.digests() == {digest} and not failures(run), run.log()


# The site's command: it starts a node in the background, as one that frees a machine would over there.
BORROW = """
case "$1" in
ask) cd {cwd} && exec setsid {planaria} --node-rank "$PLANARIA_BORROW_NODE" --standbys 1 {words} & ;;
return) echo "$PLANARIA_BORROW_NODE" >> {returned} ;;
esac
"""


@pytest.mark.parametrize("borrows", [False, True])
def test_a_node_of_a_group_is_lost(tmp_path: Path, digest: str, address: str, borrows: bool) -> None:
    """Group 0 is elsewhere. Group 1 has a rank on each of two nodes, and a standby on node 0, or one that is asked
    for when it is needed."""
    with lighthouse(tmp_path) as meeting:
        common = ("--lighthouse", meeting, "--job", "shared", "--local-groups", "1", "--device", "cpu")
        both = (*common, "--first-group", "1", "--nnodes", "2", "--group-addr", address)
        spare = ("--policy", "spare", "--spare-wait", "600")
        if borrows:
            common, both = (*common, *spare), (*both, *spare)
            words = ["--groups", "2", "--log-dir", str(tmp_path / "lent"), *both, str(SCRIPT), *WORDS]
            planaria = shlex.join([sys.executable, "-m", "planaria", "run"])
            words += ["--hold", str(tmp_path / "run" / "release")]
            (tmp_path / "borrow.sh").write_text(
                BORROW.format(
                    cwd=shlex.quote(os.getcwd()),
                    planaria=planaria,
                    words=shlex.join(words),
                    returned=shlex.quote(str(tmp_path / "returned")),
                )
            )
        more = ("--borrow", f"sh {tmp_path / 'borrow.sh'}") if borrows else ("--standbys", "1")
        apart = ("--nproc-per-group", "2", *common)
        with (
            Run(tmp_path / "other", *WORDS, groups=2, options=apart, script=SCRIPT) as other,
            Run(tmp_path / "run", *WORDS, groups=2, options=(*both, *more), script=SCRIPT) as run,
            Run(tmp_path / "far", *WORDS, groups=2, options=(*both, "--node-rank", "1"), script=SCRIPT) as far,
        ):
            other.settled(1)
            before = pids(run, 1, 0, groups=1)
            if not borrows:
                warm(run, 1, at=0)
            kill(far)
            if borrows:
                run.until(lambda: any("node 2 is there" in e["text"] for e in run.events("node")), "the borrowed node")
                warm(run, 1, at=2)
            after = pids(run, 1, 1, groups=1)
            assert after == {**before, 1: warm(run, 1, at=2 if borrows else 0)}, run.log()
            other.settled(1, beyond=run.watch.step)
            assert (run.end(other), other.end()) == (0, 0), run.log()
            assert run.digests() == other.digests() == {digest}, run.log()
    if borrows:
        assert (tmp_path / "returned").read_text() == "2\n", run.log()
        # The others waited, and made up for nothing.
        assert not [event for event in other.events("quorum") if "groups 0 (" in event["text"]], other.log()
