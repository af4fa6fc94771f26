"""The local engine: deaths are told at once and with their cause, and nothing is left behind."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from planaria.agent import forkserver
from planaria.agent.proc import children_of_self, reap_group, state_of, thread_count
from planaria.core.messages import STANDBYS, Member
from planaria.engines.base import Broken, Change, Ended, Started

from .conftest import HOME, SCRIPTS, Engine, plain_environ, running

MakeEngine = Callable[..., Engine]
WAIT = "import time\nprint('up')\ntime.sleep(1000)\n"


async def started(engine: Engine, group: int = 0, incarnation: int = 0) -> int:
    engine.engine.create(group, incarnation)
    change = await engine.next()
    assert isinstance(change, Started) and change.member == Member(group, incarnation)
    return change.pid


async def test_create_list_delete(make_engine: MakeEngine) -> None:
    engine = make_engine(WAIT)
    pid = await started(engine)
    engine.engine.create(0, 0)  # twice is once
    (instance,) = engine.engine.list()
    assert (instance.member, instance.pid) == (Member(0, 0), pid)
    assert instance.directory == engine.launch.directory / "rg0" / "i0"
    engine.engine.delete(0, 0, signal.SIGTERM)
    assert await engine.next() == Ended(Member(0, 0), -15, "killed by SIGTERM")
    assert engine.engine.list() == () and not running(pid)
    engine.engine.delete(0, 0)  # unknown by now: ignored


async def test_a_standby_is_of_no_group(make_engine: MakeEngine) -> None:
    engine = make_engine(SCRIPTS / "facts.py", nproc=2)
    assert engine.engine.prepare(3, 1)
    assert isinstance(await engine.next(), Started) and isinstance(await engine.next(), Ended)
    env = json.loads((engine.launch.directory / "standbys" / "3" / "stdout.log").read_text())["env"]
    assert (env["RANK"], env["LOCAL_RANK"], env["PLANARIA_STANDBY"], env["PLANARIA_JOINS"]) == ("1", "1", "3", "1")
    assert env["PLANARIA_GROUP"] == env["REPLICA_GROUP_ID"] == str(STANDBYS), "nor does what one group alone is to do"
    assert "MASTER_PORT" not in env


async def test_memory_of_a_place_outlives_its_processes_until_its_group_leaves(make_engine: MakeEngine) -> None:
    script = """
import os, sys
with open(os.environ["PLANARIA_KEPT"].partition(":")[0], "r+b") as file:
    print(os.fstat(file.fileno()).st_size)
    file.write(b"kept")
sys.exit(os.environ["PLANARIA_INCARNATION"] == "0")
"""
    engine, found = make_engine(script), []
    for life in range(3):
        await started(engine, 0, life)
        assert isinstance(await engine.next(), Ended)
        found.append(int((engine.launch.directory / "rg0" / f"i{life}" / "stdout.log").read_text()))
    assert found == [0, 4, 0]  # the second has left in order


async def test_delete_before_the_process_is_there(make_engine: MakeEngine) -> None:
    engine = make_engine(WAIT)
    engine.engine.create(0, 0)
    engine.engine.delete(0, 0)
    assert isinstance(await engine.next(), Started)
    assert await engine.next() == Ended(Member(0, 0), -9, "killed by SIGKILL")


async def test_several_incarnations_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine("import os, sys\nsys.exit(10 + int(os.environ['PLANARIA_GROUP']))\n")
    for group in range(5):
        engine.engine.create(group, 0)
    changes: list[Change] = [await engine.next() for _ in range(10)]
    codes = {change.member.group: change.returncode for change in changes if isinstance(change, Ended)}
    assert codes == {group: 10 + group for group in range(5)}
    for group in range(5):
        kinds = [type(change) for change in changes if not isinstance(change, Broken) and change.member.group == group]
        assert kinds == [Started, Ended]


async def test_a_rank_is_told_of_checkpoints_and_whether_others_hold_the_state(make_engine: MakeEngine) -> None:
    where = {"checkpoint": Path("/c"), "checkpoint_every": 7}
    engine = make_engine("import os\nprint({k: v for k, v in os.environ.items() if k.startswith('PLAN')})", **where)
    for group, founder in enumerate((True, False)):
        engine.engine.create(group, 0, founder)
        assert [type(await engine.next()), type(await engine.next())] == [Started, Ended]
        told = ast.literal_eval(engine.log(group))
        assert (told["PLANARIA_CHECKPOINT"], told["PLANARIA_CHECKPOINT_EVERY"]) == ("/c", "7")
        assert told["PLANARIA_RESUME"] == str(int(founder)) and "PLANARIA_CHECKPOINT_KEEP" not in told


async def test_a_stopped_process_can_be_killed_and_continued(make_engine: MakeEngine) -> None:
    engine = make_engine(WAIT)
    pid = await started(engine)
    engine.engine.delete(0, 0, signal.SIGSTOP)
    while state_of(pid) != "T":
        await asyncio.sleep(0.01)
    engine.engine.delete(0, 0, signal.SIGCONT)
    while state_of(pid) == "T":
        await asyncio.sleep(0.01)
    engine.engine.delete(0, 0, signal.SIGSTOP)
    engine.engine.delete(0, 0, signal.SIGKILL)
    assert await engine.next() == Ended(Member(0, 0), -9, "killed by SIGKILL")


async def test_what_a_rank_leaves_behind_is_killed(make_engine: MakeEngine) -> None:
    engine = make_engine(
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "print(child.pid)\nos._exit(0)\n"
    )
    engine.engine.create(0, 0)
    while not isinstance(await engine.next(), Ended):
        pass
    orphan = int(engine.log())
    while running(orphan):
        await asyncio.sleep(0.01)


async def test_ranks_survive_the_fork_server(make_engine: MakeEngine) -> None:
    engine = make_engine(WAIT)
    pid = await started(engine)
    old = engine.engine.fork_server_pid
    os.kill(old, signal.SIGKILL)
    second = await started(engine, 1)  # by a new one, which was started by itself
    assert engine.engine.fork_server_pid != old
    assert running(pid) and running(second)
    os.kill(pid, signal.SIGKILL)
    assert await engine.next() == Ended(Member(0, 0), -9, "killed by SIGKILL")


async def test_requests_survive_the_fork_server(make_engine: MakeEngine) -> None:
    engine = make_engine(WAIT)
    os.kill(engine.engine.fork_server_pid, signal.SIGSTOP)
    for group in range(3):
        engine.engine.create(group, 0)
    await asyncio.sleep(0)  # the requests are in its socket now
    os.kill(engine.engine.fork_server_pid, signal.SIGKILL)
    changes = [await engine.next() for _ in range(3)]
    assert {type(change) for change in changes} == {Started}
    marked = [pid for pid in children_of_self() if forkserver.__name__ in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(marked) == 4, "three ranks and one fork server: no rank was forked twice"


async def test_a_rank_that_was_forked_but_not_announced_is_not_doubled(make_engine: MakeEngine) -> None:
    engine = make_engine(WAIT)
    server = engine.engine._server
    await started(engine)
    # Deaf from here on: the next rank is forked, and its pid never heard.
    assert server._socket is not None
    asyncio.get_running_loop().remove_reader(server._socket)
    engine.engine.create(1, 0)
    log = engine.launch.directory / "rg1" / "i0" / "stdout.log"
    while not (log.exists() and log.read_text() == "up\n"):
        await asyncio.sleep(0.01)
    os.kill(engine.engine.fork_server_pid, signal.SIGKILL)
    server._lost()
    assert isinstance(await engine.next(), Started)
    marked = [pid for pid in children_of_self() if forkserver.__name__ in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(marked) == 3


async def test_close_ends_everything(make_engine: MakeEngine) -> None:
    engine = make_engine(WAIT)
    pids = [await started(engine, group) for group in range(2)]
    server = engine.engine.fork_server_pid
    engine.engine.create(2, 0)  # still being forked
    await engine.engine.close()
    assert not any(running(pid) for pid in [*pids, server])
    assert engine.engine.list() == ()
    left = [pid for pid in children_of_self() if forkserver.__name__ in Path(f"/proc/{pid}/cmdline").read_text()]
    assert left == []


async def test_a_directory_that_cannot_be_made_is_told(make_engine: MakeEngine) -> None:
    engine = make_engine(WAIT)
    (engine.launch.directory / "rg0").write_text("in the way")
    engine.engine.create(0, 0)
    change = await engine.next()
    assert isinstance(change, Ended) and change.returncode is None and "rg0" in change.cause


@pytest.mark.parametrize(
    ("module", "text", "part"),
    [
        ("threads", "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", "thread"),
        ("broken", "1 / 0", "ZeroDivisionError"),
        ("needy", "import no_such_module_anywhere", "no_such_module_anywhere"),
    ],
)
async def test_preload_that_cannot_be_forked(
    make_engine: MakeEngine, tmp_path: Path, module: str, text: str, part: str
) -> None:
    (tmp_path / f"{module}.py").write_text(text)
    engine = make_engine(WAIT, environ=plain_environ(PLANARIA_PRELOAD=module, PYTHONPATH=f"{tmp_path}:{HOME}"))
    change = await engine.next()
    assert isinstance(change, Broken)
    assert module in change.reason and part in change.reason
    engine.engine.create(0, 0)
    assert isinstance(await engine.next(), Ended), "what cannot be started has ended"


async def test_absent_preload_is_skipped_and_present_is_shared(make_engine: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import os\nPID = os.getpid()\n")
    environ = plain_environ(PLANARIA_PRELOAD="nowhere.at_all, slow", PYTHONPATH=f"{tmp_path}:{HOME}")
    engine = make_engine("import os, slow\nprint(slow.PID != os.getpid())\n", environ=environ)
    engine.engine.create(0, 0)
    assert isinstance(await engine.next(), Started)
    assert isinstance(await engine.next(), Ended)
    assert engine.log() == "True\n", "imported once, before the fork"


async def test_fork_server_that_cannot_live(make_engine: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    engine = make_engine(WAIT, environ=plain_environ(PLANARIA_PRELOAD="deadly", PYTHONPATH=f"{tmp_path}:{HOME}"))
    change = await engine.next()
    assert isinstance(change, Broken)
    assert "killed by SIGKILL 3 times" in change.reason and "forkserver.log" in change.reason


async def test_fork_server_is_single_threaded(make_engine: MakeEngine) -> None:
    engine = make_engine(WAIT)
    await started(engine)
    assert thread_count(engine.engine.fork_server_pid) == 1


AGENT = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {home!r})
from planaria.engines.launch import Launch
from planaria.engines.local import LocalEngine

async def main():
    root = Path({root!r})
    launch = Launch("test", 1, str(root / "rank.py"), (), root / "logs", root / "socket")
    engine = LocalEngine(launch)
    engine.watch(lambda change: print(change.pid, engine.fork_server_pid, flush=True))
    engine.create(0, 0)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_everything_ends_with_the_agent(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(WAIT)
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT.format(home=str(HOME), root=str(tmp_path))],
        env=plain_environ(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None
    rank, server = (int(word) for word in agent.stdout.readline().split())
    assert running(rank) and running(server)
    agent.kill()
    agent.wait()
    while running(rank) or running(server):
        time.sleep(0.01)
    agent.stdout.close()


def test_reap_group_of_strangers_is_nothing() -> None:
    assert reap_group(os.getpid() + 1_000_000)
