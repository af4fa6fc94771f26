"""A real Slurm of three nodes on this machine: munged, slurmctld and one slurmd for each node, all from one directory.

Debian builds slurmd so that several can run on one host. No service of the machine is touched; whoever opens a cluster
ends all of it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from planaria.agent.parent import tied
from tests.ports import free_ports
from tools.slurm_daemons import root

# As installed, or else as make test-slurm has unpacked them beside what the machine has (tools/slurm_daemons.py).
_UNPACKED = None if shutil.which("slurmctld", path=f"{os.environ.get('PATH', '')}:/usr/sbin") else root()
PATH = os.environ.get("PATH", "") + "".join(f":{_UNPACKED or ''}{at}" for at in ("/usr/bin", "/usr/sbin", "/sbin"))
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
NODES = ("n1", "n2", "n3")
PATIENCE = 90.0


def missing() -> str:
    """Which program is not here; empty: all are."""
    wanted = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "srun")
    lost = [name for name in wanted if shutil.which(name, path=PATH) is None]
    if lost:
        return f"there is no {lost[0]} (apt-get install slurm-wlm munge, or make test-slurm)"
    return "" if os.geteuid() == 0 else "the daemons of Slurm are started as root"


class Cluster:
    """Use as a context."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.conf = directory / "slurm.conf"
        self.env = os.environ | {"PATH": PATH, "SLURM_CONF": str(self.conf)}
        if _UNPACKED is not None:
            where = [
                f"{_UNPACKED}/{_LIBRARIES}/slurm-wlm",
                f"{_UNPACKED}/{_LIBRARIES}",
                f"{_UNPACKED}/lib/x86_64-linux-gnu",
            ]
            self.env["LD_LIBRARY_PATH"] = os.pathsep.join([*where, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, *words: str) -> str:
        """A command of Slurm's; its output."""
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def jobs(self, state: str = "") -> dict[str, str]:
        """Names of the jobs that are there, and their numbers."""
        wanted = ("--states", state) if state else ()
        lines = self.run("squeue", "--noheader", *wanted, "--format=%j %i").splitlines()
        return {name: number for name, _, number in (line.partition(" ") for line in lines)}

    def node_of(self, job: str) -> str:
        return self.run("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip()

    def lose(self, node: str) -> None:
        """The node's daemon and whatever runs there die at once, as if the power had failed."""
        daemon = self._daemons.pop(node)
        self._kill(*self._steps(node), daemon.pid)
        daemon.wait()

    def start_node(self, node: str) -> None:
        stepd = ("-d", f"{_UNPACKED}/usr/sbin/slurmstepd") if _UNPACKED is not None else ()
        self._daemon(node, "slurmd", "-D", "-N", node, "-f", str(self.conf), *stepd)

    def close(self) -> None:
        if "slurmctld" in self._daemons:
            subprocess.run(["scancel", "--user=root"], env=self.env, capture_output=True, timeout=PATIENCE)
        for node in NODES:
            self._kill(*self._steps(node))
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()

    def _start(self) -> None:
        key = self.directory / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        base, run = self.directory, ("--force", "--foreground")
        files = [f"--{name}-file={base}/munge.{name}" for name in ("pid", "log", "seed")]
        self._daemon("munged", "munged", *run, f"--key-file={key}", f"--socket={base}/munge.socket", *files)
        self._until(lambda: (base / "munge.socket").exists(), "munged listens")
        host, ports = socket.gethostname(), free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=1000"
            for node, port in zip(NODES, ports[1:], strict=True)
        )
        self.conf.write_text(
            f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={base}/munge.socket
CredType=cred/munge
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool-%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmdTimeout=20
KillWait=20
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
JobCompType=jobcomp/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=main Nodes={",".join(NODES)} Default=YES MaxTime=1-0 State=UP OverSubscribe=NO
"""
        )
        if _UNPACKED is not None:
            with self.conf.open("a") as conf:
                conf.write(f"PluginDir={_UNPACKED}/{_LIBRARIES}/slurm-wlm\n")
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (base / name).mkdir()
        self._daemon("slurmctld", "slurmctld", "-D", "-f", str(self.conf))
        for node in NODES:
            self.start_node(node)
        self._until(self._idle, "all nodes are idle")

    def _idle(self) -> bool:
        words = ("sinfo", "--noheader", "--Node", "--format=%N %T")
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=PATIENCE)
        return done.stdout.split().count("idle") == len(NODES)

    def _daemon(self, name: str, *words: str) -> None:
        with (self.directory / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                tied(words),
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def _until(self, met: object, what: str) -> None:
        assert callable(met)
        deadline = time.monotonic() + PATIENCE
        while not met():
            for name, daemon in self._daemons.items():
                assert daemon.poll() is None, f"{name} ended: {(self.directory / f'{name}.out').read_text()}"
            assert time.monotonic() < deadline, f"waiting until {what}"
            time.sleep(0.05)

    @staticmethod
    def _kill(*pids: int) -> None:
        """With all that they have started."""
        for pid in pids:
            for each in (*_below(pid), pid):
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)

    def _steps(self, node: str) -> list[int]:
        """The processes that stand for steps on a node: they are nobody's children."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environ = (path.parent / "environ").read_bytes()
            except OSError:
                continue
            # The name of a step's process says which job it is; the node it was forked on stands in its environment
            # or, for that of the batch script too, in the spool directory that it works from.
            ours = f"SLURM_CONF={self.conf}".encode() in environ.split(b"\0")
            if ours and line.startswith("slurmstepd:") and _works_for(path.parent, node, self.directory):
                found.append(int(path.parent.name))
        return found


def _works_for(process: Path, node: str, base: Path) -> bool:
    spool = str(base / f"spool-{node}")
    for link in (process / "fd").glob("*"):
        try:
            if spool in os.readlink(link) or f"{base}/{node}.log" == os.readlink(link):
                return True
        except OSError:
            continue
    return False


def _below(pid: int) -> list[int]:
    """All descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    found = []
    for child in map(int, children):
        found += [*_below(child), child]
    return found
