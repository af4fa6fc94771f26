"""Groups of several ranks: they live and die together, and hear the same."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planaria.agent.ranklife import RankLife, culprit
from planaria.core.liveness import ProgressWatch
from planaria.core.messages import Member
from planaria.engines.base import Ended, Started
from planaria.engines.devices import Gpus
from planaria.lighthouse.client import OperatorClient

from .conftest import SCRIPTS, Engine, Run, running
from .test_run import everything_ended

StartRun = Callable[..., Run]
MakeEngine = Callable[..., Engine]
SPEAKER = str(SCRIPTS / "speaker.py")
RANKS = range(3)
OF_THREE = ("--nproc-per-group", "3")


def home(run: Run, group: int, rank: int, incarnation: int = 0) -> Path:
    group_home = run.logs / f"rg{group}" / f"i{incarnation}"
    return group_home / f"rank{rank}" if rank else group_home


def heard(run: Run, group: int, rank: int) -> list[str]:
    return (home(run, group, rank) / "heard").read_text().splitlines()


def pids(run: Run, group: int, incarnation: int = 0) -> list[int]:
    return [run.pid_of(group, incarnation, rank) for rank in RANKS]


def test_a_job_of_groups(start_run: StartRun) -> None:
    run = start_run("--groups", "2", *OF_THREE, SPEAKER, "60", "0.02", "late@2", "linger@1", "hold")
    everybody = [*pids(run, 0), *pids(run, 1)]
    run.until(lambda: run.step_of(1) >= 3)
    os.kill(everybody[0], signal.SIGKILL)  # a new quorum, and another one when it is back
    run.until(lambda: run.step_of(0, 1) >= 1)
    assert run.end() == 0, run.err.read_text()
    for rank in RANKS:
        assert f"[rg1:rank{rank}] finished 60 steps" in run.out.read_text()
    assert {"stdout.log", "stderr.log", "progress"} <= {path.name for path in home(run, 1, 2).iterdir()}
    assert len(heard(run, 1, 0)) >= 2
    assert heard(run, 1, 0) == heard(run, 1, 1) == heard(run, 1, 2), "also the one that came late"
    assert run.summary()["reason"] == "all steps are committed" and run.summary()["replacements"] == 1
    everything_ended(run, *everybody)


def test_one_rank_lost_is_the_group_lost(start_run: StartRun) -> None:
    run = start_run("--groups", "2", *OF_THREE, SPEAKER, "150", "0.02", "hold")
    old = pids(run, 1)
    run.until(lambda: run.step_of(1) >= 3)
    with OperatorClient(json.loads((run.logs / "run.json").read_text())["lighthouse"]) as operator:
        assert operator.kill(1, signal.SIGKILL, rank=2).endswith("signal 9 goes to rank 2 of group 1")
    new = pids(run, 1, 1)
    assert not any(running(pid) for pid in old), "all were gone before the first new one came"
    run.until(lambda: run.step_of(1, 1) >= 1)
    assert all(running(pid) for pid in new)
    assert run.end() == 0, run.err.read_text()
    summary = run.summary()
    assert summary["replacements"] == 1 and len(summary["failures"]) == 1
    first = summary["first_failure"]
    assert (first["group"], first["rank"], first["signal"]) == (1, 2, 9)
    assert first["log_file"] == str(home(run, 1, 2) / "stderr.log")
    assert "group 1 (incarnation 0), rank 2, killed by SIGKILL" in run.err.read_text()
    (recovered,) = run.events("recovered")
    assert recovered["data"]["group"] == 1
    everything_ended(run, *old, *new)


def test_the_rank_that_failed_first_is_named_with_its_words(start_run: StartRun) -> None:
    run = start_run("--groups", "2", *OF_THREE, SPEAKER, "60", "0.02", "crash-once@1")
    assert run.wait() == 0, run.err.read_text()
    assert "[planaria] group 1 (incarnation 0), rank 1, exited with code 1: ValueError: boom at step 2" in (
        run.err.read_text()
    )
    assert json.loads((home(run, 1, 1) / "error.json").read_text())["message"] == "ValueError: boom at step 2"
    assert run.summary()["first_failure"]["rank"] == 1


def test_bad_input_in_any_rank_ends_the_job_with_its_message(start_run: StartRun) -> None:
    run = start_run("--groups", "1", *OF_THREE, "--quiet", SPEAKER, "1000", "0.2", "bad@2")
    assert run.wait() == 2
    assert "failed: the learning rate must be positive" in run.err.read_text()
    (failure,) = run.summary()["failures"]
    assert (failure["rank"], failure["exit_code"]) == (2, 2)
    everything_ended(run)


def test_an_orderly_stop_waits_for_every_rank(start_run: StartRun) -> None:
    run = start_run("--groups", "2", *OF_THREE, SPEAKER, "100000", "0.02", "slow@1")
    everybody = [*pids(run, 0), *pids(run, 1)]
    run.until(lambda: run.step_of(0) >= 2 and run.step_of(1) >= 2)
    run.interrupt()
    assert run.wait() == 130
    for group in range(2):
        for rank in RANKS:
            assert f"[rg{group}:rank{rank}] leaves after" in run.out.read_text(), "told, not killed"
    assert run.summary()["outcome"] == "stopped" and run.summary()["failures"] == []
    everything_ended(run, *everybody)


def test_a_stopped_rank_makes_its_group_suspicious(start_run: StartRun) -> None:
    run = start_run("--groups", "2", *OF_THREE, SPEAKER, "150", "0.02", "hold")
    old = pids(run, 1)
    run.until(lambda: run.step_of(1, rank=2) >= 3)
    os.kill(old[2], signal.SIGSTOP)
    run.until(lambda: run.events("suspect"))
    run.until(lambda: run.step_of(1, 1) >= 1)
    assert run.end() == 0, run.err.read_text()
    assert "group 1 (incarnation 0): rank 2: the process is stopped" in run.events("suspect")[0]["text"]
    first = run.summary()["first_failure"]
    assert (first["rank"], first["signal"]) == (2, 9) and "rank 2: the process is stopped" in first["message"]
    everything_ended(run, *old)


# --- whose end it was ----------------------------------------------------------------------------------------------


def ended(rank: int, code: int, **more: Any) -> RankLife:
    life = RankLife(rank, Path("/nowhere"), ProgressWatch(), over=True, returncode=code)
    for name, value in more.items():
        setattr(life, name, value)
    return life


def test_the_first_bad_end_is_the_groups() -> None:
    ranks = [ended(0, -9, killed=True), ended(1, 1), ended(2, 1)]
    assert culprit(ranks, ranks[1]) is ranks[1]


def test_bad_input_counts_wherever_it_is_found(tmp_path: Path) -> None:
    ranks = [ended(0, 1), ended(1, 2)]
    assert culprit(ranks, ranks[0]) is ranks[1]
    (tmp_path / "error.json").write_text(json.dumps({"message": "bad", "exit_code": 2}))
    ranks = [ended(0, 1), ended(1, -9, killed=True, directory=tmp_path)]
    assert culprit(ranks, ranks[0]) is ranks[1] and ranks[1].code == 2, "killed while it was about to say so"


def test_a_process_that_took_long_to_die_comes_before_the_errors_of_its_peers() -> None:
    ranks = [ended(0, 1), ended(1, -9, was_exiting=True), ended(2, -9, killed=True)]
    assert culprit(ranks, ranks[0]) is ranks[1]
    ranks = [ended(0, -11), ended(1, -9, was_exiting=True)]
    assert culprit(ranks, ranks[0]) is ranks[0], "no mere error"


def test_all_in_order() -> None:
    ranks = [ended(0, 0), ended(1, 0)]
    assert culprit(ranks, None) is ranks[0]
    ranks = [ended(0, 0), ended(1, 130)]
    assert culprit(ranks, None).code == 130, "somebody asked"


# --- what the engine gives them ------------------------------------------------------------------------------------


async def environments(engine: Engine, group: int, incarnation: int, ranks: int) -> list[dict[str, str]]:
    """Of a group's ranks, which run to their end."""
    engine.engine.create(group, incarnation)
    changes = [await engine.next() for _ in range(2 * ranks)]
    assert sorted(change.rank for change in changes if isinstance(change, Started)) == list(range(ranks))
    for change in changes:
        assert not isinstance(change, Ended) or change.returncode == 0
    directories = [engine.launch.directory_of(Member(group, incarnation), rank) for rank in range(ranks)]
    return [json.loads((directory / "stdout.log").read_text())["env"] for directory in directories]


async def test_environment_of_ranks(make_engine: MakeEngine) -> None:
    engine = make_engine(SCRIPTS / "facts.py", nproc=2, device="cpu")
    first, second = await environments(engine, 1, 0, 2)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "PLANARIA_DEVICE")
    assert [first[name] for name in names] == ["0", "0", "2", "2", "0", "cpu"]
    assert [second[name] for name in names] == ["1", "1", "2", "2", "0", "cpu"]
    assert first["MASTER_PORT"] == second["MASTER_PORT"] and second["MASTER_ADDR"] == "127.0.0.1"
    assert second["PLANARIA_DIR"] == first["PLANARIA_DIR"] + "/rank1"
    assert (await environments(engine, 1, 1, 2))[0]["TORCHELASTIC_RESTART_COUNT"] == "1"


async def test_every_group_has_its_gpus_for_all_its_lives(make_engine: MakeEngine) -> None:
    gpus = Gpus(("5", "GPU-a", "2", "0", "9"))
    engine = make_engine(SCRIPTS / "facts.py", nproc=2, gpus=gpus)

    async def gpus_of(group: int, incarnation: int) -> set[str]:
        return {env["CUDA_VISIBLE_DEVICES"] for env in await environments(engine, group, incarnation, 2)}

    assert await gpus_of(0, 0) == {"5,GPU-a"}
    assert await gpus_of(7, 0) == {"2,0"}
    assert await gpus_of(0, 1) == {"5,GPU-a"}, "the same again"
    assert await gpus_of(8, 0) == {"5,GPU-a"}, "a group that is gone needs none"
    assert await gpus_of(0, 2) == {"2,0"}, "the other one that is free now"


async def test_a_group_without_a_gpu_is_not_started(make_engine: MakeEngine) -> None:
    engine = make_engine("import time; time.sleep(1000)", nproc=2, gpus=Gpus(("0", "1", "2")))
    engine.engine.create(0, 0)
    assert {type(await engine.next()) for _ in range(2)} == {Started}
    engine.engine.create(1, 0)
    for _ in range(2):
        change = await engine.next()
        assert isinstance(change, Ended) and change.returncode is None and "no free GPU" in change.cause


async def test_signals_reach_one_rank_or_all(make_engine: MakeEngine) -> None:
    engine = make_engine("import time; time.sleep(1000)", nproc=3)
    engine.engine.create(0, 0)
    assert {type(await engine.next()) for _ in range(3)} == {Started}
    assert sorted(instance.rank for instance in engine.engine.list()) == [0, 1, 2]
    engine.engine.delete(0, 0, signal.SIGTERM, 1)
    assert await engine.next() == Ended(Member(0, 0), -15, "killed by SIGTERM", 1)
    engine.engine.delete(0, 0)
    assert {(await engine.next()).rank for _ in range(2)} == {0, 2}  # type: ignore[union-attr]
    assert engine.engine.list() == ()


async def test_a_rank_is_replaced_under_the_others(make_engine: MakeEngine) -> None:
    gpus = Gpus(("5", "GPU-a", "2", "0"))
    script = "import os, time; print(os.environ['PLANARIA_JOINS'], os.environ['MASTER_PORT']); time.sleep(1000)"
    engine = make_engine(script, nproc=2, gpus=gpus)
    older, newer = Member(0, 0), Member(0, 1)
    engine.engine.create(0, 0)
    pids = {change.rank: change.pid for change in [await engine.next(), await engine.next()]}  # type: ignore[union-attr]
    engine.engine.delete(0, 0, signal.SIGKILL, 1)
    assert await engine.next() == Ended(older, -9, "killed by SIGKILL", 1)
    port = engine.engine.regroup(older, newer, 1)
    started = await engine.next()
    assert isinstance(started, Started) and (started.member, started.rank) == (newer, 1)
    found = {(instance.member, instance.rank): instance.pid for instance in engine.engine.list()}
    assert found == {(newer, 0): pids[0], (newer, 1): started.pid}
    log = engine.launch.directory_of(newer, 1) / "stdout.log"
    while not log.exists() or not log.read_text():
        await asyncio.sleep(0.01)
    assert log.read_text() == f"1 {port}\n"
    engine.engine.delete(0, 1, signal.SIGTERM)
    ended = [await engine.next(), await engine.next()]
    assert {(change.member, change.rank) for change in ended} == {(newer, 0), (newer, 1)}  # type: ignore[union-attr]
    assert engine.engine.list() == () and engine.engine.regroup(newer, Member(0, 2), 0) is None


def test_a_port_is_held_for_the_ranks_and_for_nobody_else() -> None:
    import socket

    from planaria.engines.local import hold_port

    with hold_port() as held, socket.socket() as rank, socket.socket() as stranger:
        address = ("127.0.0.1", held.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            stranger.bind(address)
        rank.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rank.bind(address)
        rank.listen()
        socket.create_connection(address).close()


def test_output_of_ranks_is_not_mixed_up(start_run: StartRun, tmp_path_factory: pytest.TempPathFactory) -> None:
    script = tmp_path_factory.mktemp("s") / "words.py"
    script.write_text(
        "import os, sys\nprint('out', os.environ['RANK'])\nprint('err', os.environ['RANK'], file=sys.stderr)"
    )
    run = start_run("--groups", "1", "--nproc-per-group", "2", "--device", "cpu", str(script))
    assert run.wait() == 0
    assert sorted(run.out.read_text().splitlines()) == ["[rg0:rank0] out 0", "[rg0:rank1] out 1"]
    assert {"[rg0:rank0] err 0", "[rg0:rank1] err 1"} <= set(run.err.read_text().splitlines())
