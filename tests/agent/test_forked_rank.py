"""A forked rank is the process that ``python script.py args`` would have been."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planaria.core.messages import Member
from planaria.engines.base import Ended, Started

from .conftest import HOME, SCRIPTS, Engine, plain_environ

MakeEngine = Callable[..., Engine]


async def ended(engine: Engine, group: int = 0, incarnation: int = 0) -> Ended:
    """Run one incarnation to its end."""
    engine.engine.create(group, incarnation)
    while not isinstance(change := await engine.next(), Ended):
        assert isinstance(change, Started)
    return change


async def facts(engine: Engine) -> dict[str, Any]:
    assert (await ended(engine)).returncode == 0, engine.log(name="stderr.log")
    found: dict[str, Any] = json.loads(engine.log())
    return found


def error_of(engine: Engine) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(engine.log(name="error.json"))
    return content


async def test_script_sees_what_the_interpreter_would_give_it(make_engine: MakeEngine, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "facts.py").symlink_to(SCRIPTS / "facts.py")
    seen = await facts(make_engine(Path("facts.py"), "--lr", "3", "x y", cwd=str(work)))
    assert seen["argv"] == ["facts.py", "--lr", "3", "x y"]
    assert seen["path0"] == str(SCRIPTS)  # symbolic links are followed, as the interpreter does
    assert seen["cwd"] == str(work)
    assert seen["name"] == "__main__" and seen["main"] and seen["spec"] is None
    assert seen["file"] == str(work / "facts.py")
    assert seen["stdin"] == "" and seen["threads"] == 1


async def test_process_is_clean(make_engine: MakeEngine) -> None:
    seen = await facts(make_engine(SCRIPTS / "facts.py"))
    assert seen["sid"] == seen["pid"], "a session of its own"
    assert seen["ppid"] == os.getpid(), "a child of the agent, not of the fork server"
    assert len(seen["fds"]) <= 5, "standard streams, the file for its stacks, and the listing itself"
    assert seen["sigint"] and seen["sigterm"] and seen["blocked"] == 0


async def test_environment(make_engine: MakeEngine) -> None:
    environ = plain_environ(SPECIAL="yes", PYTHONPATH=f"relative:{HOME}")
    environ.pop("OMP_NUM_THREADS", None)
    engine = make_engine(SCRIPTS / "facts.py", shards=8, environ=environ, cwd="/tmp")
    env = (await facts(engine))["env"]
    expected = {
        "SPECIAL": "yes",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "REPLICA_GROUP_ID": "0",
        "NUM_REPLICA_GROUPS": "2",
        "OMP_NUM_THREADS": "1",
        "PLANARIA_JOB": "test",
        "PLANARIA_GROUP": "0",
        "PLANARIA_INCARNATION": "0",
        "PLANARIA_GROUPS": "2",
        "PLANARIA_SHARDS": "8",
        "PLANARIA_POLICY": "redistribute",
        "PLANARIA_REDUCTION": "tree",
        "PLANARIA_DIR": str(engine.launch.directory / "rg0" / "i0"),
        "PYTHONPATH": f"/tmp/relative:{HOME}",
    }
    assert {key: env.get(key) for key in expected} == expected
    assert 0 < int(env["MASTER_PORT"]) < 65536


async def test_threads_that_the_user_chose_are_kept(make_engine: MakeEngine) -> None:
    env = (await facts(make_engine(SCRIPTS / "facts.py", environ=plain_environ(OMP_NUM_THREADS="3"))))["env"]
    assert env["OMP_NUM_THREADS"] == "3"
    assert "PLANARIA_SHARDS" not in env


async def test_module_runs_like_python_dash_m(make_engine: MakeEngine, tmp_path: Path) -> None:
    package = tmp_path / "work" / "tool"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text((SCRIPTS / "facts.py").read_text())
    seen = await facts(make_engine("tool", "a", module=True, cwd=str(tmp_path / "work")))
    assert seen["argv"] == [str(package / "__main__.py"), "a"]
    assert seen["path0"] == str(tmp_path / "work")
    assert seen["spec"] == "tool.__main__" and seen["name"] == "__main__"


async def test_directory_with_main(make_engine: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "helper.py").write_text("VALUE = 5\n")
    (tmp_path / "app" / "__main__.py").write_text("import helper; raise SystemExit(helper.VALUE)\n")
    assert (await ended(make_engine(tmp_path / "app"))).returncode == 5


async def test_sibling_modules_are_found_and_ours_hide_nothing(make_engine: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "link.py").write_text("VALUE = 'mine'\n")
    engine = make_engine("import link; print(link.VALUE); import planaria.errors; print('ok')")
    assert (await ended(engine)).returncode == 0, engine.log(name="stderr.log")
    assert engine.log() == "mine\nok\n"


@pytest.mark.parametrize(
    ("leave", "code", "message"),
    [
        ("", 0, None),
        ("raise SystemExit", 0, None),
        ("import sys; sys.exit(3)", 3, "the script exited with code 3"),
        ("import sys; sys.exit('out of luck')", 1, "out of luck"),
        ("import sys; sys.exit(256 + 7)", 7, "the script exited with code 7"),
        ("import os; os._exit(9)", 9, None),
    ],
)
async def test_exit_codes(make_engine: MakeEngine, leave: str, code: int, message: str | None) -> None:
    engine = make_engine(f"print('before', end='')\n{leave}\n")
    change = await ended(engine)
    assert change.returncode == code
    assert change.cause == f"exited with code {code}"
    if message is not None:
        error = error_of(engine)
        assert error["message"] == message and error["exit_code"] == code
        assert (error["job"], error["group"], error["traceback"]) == ("test", 0, None)
    if "os._exit" not in leave:
        assert engine.log() == "before", "what was printed is flushed"
    assert ("out of luck" in engine.log(name="stderr.log")) == (message == "out of luck")


async def test_uncaught_exception(make_engine: MakeEngine) -> None:
    engine = make_engine("def f(x):\n    return 1 / x\n\nf(0)\n")
    assert (await ended(engine)).returncode == 1
    trace = engine.log(name="stderr.log")
    assert trace.startswith("Traceback (most recent call last):\n  File ")
    assert "return 1 / x" in trace and trace.endswith("ZeroDivisionError: division by zero\n")
    assert "rankmain" not in trace and "runpy" not in trace, "the user's frames only"
    error = error_of(engine)
    assert error["message"] == "ZeroDivisionError: division by zero"
    assert error["exit_code"] == 1 and error["traceback"] == trace


async def test_the_users_own_excepthook_is_used(make_engine: MakeEngine) -> None:
    engine = make_engine(
        "import sys\nsys.excepthook = lambda *a: print('hooked', a[0].__name__)\nraise KeyError('k')\n"
    )
    assert (await ended(engine)).returncode == 1
    assert engine.log() == "hooked KeyError\n" and engine.log(name="stderr.log") == ""
    assert error_of(engine)["message"] == "KeyError: 'k'"


async def test_planaria_errors_are_one_sentence(make_engine: MakeEngine) -> None:
    engine = make_engine(
        "from planaria.errors import UsageError\n"
        "error = UsageError('group 1 needs at least one shard')\nerror.step = 7\nraise error\n"
    )
    assert (await ended(engine)).returncode == 2
    assert engine.log(name="stderr.log") == "group 1 needs at least one shard\n"
    assert error_of(engine) == {
        "message": "group 1 needs at least one shard",
        "exit_code": 2,
        "job": "test",
        "group": 0,
        "step": 7,
        "traceback": None,
    }


async def test_script_with_a_syntax_error(make_engine: MakeEngine) -> None:
    engine = make_engine("def f(:\n")
    assert (await ended(engine)).returncode == 1
    assert "SyntaxError" in engine.log(name="stderr.log")


async def test_exit_handlers_and_threads_end_as_usual(make_engine: MakeEngine) -> None:
    engine = make_engine(
        "import atexit, threading\n"
        "word = 'last'\n"
        "atexit.register(lambda: print(word))\n"
        "threading.Thread(target=lambda: (threading.main_thread().join(), print('thread'))).start()\n"
        "print('main')\n"
    )
    assert (await ended(engine)).returncode == 0
    assert engine.log() == "main\nthread\nlast\n"


async def test_a_failure_does_not_wait_for_threads(make_engine: MakeEngine) -> None:
    engine = make_engine(
        "import threading\nthreading.Thread(target=threading.Event().wait).start()\nraise RuntimeError('now')\n"
    )
    assert (await ended(engine)).returncode == 1
    assert error_of(engine)["message"] == "RuntimeError: now"


async def test_output_is_visible_before_the_end(make_engine: MakeEngine) -> None:
    engine = make_engine("import os, time\nprint('early')\nos.kill(os.getpid(), 9)\n")
    assert (await ended(engine)).returncode == -9
    assert engine.log() == "early\n", "a line is in the file as soon as it is printed"


async def test_native_crash_leaves_its_stack(make_engine: MakeEngine) -> None:
    engine = make_engine("import os, signal\n\ndef inner():\n    os.kill(os.getpid(), signal.SIGSEGV)\n\ninner()\n")
    change = await ended(engine)
    assert change.returncode == -11 and change.cause == "killed by SIGSEGV"
    assert "Segmentation fault" in engine.log(name="stderr.log") and "in inner" in engine.log(name="stderr.log")


async def test_ranks_do_not_share_a_random_state(make_engine: MakeEngine) -> None:
    environ = plain_environ(PLANARIA_PRELOAD="random,numpy.random")
    engine = make_engine("import random, numpy\nprint(random.random(), numpy.random.rand())\n", environ=environ)
    await ended(engine, 0)
    await ended(engine, 1)
    assert engine.log(0) != engine.log(1)


async def test_multiprocessing_finds_the_script(make_engine: MakeEngine) -> None:
    engine = make_engine(
        "import multiprocessing\n\ndef double(x):\n    return 2 * x\n\n"
        "if __name__ == '__main__':\n"
        "    for way in ('fork', 'spawn'):\n"
        "        with multiprocessing.get_context(way).Pool(1) as pool:\n"
        "            print(pool.map(double, [1, 2]))\n"
    )
    assert (await ended(engine)).returncode == 0, engine.log(name="stderr.log")
    assert engine.log() == "[2, 4]\n[2, 4]\n"


async def test_a_member_has_its_own_directory_and_logs(make_engine: MakeEngine) -> None:
    engine = make_engine("import os\nprint(os.environ['PLANARIA_INCARNATION'])\n")
    for incarnation in range(2):
        assert (await ended(engine, 1, incarnation)).member == Member(1, incarnation)
    assert [engine.log(1, 0), engine.log(1, 1)] == ["0\n", "1\n"]


async def test_interpreter_is_the_same(make_engine: MakeEngine) -> None:
    engine = make_engine("import sys\nprint(sys.executable, sys.orig_argv[1:])\n", "a")
    await ended(engine)
    assert engine.log() == f"{sys.executable} {[str(engine.launch.target), 'a']}\n"


async def test_a_script_that_begins_again_as_another_rank_finds_none_of_its_modules_as_they_were(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    (tmp_path / "place.py").write_text("import os\nimport colorsys\nRANK = os.environ['RANK']\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "own.py").write_text("from place import RANK\n")
    engine = make_engine(
        "import colorsys, os, sys\nfrom parts.own import RANK\nfrom planaria.errors import Recast\n"
        "print(RANK, hasattr(colorsys, 'seen'), flush=True)\ncolorsys.seen = True\n"
        "if RANK == '0':\n    os.environ['RANK'] = '1'\n    raise Recast\n"
    )
    assert (await ended(engine)).returncode == 0, engine.log(name="stderr.log")
    assert engine.log() == "0 False\n1 True\n", "what is installed stays"
