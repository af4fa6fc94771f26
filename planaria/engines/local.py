"""The local engine: every incarnation is a process forked on this machine, a child of this process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from planaria.agent.forkserver import ForkRequest
from planaria.agent.proc import become_subreaper, describe, kill_group, reap_group
from planaria.core.messages import Member
from planaria.engines.base import Broken, Change, Ended, Instance, Started
from planaria.engines.forking import ForkServer, ForkServerError
from planaria.engines.launch import Launch


@dataclass(slots=True)
class _Life:
    pid: int = 0
    pidfd: int = -1
    signals: tuple[int, ...] = ()  # asked for before the process was there


class LocalEngine:
    """Implements ``planaria.engines.base.Engine``. Lives on the running event loop's thread.

    A rank leads its own session, and whatever it leaves behind in its process group is killed with it.
    """

    def __init__(self, launch: Launch) -> None:
        become_subreaper()
        self._launch = launch
        self._tell: Callable[[Change], None] = lambda change: None
        self._lives: dict[Member, _Life] = {}
        self._forks: dict[Member, asyncio.Task[None]] = {}
        self._leftover: set[int] = set()  # process groups whose leader is gone
        self._ids = count()
        launch.directory.mkdir(parents=True, exist_ok=True)
        self._server = ForkServer(
            launch.common_env(),
            launch.directory / "forkserver.log",
            lambda reason: self._tell(Broken(reason)),
            lambda: {life.pid for life in self._lives.values()},
        )

    @property
    def fork_server_pid(self) -> int:
        return self._server.pid

    def warm_up(self) -> None:
        """Start the fork server, which needs seconds, before there is anything to fork."""
        if not self._server.pid:
            self._server.start()

    def watch(self, tell: Callable[[Change], None]) -> None:
        self._tell = tell
        self.warm_up()
        if self._server.failure is not None:
            tell(Broken(self._server.failure))

    def create(self, group: int, incarnation: int) -> None:
        member = Member(group, incarnation)
        if member in self._lives:
            return
        self._lives[member] = _Life()
        self._forks[member] = asyncio.get_running_loop().create_task(self._fork(member))

    def delete(self, group: int, incarnation: int, signum: int = signal.SIGKILL) -> None:
        life = self._lives.get(Member(group, incarnation))
        if life is None:
            return
        if life.pid:
            kill_group(life.pid, signum)
        else:
            life.signals += (signum,)

    def list(self) -> tuple[Instance, ...]:
        return tuple(
            Instance(member, life.pid, self._launch.directory_of(member)) for member, life in self._lives.items()
        )

    async def close(self) -> None:
        for task in self._forks.values():
            task.cancel()
        await asyncio.gather(*self._forks.values(), return_exceptions=True)
        await self._server.close()
        for member, life in list(self._lives.items()):
            if life.pid:
                kill_group(life.pid)
                # Ends at once after SIGKILL, unless the kernel holds it in uninterruptible sleep: then so it must be.
                os.waitid(os.P_PID, life.pid, os.WEXITED | os.WNOWAIT)
                self._gone(member)
        self._lives.clear()
        self._tell = lambda change: None

    async def _fork(self, member: Member) -> None:
        try:
            pid = await self._server.fork(self._request(member))
        except (ForkServerError, OSError) as error:
            del self._lives[member]
            self._tell(Ended(member, None, str(error)))
            return
        finally:
            self._forks.pop(member, None)
        # The process is our child and not reaped yet, so the pid is still its own even if it has died already.
        life = self._lives[member]
        life.pid, life.pidfd = pid, os.pidfd_open(pid)
        self._tell(Started(member, pid))
        for signum in life.signals:
            kill_group(pid, signum)
        asyncio.get_running_loop().add_reader(life.pidfd, self._gone, member)

    def _request(self, member: Member) -> ForkRequest:
        directory = self._launch.directory_of(member)
        directory.mkdir(parents=True, exist_ok=True)
        return ForkRequest(
            id=next(self._ids),
            parent=os.getpid(),
            target=self._launch.target,
            module=self._launch.module,
            args=self._launch.args,
            cwd=self._launch.cwd,
            stdout=str(directory / "stdout.log"),
            stderr=str(directory / "stderr.log"),
            env=self._launch.env_of(member, _free_port()),
        )

    def _gone(self, member: Member) -> None:
        """The pidfd is readable: the process is dead. Telling comes first, others wait for it."""
        life = self._lives.pop(member)
        asyncio.get_running_loop().remove_reader(life.pidfd)
        returncode = _peek(life.pid)
        try:
            self._tell(Ended(member, returncode, describe(returncode)))
        finally:
            # Not reaped yet: until then the number of the process group cannot be another's.
            kill_group(life.pid)
            os.close(life.pidfd)
            self._leftover = {pgid for pgid in {*self._leftover, life.pid} if not reap_group(pgid)}


def _peek(pid: int) -> int:
    """The return code of a dead child, without reaping it."""
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert status is not None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
