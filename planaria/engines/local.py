"""The local engine: every rank is a process forked on this machine, a child of this process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import count

from planaria.agent.forkserver import ForkRequest
from planaria.agent.proc import become_subreaper, describe, ending, kill_group, reap_group
from planaria.core.exits import EXIT_OK
from planaria.core.messages import STANDBYS, Member, Order
from planaria.engines.base import Broken, Change, Dying, Ended, Instance, Started
from planaria.engines.devices import Gpus, Shares
from planaria.engines.forking import ForkServer, ForkServerError
from planaria.engines.keeping import Keeping
from planaria.engines.launch import Launch

Rank = tuple[Member, int]

# What tells a process that it comes to a group whose other ranks live, and to groups that hold the state.
_TAKING_A_PLACE = {"PLANARIA_RESUME": "0", "PLANARIA_JOINS": "1", "PLANARIA_STANDBY": ""}


@dataclass(slots=True)
class _Life:
    pid: int = 0
    pidfd: int = -1
    signals: tuple[int, ...] = ()  # asked for before the process was there
    dying: bool = False  # and told so
    joins: bool = False  # takes the place of a lost rank
    tries: int = 0  # a standby: the rank as which it tries itself
    gpu: str = ""  # of this node, while the rest of its group's share is on others


@dataclass(slots=True)
class _Shared:
    """What the ranks of one incarnation have in common."""

    port: int  # their MASTER_PORT
    held: socket.socket | None  # keeps its number from being given to anybody else; None on other nodes than the master
    gpus: dict[str, str] | None  # None: there are none left
    founder: bool  # see Engine.create


class LocalEngine:
    """Implements ``planaria.engines.base.Engine``. Lives on the running event loop's thread.

    A rank leads its own session, and whatever it leaves behind in its process group is killed with it.
    """

    def __init__(self, launch: Launch, gpus: Gpus | None = None, standbys: int = 0) -> None:
        """``gpus``: what the groups share, but for as many as there are standbys; nothing is said to them about GPUs if
        there are none."""
        become_subreaper()
        self._launch = launch
        self._shares = Shares(gpus or Gpus(), launch.nproc, standbys)
        self._standbys = standbys
        self._tell: Callable[[Change], None] = lambda change: None
        self._lives: dict[Rank, _Life] = {}
        self._shared: dict[Member, _Shared] = {}
        self._forks: dict[Rank, asyncio.Task[None]] = {}
        self._leftover: set[int] = set()  # process groups whose leader is gone
        self._ids = count()
        self._keeping = Keeping()
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

    def create(self, group: int, incarnation: int, founder: bool = True, port: int | None = None) -> None:
        """``port``: what the master node has chosen as MASTER_PORT; None: this is the master node."""
        member = Member(group, incarnation)
        if member in self._shared:
            return
        held = hold_port() if port is None else None
        if held is not None:
            port = int(held.getsockname()[1])
        living = {other.group for other in self._shared}
        self._shared[member] = _Shared(port or 0, held, self._shares.env(group, living), founder)
        for rank in self._launch.ranks:
            self._lives[member, rank] = _Life()
            self._forks[member, rank] = asyncio.get_running_loop().create_task(self._fork(member, rank))

    def delete(self, group: int, incarnation: int, signum: int = signal.SIGKILL, rank: int | None = None) -> None:
        for (member, each), life in self._lives.items():
            if member != Member(group, incarnation) or rank not in (None, each):
                continue
            if life.pid:
                kill_group(life.pid, signum)
            else:
                life.signals += (signum,)

    def regroup(
        self,
        member: Member,
        newer: Member,
        rank: int,
        standby: int | None = None,
        port: int | None = None,
        kept: Collection[int] | None = None,
        here: bool = True,
    ) -> int | None:
        """``port``: as in ``create``; the master node has made sure of all ranks, but some may have ended since.
        ``kept``: the ranks that live on on this node; None: all others. ``here``: the new process is on this node."""
        kept = [each for each in self._launch.ranks if each != rank] if kept is None else kept
        others = {each: life for each in kept if (life := self._lives.get((member, each))) is not None}
        whole = len(others) == len(kept) and all(life.pid and not life.dying for life in others.values())
        if port is None and not whole:
            return None
        held = hold_port() if port is None else None
        if held is not None:
            port = int(held.getsockname()[1])
        at_home = any(each in self._launch.ranks for each in [*others, *([rank] if here else [])])
        living = {other.group for other in self._shared}
        gpus = self._shares.env(newer.group, living) if at_home or self._launch.world == 1 else {}
        shared = self._shared[newer] = _Shared(port or 0, held, gpus, founder=False)
        loop = asyncio.get_running_loop()
        for each, life in others.items():
            self._lives[newer, each] = self._lives.pop((member, each))
            loop.add_reader(life.pidfd, self._gone, newer, each)  # takes the place of the older one
        spare = Member(STANDBYS, standby or 0)
        if here and standby is not None and (spare, 0) in self._lives:
            life = self._lives[newer, rank] = self._lives.pop((spare, 0))
            loop.add_reader(life.pidfd, self._gone, newer, rank)
            self._shared.pop(spare)
            if rank in self._launch.ranks or self._launch.world == 1:
                shared.gpus = self._shares.give(newer.group, rank - self._launch.ranks.start, standby)
            else:
                life.gpu = self._shares.part_with(standby)
        elif here and standby is None:
            self._lives[newer, rank] = _Life(joins=True)
            self._forks[newer, rank] = loop.create_task(self._fork(newer, rank))
        for one in (member, newer):
            if one in self._shared and not any(other == one for other, _ in self._lives):
                self._leave(one)
        return port

    def prepare(self, number: int, rank: int, node: int = 0) -> bool:
        gpus = self._shares.lend(number)
        if gpus is None:
            return False
        spare = Member(STANDBYS, number)
        self._shared[spare] = _Shared(0, None, gpus, founder=False)
        self._lives[spare, 0] = _Life(joins=True, tries=rank)
        self._forks[spare, 0] = asyncio.get_running_loop().create_task(self._fork(spare, 0))
        return True

    def environ_of(self, member: Member, rank: int) -> dict[str, str]:
        directory = self._launch.directory_of(member, rank)
        directory.mkdir(parents=True, exist_ok=True)
        env = self._launch.own_env(member, rank, self._shared[member].port) | _TAKING_A_PLACE
        env["PLANARIA_KEPT"] = self._keeping.paths(member.group, rank)
        env["PLANARIA_JOINS"] = str(int(self._launch.world > 1))
        if self._shares.any:
            env["LOCAL_RANK"] = "0"  # it sees one GPU
        return env

    def standbys(self) -> Mapping[int, int]:
        return {0: self._standbys}

    def nodes(self) -> Mapping[int, str]:
        return {}

    def node_of(self, member: Member, rank: int) -> int:
        return 0

    def home_of(self, rank: int) -> int:
        return 0

    def look(self, member: Member) -> None:
        for (other, rank), life in list(self._lives.items()):
            if other == member and life.pid and not life.dying and (code := ending(life.pid)) is not None:
                life.dying = True
                self._tell(Dying(member, code, describe(code), rank))

    def port_of(self, member: Member) -> int:
        """MASTER_PORT of an incarnation that was created and has not ended."""
        return self._shared[member].port

    def placed(self) -> dict[str, tuple[int, int]]:
        found = {}
        for (member, rank), life in self._lives.items():
            gpus, at = self._shares.of(member.group), rank - self._launch.ranks.start
            if life.gpu:
                found[life.gpu] = (member.group, rank)
            elif 0 <= at < len(gpus):
                found[gpus[at]] = (member.group, rank)
        return found

    def avoid(self, gpus: Collection[str]) -> None:
        self._shares.avoided = frozenset(gpus)

    def devices(self) -> tuple[str, ...]:
        return self._shares.ids

    def close_devices(self, gpus: Collection[str]) -> None:
        self._shares.closed = frozenset(gpus)
        for standby, gpu in self._shares.lent().items():
            if gpu in gpus:
                self.delete(STANDBYS, standby)

    def has_place(self, group: int) -> bool:
        return self._shares.has_place(group, {member.group for member in self._shared})

    def elsewhere(self, group: int) -> bool:
        return self._shares.better(group, {member.group for member in self._shared})

    def relay(self, member: Member, order: Order) -> None:
        """All ranks are connected to the agent's socket."""

    def list(self) -> tuple[Instance, ...]:
        return tuple(
            Instance(member, life.pid, self._launch.directory_of(member, rank), rank)
            for (member, rank), life in self._lives.items()
        )

    async def close(self) -> None:
        for task in self._forks.values():
            task.cancel()
        await asyncio.gather(*self._forks.values(), return_exceptions=True)
        await self._server.close()
        for life in self._lives.values():
            if life.pid:
                kill_group(life.pid)
        for (member, rank), life in list(self._lives.items()):
            if life.pid:
                # Ends at once after SIGKILL, unless the kernel holds it in uninterruptible sleep: then so it must be.
                os.waitid(os.P_PID, life.pid, os.WEXITED | os.WNOWAIT)
                self._gone(member, rank)
            else:
                self._forget(member, rank)
        self._keeping.close()
        self._tell = lambda change: None

    async def _fork(self, member: Member, rank: int) -> None:
        try:
            pid = await self._server.fork(self._request(member, rank))
        except (ForkServerError, OSError) as error:
            self._forget(member, rank)
            self._tell(Ended(member, None, str(error), rank))
            return
        finally:
            self._forks.pop((member, rank), None)
        # The process is our child and not reaped yet, so the pid is still its own even if it has died already.
        life = self._lives[member, rank]
        life.pid, life.pidfd = pid, os.pidfd_open(pid)
        self._tell(Started(member, pid, rank))
        for signum in life.signals:
            kill_group(pid, signum)
        asyncio.get_running_loop().add_reader(life.pidfd, self._gone, member, rank)

    def _request(self, member: Member, rank: int) -> ForkRequest:
        shared, life = self._shared[member], self._lives[member, rank]
        if shared.gpus is None:
            raise ForkServerError(f"group {member.group} finds no free GPU: other groups have all of this node's")
        directory = self._launch.directory_of(member, rank)
        directory.mkdir(parents=True, exist_ok=True)
        if member.group == STANDBYS:
            # As if there were a group of this number: a script must not do here what only group 0 is to do.
            env = self._launch.env_of(member, life.tries, 0) | _TAKING_A_PLACE
            env |= {"PLANARIA_STANDBY": str(member.incarnation)}
            del env["MASTER_PORT"]  # there is nobody to be met
            if self._shares.any:
                env["LOCAL_RANK"] = "0"
        else:
            env = self._launch.env_of(member, rank, shared.port)
            env |= {"PLANARIA_RESUME": str(int(shared.founder)), "PLANARIA_JOINS": str(int(life.joins))}
            env["PLANARIA_KEPT"] = self._keeping.paths(member.group, rank)
        return ForkRequest(
            id=next(self._ids),
            parent=os.getpid(),
            target=self._launch.target,
            module=self._launch.module,
            args=self._launch.args,
            cwd=self._launch.cwd,
            stdout=str(directory / "stdout.log"),
            stderr=str(directory / "stderr.log"),
            env=env | shared.gpus,
        )

    def _gone(self, member: Member, rank: int) -> None:
        """The pidfd is readable: the process is dead. Telling comes first, others wait for it."""
        life = self._forget(member, rank)
        asyncio.get_running_loop().remove_reader(life.pidfd)
        returncode = _peek(life.pid)
        if returncode == EXIT_OK and not any(other.group == member.group for other, _ in self._lives):
            self._keeping.empty(member.group)  # it was drained, or all is done
        try:
            self._tell(Ended(member, returncode, describe(returncode), rank))
        finally:
            # Not reaped yet: until then the number of the process group cannot be another's.
            kill_group(life.pid)
            os.close(life.pidfd)
            self._leftover = {pgid for pgid in {*self._leftover, life.pid} if not reap_group(pgid)}

    def _forget(self, member: Member, rank: int) -> _Life:
        life = self._lives.pop((member, rank))
        self._shares.regain(life.gpu)
        if not any(other == member for other, _ in self._lives):
            self._leave(member)
        return life

    def _leave(self, member: Member) -> None:
        """No rank of the member is left."""
        held = self._shared.pop(member).held
        if held is not None:
            held.close()
        if member.group == STANDBYS:
            self._shares.take_back(member.incarnation)


def _peek(pid: int) -> int:
    """The return code of a dead child, without reaping it."""
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert status is not None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def hold_port() -> socket.socket:
    """A free port, held: a socket that is bound but never listens, and allows others to bind there who allow it too.

    So whoever asks the kernel for any port cannot be given this one, and a rank that listens at it (torch's TCPStore,
    asyncio, grpc: all of them set SO_REUSEADDR) can have it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held
