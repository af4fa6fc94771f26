"""What is started for a member: the command, its environment and its directory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from planaria.agent.forkserver import JAX_PRELOAD, PRELOAD_VARIABLE
from planaria.core.messages import STANDBYS, Member, Policy


@dataclass(frozen=True, slots=True)
class Launch:
    """One job's ranks on this node. ``target`` is a script's path or, if ``module``, a module's name. A group has
    ``nproc`` ranks on each of its ``nnodes`` nodes."""

    job: str
    groups: int
    target: str
    args: tuple[str, ...]
    directory: Path  # of the run; absolute
    socket: Path  # the agent's, for its ranks
    module: bool = False
    cwd: str = field(default_factory=os.getcwd)
    shards: int | None = None
    policy: Policy = Policy.REDISTRIBUTE
    reduction: str = "tree"
    host: str = "127.0.0.1"  # where ranks bind the stores that their peers connect to
    nproc: int = 1
    nnodes: int = 1
    node: int = 0  # the number of this node among them; one beyond them has standbys only
    spread: bool = False  # ranks of a group may be on several nodes
    master: str = "127.0.0.1"  # where the groups' nodes reach node 0
    device: str | None = None  # cpu, cuda, or what there is
    exact: str | None = None  # what is promised: bits, samples, or what the script says
    checkpoint: Path | None = None  # directory of durable checkpoints; absolute
    checkpoint_every: int | None = None
    checkpoint_keep: int | None = None
    replay: Path | None = None  # the membership record of a low-communication run; absolute
    buddy: int | None = None  # steps between copies of a rank's state in another rank's memory
    check_state: int | None = None  # steps between comparisons of all that groups hold
    recheck: float | None = None  # share of the shards that are computed twice
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def ranks(self) -> range:
        """Of every group, on this node."""
        return range(self.node * self.nproc, (self.node + 1) * self.nproc)

    @property
    def world(self) -> int:
        """Ranks of every group."""
        return self.nproc * self.nnodes

    def directory_of(self, member: Member, rank: int = 0) -> Path:
        return directory_of(self.directory, member, rank)

    def common_env(self) -> dict[str, str]:
        """What is alike in all ranks. The fork server gets it too: libraries read some of it when they load."""
        env = dict(self.environ)
        env.setdefault("OMP_NUM_THREADS", "1")
        # OpenBLAS starts its threads when numpy is imported, and a process with threads cannot be forked safely.
        env.setdefault("OPENBLAS_NUM_THREADS", "1")
        # torch logs every wait that a newer quorum ends as an error, with a C++ stack.
        env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if self._uses_jax():
            env.setdefault(PRELOAD_VARIABLE, JAX_PRELOAD)
        if paths := env.get("PYTHONPATH"):
            # Relative entries are meant from here, not from where the fork server runs.
            env["PYTHONPATH"] = os.pathsep.join(os.path.join(self.cwd, part) for part in paths.split(os.pathsep))
        return env

    def _uses_jax(self) -> bool:
        """Whether the script imports planaria.jax by itself. If not seen here, its ranks import jax anew, and that is
        all."""
        path = Path(self.cwd, self.target)
        if self.module or not path.is_file():
            return False
        return re.search(r"^\s*(import|from)\s+planaria\.jax\b", path.read_text(errors="replace"), re.M) is not None

    def own_env(self, member: Member, rank: int, port: int) -> dict[str, str]:
        """What the other ranks of this node do not have."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % self.nproc),  # also of one that has come from another node
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(member.incarnation),
            "REPLICA_GROUP_ID": str(member.group),
            "PLANARIA_GROUP": str(member.group),
            "PLANARIA_INCARNATION": str(member.incarnation),
            "PLANARIA_DIR": str(self.directory_of(member, rank)),
        }

    def env_of(self, member: Member, rank: int, port: int) -> dict[str, str]:
        """The environment of one rank of ``member``, but for its GPUs: torchrun's names, torchft's, and ours.

        MASTER_ADDR and MASTER_PORT (``port``) are for the group's own rendezvous (``init_process_group``).
        """
        env = self.common_env() | self.own_env(member, rank, port)
        env |= {
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.nproc),
            "GROUP_RANK": str(self.node),
            "MASTER_ADDR": self.master,
            "TORCHELASTIC_RUN_ID": self.job,
            "NUM_REPLICA_GROUPS": str(self.groups),
            "PLANARIA_SOCKET": str(self.socket),
            "PLANARIA_JOB": self.job,
            "PLANARIA_GROUPS": str(self.groups),
            "PLANARIA_POLICY": self.policy.value,
            "PLANARIA_REDUCTION": self.reduction,
            "PLANARIA_HOST": self.host,
        }
        if self.spread and (interface := _interface_of(self.host)):
            # gloo and NCCL would take the one of the host's name, or the first: perhaps none that other nodes reach.
            env.setdefault("GLOO_SOCKET_IFNAME", interface)
            env.setdefault("NCCL_SOCKET_IFNAME", interface)
        optional = {
            "PLANARIA_SHARDS": self.shards,
            "PLANARIA_DEVICE": self.device,
            "PLANARIA_EXACT": self.exact,
            "PLANARIA_CHECKPOINT": self.checkpoint,
            "PLANARIA_CHECKPOINT_EVERY": self.checkpoint_every,
            "PLANARIA_CHECKPOINT_KEEP": self.checkpoint_keep,
            "PLANARIA_REPLAY": self.replay,
            "PLANARIA_BUDDY": self.buddy,
            "PLANARIA_CHECK_STATE": self.check_state,
            "PLANARIA_RECHECK": self.recheck,
        }
        return env | {name: str(value) for name, value in optional.items() if value is not None}


def _interface_of(host: str) -> str:
    """The network interface that has the address ``host``; empty if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return name
    return ""


def directory_of(run: Path, member: Member, rank: int = 0) -> Path:
    """Where in a run's directory a rank has its logs, page and results; rank 0's is the group's."""
    if member.group == STANDBYS:
        return run / "standbys" / str(member.incarnation)
    group = run / f"rg{member.group}" / f"i{member.incarnation}"
    return group / f"rank{rank}" if rank else group
