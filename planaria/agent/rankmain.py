"""The first lines of a rank's process, from the fork to the user's script and from its end to the exit."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib.machinery
import io
import json
import os
import runpy
import select
import signal
import sys
import sysconfig
import threading
import traceback
import types
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from planaria.agent.parent import die_with_parent
from planaria.core.exits import EXIT_FAILED, EXIT_INTERRUPTED
from planaria.errors import PlanariaError, Recast
from planaria.files import write_whole
from planaria.wire.stacks import answer_in

if TYPE_CHECKING:
    from planaria.agent.forkserver import ForkRequest


def become_rank(request: ForkRequest, middle: int, path: list[str], keep: frozenset[int]) -> NoReturn:
    """Turn this fresh fork into the process that ``python script.py args`` would have made. Never returns."""
    code = 1
    try:
        _settle(request, middle)
        _redirect(request)
        _close_inherited(keep)
        os.environ.clear()
        os.environ.update(request.env)
        os.chdir(request.cwd)
        _reseed()
        if directory := request.env.get("PLANARIA_DIR"):
            answer_in(Path(directory))
        faulthandler.enable()  # a crash in native code leaves its stacks in the log: nobody can ask again
        code = _run(request, path)
    except BaseException:
        # Nothing may escape into the fork server's loop, whose stack lies below this frame.
        with suppress(Exception):
            traceback.print_exc()
            sys.stderr.flush()
    finally:
        os._exit(code)


def _settle(request: ForkRequest, middle: int) -> None:
    """Default signals, tied to the agent."""
    for signum in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Only when the process in the middle has ended is the agent our parent.
    waiter = select.poll()
    waiter.register(middle, select.POLLIN)
    waiter.poll()
    die_with_parent(request.parent)


def _redirect(request: ForkRequest) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for target, descriptor in ((request.stdout, 1), (request.stderr, 2)):
        opened = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.close(null)
    # People read the log while the script runs; a file would be block-buffered.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def _close_inherited(keep: frozenset[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if (descriptor := int(name)) > 2 and descriptor not in keep:
            with suppress(OSError):
                os.close(descriptor)


def _reseed() -> None:
    """numpy drew its default seed when the fork server imported it; alike in all ranks it would be a surprise."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _run(request: ForkRequest, path: list[str]) -> int:
    loaded = frozenset(sys.modules)
    try:
        try:
            while not _execute(request, path):
                # A standby has become another rank than the one that it tried to be.
                _forget_modules(loaded)
            code, message = 0, ""
        except SystemExit as leave:
            code, message = _exit_code(leave)
        # What the interpreter does at its end; not after a failure, where a stuck thread would hide it.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        if code != 0:
            _write_error(message or f"the script exited with code {code}", code, None, None)
    except PlanariaError as error:
        # Written for people: the message says it all.
        print(error, file=sys.stderr)
        code = error.exit_code
        _write_error(str(error), code, None, error)
    except BaseException as error:
        code = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_FAILED
        error.__traceback__ = _users_part(error.__traceback__)
        with suppress(Exception):
            sys.excepthook(type(error), error, error.__traceback__)
        message = "".join(traceback.format_exception_only(error)).strip()
        _write_error(message, code, "".join(traceback.format_exception(error)), error)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    return code


def _execute(request: ForkRequest, path: list[str]) -> bool:
    """Run the user's program; False if it must begin again."""
    try:
        _run_program(request, path)
        return True
    except Recast:
        pass
    # Out of the handler, so that the traceback keeps nothing: what the script has made so far is in the way.
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    return False


def _forget_modules(loaded: frozenset[str]) -> None:
    """Have all of the user's own modules imported again: they may have looked at the environment as they were. Those
    of packages that are installed stay, as do ``loaded`` ones, and what is not Python cannot be loaded twice."""
    installed = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    for name in set(sys.modules) - loaded:
        file = getattr(sys.modules[name], "__file__", None)
        if not isinstance(file, str) or not file.endswith((".py", ".pyc")) or name.partition(".")[0] == "planaria":
            continue
        if not any(os.path.realpath(file).startswith(home + os.sep) for home in installed):
            del sys.modules[name]


def _run_program(request: ForkRequest, path: list[str]) -> None:
    sys.orig_argv = [sys.executable, *(["-m"] if request.module else []), request.target, *request.args]
    sys.argv = [request.target, *request.args]
    root = os.getcwd() if request.module else os.path.dirname(os.path.realpath(request.target))
    safe = bool(request.env.get("PYTHONSAFEPATH"))
    home = str(Path(__file__).resolve().parents[2])
    # Planaria's own home comes last: it is there already if it is installed, and must hide nothing if not.
    sys.path[:] = [*([] if safe else [root]), *path, *([] if home in path else [home])]
    if request.module:
        runpy.run_module(request.target, run_name="__main__", alter_sys=True)
    elif os.path.isdir(request.target):
        runpy.run_path(request.target, run_name="__main__")
    else:
        _run_script(request.target)


def _run_script(script: str) -> None:
    """Like ``runpy.run_path``, but the module stays ``__main__`` to the end, as the interpreter has it: exit
    handlers and other threads still find their globals."""
    full = os.path.abspath(script)
    module = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", full)
    module.__dict__.update(__file__=full, __loader__=loader, __spec__=None, __cached__=None)
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = module
    with io.open_code(full) as file:
        code = compile(file.read(), full, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _exit_code(leave: SystemExit) -> tuple[int, str]:
    if leave.code is None:
        return 0, ""
    if isinstance(leave.code, int):
        return leave.code & 0xFF, ""
    print(leave.code, file=sys.stderr)
    return 1, str(leave.code)


def _users_part(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without our frames and runpy's on top of the script's."""
    part = trace
    while part is not None and (
        part.tb_frame.f_code.co_filename == __file__ or "runpy" in part.tb_frame.f_code.co_filename
    ):
        part = part.tb_next
    return part if part is not None else trace


def _write_error(message: str, code: int, trace: str | None, error: BaseException | None) -> None:
    directory = os.environ.get("PLANARIA_DIR")
    if not directory:
        return
    content = {
        "message": message,
        "exit_code": code,
        "job": os.environ.get("PLANARIA_JOB", ""),
        "group": int(os.environ.get("PLANARIA_GROUP", "-1")),
        "step": getattr(error, "step", None),
        "traceback": trace,
    }
    with suppress(OSError):
        text = json.dumps(content, default=str, indent=2) + "\n"
        write_whole(Path(directory, "error.json"), text, durable=False)
