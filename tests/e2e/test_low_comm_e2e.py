"""Low communication under SIGKILL: exact runs have the quiet run's bits, others those of their replay."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from planaria.core.messages import Phase
from tests.e2e.harness import Run

pytestmark = pytest.mark.e2e
SCRIPT = Path(__file__).parent / "scripts" / "low_comm.py"
BESIDE_ALL = SCRIPT.with_name("low_comm_all.py")


def start(directory: Path, *words: str, groups: int = 3, more: tuple[str, ...] = ()) -> Run:
    return Run(directory, *words, groups=groups, options=("--device", "cpu", *more), script=SCRIPT)


def digest(run: Run) -> str:
    """Of the final state, which all groups agree on."""
    assert run.end() == 0, run.log()
    (found,) = run.digests()
    return found


def record(run: Run) -> list[Any]:
    """What the groups that saw the end say about who took part."""
    ended = [f.parent / "membership.json" for f in run.directory.glob("rg*/i*/result.json")]
    (found,) = {json.dumps(json.loads(f.read_text())["changes"]) for f in ended}
    changes: list[Any] = json.loads(found)
    return changes


@pytest.mark.parametrize("reduction", ["tree", "int8"])
def test_exact_runs_have_the_bits_of_a_quiet_one(tmp_path: Path, reduction: str) -> None:
    more = ("--shards", "4", "--reduction", reduction)
    with start(tmp_path / "quiet", "--exact", groups=1, more=more) as quiet:
        expected = digest(quiet)
    with start(tmp_path / "run", "--exact", "--pause", "0.01", more=more) as run:
        run.step(3)
        run.signal(0)  # in the middle of its inner steps, as a rule
        run.settled(3, beyond=5)
        run.signal(2)
        run.settled(3, beyond=8)
        assert digest(run) == expected
    assert not list(run.directory.glob("rg*/i*/membership.json"))  # the result does not depend on it


@pytest.mark.parametrize("words", [(), ("--method", "streaming", "--reduction", "int8")])
def test_a_run_with_kills_is_replayed_bit_for_bit(tmp_path: Path, words: tuple[str, ...]) -> None:
    script, more = words[:2], words[2:]
    with start(tmp_path / "run", *script, "--pause", "0.01", more=more) as run:
        run.step(3)
        run.signal(1)
        run.settled(3, beyond=5)
        run.signal(0)  # hosts the rendezvous
        run.phase(0, 1, Phase.FORMING)
        run.signal(0)  # once more, while it comes back
        run.settled(3, beyond=8)
        hurt = digest(run)
        changes = record(run)
    there = [set(counted) for _, counted, *_ in changes]
    assert changes[0][:3] == [0, [0, 1, 2], [0, 1, 2]]
    assert there[-1] == {0, 1, 2} and {0, 2} in there and {1, 2} in there, changes
    # Perhaps group 2 as well, if a kill kept it from ending an exchange that another has ended.
    assert {0, 1} <= {group for _, _, anew, *_ in changes[1:] for group in anew}, changes

    with start(tmp_path / "replay", *script, more=(*more, "--replay", str(run.directory))) as replay:
        assert digest(replay) == hurt, (changes, record(replay))
    assert record(replay) == changes


def healed(run: Run, group: int, life: int) -> str:
    """What a group said about how it came back."""
    logs = run.directory.glob(f"rg{group}/i{life}/stderr.log")
    return next((line for log in logs for line in log.read_text().splitlines() if "shared state" in line), "")


def damage_copies(run: Run, group: int) -> None:
    """Of the memory that outlives the group's processes, all that they keep there."""
    agent = psutil.Process(run.life(group).processes[0].pid).ppid()
    found = []
    for file in Path(f"/proc/{agent}/fd").iterdir():
        with suppress(FileNotFoundError):  # the agent has closed it since
            if os.readlink(file).startswith(f"/memfd:planaria-{group}.0"):
                found.append(file)
    assert len(found) == 2
    for each in found:
        with each.open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(bytes(each ^ 0xFF for each in file.peek(40)[:40]))


@pytest.mark.parametrize("words", [("--exact",), ("--method", "streaming")])
def test_who_comes_back_takes_the_syncs_that_it_missed(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Or all of the state, if its node's copy is damaged. The bits are the same."""
    more, exact = ("--reduction", "int8"), "--exact" in words
    # From 30 on a round takes its time: on the slowest machine fewer are missed than are remembered.
    with start(tmp_path / "run", *words, "--held", "3", more=more) as run:
        run.step(32)
        run.signal(1)
        run.settled(3, beyond=33)
        run.signal(2, signal.SIGSTOP)
        damage_copies(run, 2)
        run.signal(2)
        run.incarnation(2, 1)
        run.settled(3, beyond=run.watch.step)
        hurt = digest(run)
    assert "kept by its node, and took the" in healed(run, 1, 1), healed(run, 1, 1)
    assert "it took the whole shared state" in healed(run, 2, 1), healed(run, 2, 1)
    again = ("--shards", "3") if exact else ("--replay", str(run.directory))
    with start(tmp_path / "quiet", *words, groups=1 if exact else 3, more=(*more, *again)) as quiet:
        assert digest(quiet) == hurt


def test_what_is_not_finite_is_left_out(tmp_path: Path) -> None:
    words = ("--odd", "nan")
    with start(tmp_path / "run", *words) as run:
        found = digest(run)
    assert record(run)[1:] == [[5, [0, 2], [], [1], []], [6, [0, 1, 2], [1], [], []]]
    assert "sync 5: what group 1 made of the parameters is not finite" in (run.directory / "run.log").read_text()
    with start(tmp_path / "replay", more=("--replay", str(run.directory))) as replay:  # without the cause
        assert digest(replay) == found


def test_a_group_with_other_numbers_is_refused(tmp_path: Path) -> None:
    with start(tmp_path / "run", "--odd", "every", groups=2) as run:
        assert run.end() == 2
    assert "every=2" in run.log() and "every=4" in run.log()


def test_a_lost_rank_is_replaced_by_a_standby(tmp_path: Path) -> None:
    """Of its group one rank has the shared state, and the new one what its node has kept."""
    words, more = ("--method", "streaming", "--guard"), ("--nproc-per-group", "2", "--reduction", "int8")
    with start(tmp_path / "run", *words, "--pause", "0.01", groups=2, more=(*more, "--standbys", "1")) as run:
        run.until(lambda: [e for e in run.events("standby") if "is warm" in e["text"]], "a warm standby")
        run.step(32)  # from 30 on a round takes its time: on most machines the new one follows
        run.signal(1, rank=1)
        run.incarnation(1, 1)
        run.settled(2, beyond=33)
        hurt = digest(run)
        changes = record(run)
    assert "shared state" in healed(run, 1, 1)
    assert any(1 in anew for _, _, anew, *_ in changes[1:]), changes
    with start(tmp_path / "replay", *words, groups=2, more=(*more, "--replay", str(run.directory))) as replay:
        assert digest(replay) == hurt


def test_a_group_that_is_late_is_left_out_and_comes_back(tmp_path: Path) -> None:
    """Nobody kills it: it hears that the others went on, and begins anew."""
    go = tmp_path / "go"
    words = ("--rounds", "30", "--odd", "late", "--go", str(go), "--every", "16", "--pause", "0.04")
    with start(tmp_path / "run", *words) as run:
        run.until(lambda: "is left out: late at sync 8" in run.log(), "group 1 to be left out")
        run.settled(2, beyond=9)
        go.touch()
        run.settled(3, beyond=9)
        hurt = digest(run)
        changes = record(run)
    assert [8, [0, 2], [], [], []] in changes, changes
    assert not list(run.directory.glob("rg1/i1")), "it went on in the same process"
    with start(tmp_path / "replay", "--rounds", "30", "--every", "16", more=("--replay", str(run.directory))) as replay:
        assert digest(replay) == hurt, (changes, record(replay))


def test_paced_groups_make_steps_in_proportion_to_their_speeds(tmp_path: Path) -> None:
    with start(tmp_path / "run", "--paced", "--every", "12", "--rounds", "30") as run:
        run.step(6)
        run.signal(2)
        hurt = digest(run)
        changes = record(run)
    slow = [dict(short).get(1, 12) for *_, short in changes[1:]]
    assert min(slow) < 6, changes  # it takes some ten times as long for a step
    with start(tmp_path / "replay", "--paced", "--every", "12", "--rounds", "40",
               more=("--replay", str(run.directory))) as replay:  # fmt: skip
        assert digest(replay) == hurt, (changes, record(replay))
    assert "ends where its record does, after sync 29" in (replay.directory / "run.log").read_text()

    # What cannot have the same bits is refused, as soon as that is known.
    for number, (words, sentence) in enumerate((
        (("--every", "4"), "method was DiLoCo every=12"),
        (("--dropout", "0.2"), "what the first sync made is not that run's"),
    )):  # fmt: skip
        paced, replayed = ("--paced", "--every", "12", *words), ("--replay", str(run.directory))
        with start(tmp_path / f"no{number}", *paced, more=replayed) as other:
            assert other.end() == 2, other.log()
        assert sentence in other.log()


def connections(a: int, b: int) -> list[tuple[str, str]]:
    """(own, remote) addresses of the connections of process ``a`` to process ``b``."""
    listed = subprocess.run(["ss", "-Htnp", "state", "established"], capture_output=True, text=True, check=True).stdout
    ends = {(words[2], words[3]): text for text in listed.splitlines() for words in [text.split()]}
    of = {pid: {pair for pair, text in ends.items() if f"pid={pid}," in text} for pid in (a, b)}
    return [(own, remote) for own, remote in of[a] if (remote, own) in of[b]]


def noticed(run: Run, number: int) -> bool:
    return len(run.events("trouble")) > number


@pytest.mark.skipif(shutil.which("ss") is None or os.geteuid() != 0, reason="needs root, to end others' connections")
def test_a_broken_connection_costs_no_sync(tmp_path: Path) -> None:
    """Both processes live: they meet again and exchange what they have once more."""
    with start(tmp_path / "run", "--pause", "0.01") as run:
        run.step(3)
        pids = [run.life(group).processes[0].pid for group in (0, 1)]
        for number in range(3):
            for own, remote in run.until(lambda: connections(*pids), "a connection between groups 0 and 1"):
                subprocess.run(["ss", "-K", "src", own, "dst", remote], capture_output=True, check=True)
            run.until(partial(noticed, run, number), "somebody to notice")
            run.settled(3, beyond=run.watch.step)
        run.signal(2, signal.SIGSTOP)
        run.until(lambda: run.events("suspect"), "group 2 to be suspected")
        run.settled(2, beyond=run.watch.step + 1)
        run.signal(2, signal.SIGCONT)
        run.until(lambda: any(e["group"] == 2 for e in run.events("alive")), "group 2 to show life")
        run.settled(3, beyond=run.watch.step)
        hurt = digest(run)
        changes = record(run)
    assert not list(run.directory.glob("rg*/i1")), "nobody was replaced"
    assert {0, 1} <= set.intersection(*(set(counted) for _, counted, *_ in changes)), changes
    with start(tmp_path / "replay", more=("--replay", str(run.directory))) as replay:
        assert digest(replay) == hurt, (changes, record(replay))


@pytest.mark.parametrize("exact", [True, False])
def test_beside_everything_else(tmp_path: Path, exact: bool) -> None:
    """FSDP2, micro-batches, a stream, a scheduler, codes and checkpoints: a rank is lost, then all groups are."""
    words = ("--exact",) if exact else ()
    coded = ("--device", "cpu", "--shards", "2", "--nproc-per-group", "2", "--reduction", "int8")
    saves = ("--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "3")
    with Run(tmp_path / "run", *words, groups=2, options=(*coded, *saves), script=BESIDE_ALL) as run:
        run.step(3)
        run.signal(1, rank=1)
        run.settled(2, beyond=5)
        for group in (0, 1):
            run.signal(group)
        run.until(lambda: run.events("resume"), "the job to begin again from a checkpoint")
        run.settled(2, beyond=8)
        hurt = digest(run)
    again = () if exact else ("--replay", str(run.directory))
    groups = 1 if exact else 2
    with Run(tmp_path / "again", *words, groups=groups, options=(*coded, *again), script=BESIDE_ALL) as quiet:
        assert digest(quiet) == hurt
