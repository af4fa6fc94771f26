"""Groups on a network that can be cut: a network namespace and an agent of its own for each group.

A hub namespace holds a bridge and the lighthouse; each group's namespace hangs on it by a virtual cable.
Nothing is added to the machine's own network, and deleting the namespaces deletes all there is. Cutting a
group off takes its cable's end at the hub down: packets vanish in both directions and no connection is
told, as when a cable is pulled. Needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from planaria.chaos.session import Script, end, run_command, spawn
from planaria.errors import PlanariaError, UsageError
from planaria.wire.credentials import ENVIRONMENT

PREFIX = "planaria-chaos-"
# Addresses inside the namespaces only; nothing outside ever sees them.
NETWORK = "10.99.0."
HUB_ADDRESS = NETWORK + "254"
LIGHTHOUSE = f"{HUB_ADDRESS}:29400"
MOST_GROUPS = 200  # of a /24


def require(groups: int) -> None:
    """Raises UsageError, saying what is missing, if networks cannot be made and cut here."""
    if os.geteuid() != 0:
        raise UsageError("partitions need root, to make network namespaces; leave `partition` out of --kinds")
    if shutil.which("ip") is None:
        raise UsageError("partitions need the command `ip` (package iproute2); leave `partition` out of --kinds")
    if groups > MOST_GROUPS:
        raise UsageError(f"partitions work with at most {MOST_GROUPS} groups, not {groups}")
    sweep()
    probe = f"{PREFIX}{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        _ip("-n", probe, "link", "add", "br0", "type", "bridge")
        _ip("netns", "exec", probe, "true")
    except PlanariaError as error:
        raise UsageError(f"this machine does not let network namespaces be made: {error}") from None
    finally:
        _delete(probe)


def sweep() -> None:
    """Delete the namespaces of earlier runs that were killed before they could do it themselves."""
    for name in namespaces():
        owner = name.removeprefix(PREFIX).split("-")[0]
        if not (owner.isdigit() and Path("/proc", owner).exists()):
            _delete(name)


def namespaces() -> list[str]:
    """Names of all namespaces made by this module, by whomever."""
    try:
        return sorted(name for name in os.listdir("/run/netns") if name.startswith(PREFIX))
    except FileNotFoundError:
        return []


class Networks:
    """The namespaces of one run. ``close`` deletes them, whatever state they are in."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._tag = f"{PREFIX}{os.getpid()}-"

    @property
    def hub(self) -> str:
        return self._tag + "hub"

    def of(self, group: int) -> str:
        """Name of the group's namespace."""
        return f"{self._tag}g{group}"

    def address(self, group: int) -> str:
        """The group's address."""
        return NETWORK + str(group + 1)

    def make(self) -> None:
        """Raises PlanariaError with the words of ``ip`` if something cannot be made."""
        _ip("netns", "add", self.hub)
        _ip("-n", self.hub, "link", "set", "lo", "up")
        _ip("-n", self.hub, "link", "add", "br0", "type", "bridge")
        _ip("-n", self.hub, "addr", "add", f"{HUB_ADDRESS}/24", "dev", "br0")
        _ip("-n", self.hub, "link", "set", "br0", "up")
        for group in range(self._groups):
            self._attach(group)

    def _attach(self, group: int) -> None:
        name, cable = self.of(group), _cable(group)
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self.hub, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", self.hub, "link", "set", cable, "master", "br0", "up")
        _ip("-n", name, "addr", "add", f"{self.address(group)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")

    def cut(self, group: int) -> None:
        """From now on nothing passes between the group and the others, or the lighthouse."""
        _ip("-n", self.hub, "link", "set", _cable(group), "down")

    def part_from_hub(self, group: int) -> None:
        """From now on nothing passes between the group and the lighthouse; the others are reached as before."""
        _ip("-n", self.of(group), "route", "replace", "blackhole", f"{HUB_ADDRESS}/32")

    def mend(self, group: int) -> None:
        """Undo both."""
        _ip("-n", self.hub, "link", "set", _cable(group), "up")
        with suppress(PlanariaError):  # there is no such route
            _ip("-n", self.of(group), "route", "del", "blackhole", f"{HUB_ADDRESS}/32")

    def limit(self, group: int, mbit: float) -> None:
        """From now on the group sends, and receives, at most so many million bits a second."""
        # A burst is the least that a timer of a hundredth of a second needs; a queue that holds a tenth of a second is
        # that of a long line.
        rate = ["rate", f"{mbit}mbit", "burst", f"{max(16000, int(mbit * 1e6 / 8 / 100))}", "latency", "100ms"]
        _tc("-n", self.of(group), "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate)
        _tc("-n", self.hub, "qdisc", "replace", "dev", _cable(group), "root", "tbf", *rate)

    def close(self) -> None:
        for name in (self.hub, *(self.of(group) for group in range(self._groups))):
            _delete(name)


class NamespacedRun:
    """One ``planaria run`` per group, each in its namespace, and a lighthouse in the hub that is started
    again whenever it dies. Implements ``planaria.chaos.session.Deployment``."""

    def __init__(self, script: Script, directory: Path, options: Sequence[str] = ()) -> None:
        self._script = script
        self._directory = directory
        self._options = options
        self.network: Networks | None = Networks(script.groups)
        self._agents: list[subprocess.Popen[bytes]] = []
        self._lighthouse: subprocess.Popen[bytes] | None = None
        self._environ: dict[str, str] = {}

    @property
    def directories(self) -> Sequence[Path]:
        return tuple(self._directory / f"agent{group}" for group in range(self._script.groups))

    @property
    def log(self) -> Path:
        return self._directory / "run.log"

    def start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        assert self.network is not None
        self.network.make()
        self._start_lighthouse()
        for group, directory in enumerate(self.directories):
            directory.mkdir()
            options = [*self._options, "--lighthouse", LIGHTHOUSE, "--host", self.network.address(group)]
            options += ["--first-group", str(group), "--local-groups", "1", "--job", "chaos"]
            self._spawn(self.network.of(group), run_command(self._script, directory, options), self.log)

    def _start_lighthouse(self) -> None:
        assert self.network is not None
        self._trust()
        store = str(self._directory / "lighthouse.db")
        command = [sys.executable, "-m", "planaria", "lighthouse", "--bind", LIGHTHOUSE, "--store", store]
        log = self._directory / "lighthouse.log"
        self._lighthouse = spawn(inside(self.network.hub, command), self._environ, log)

    def _trust(self) -> None:
        """What is not on one machine needs credentials, were it namespaces only."""
        where = self._directory / "credentials"
        if not where.exists():
            from planaria.wire import authority  # needs a library that nothing else in a run does

            authority.init(where, days=1)
        self._environ = {**os.environ, ENVIRONMENT: str(where)}

    def _spawn(self, namespace: str, command: Sequence[str], log: Path) -> None:
        self._agents.append(spawn(inside(namespace, command), self._environ, log))

    def poll(self) -> int | None:
        codes = [agent.poll() for agent in self._agents]
        if all(code is not None for code in codes):
            return next((code for code in codes if code), 0)
        if self._lighthouse is not None and self._lighthouse.poll() is not None:
            self._start_lighthouse()
        return None

    def lighthouse(self) -> tuple[int, int] | None:
        if self._lighthouse is None or self._lighthouse.poll() is not None:
            return None
        return self._lighthouse.pid, os.getpid()

    def stop(self) -> None:
        try:
            for agent in self._agents:  # all at once first: the job leaves together
                if agent.poll() is None:
                    with suppress(ProcessLookupError):
                        agent.send_signal(signal.SIGINT)
            for agent in self._agents:
                end(agent)
            if self._lighthouse is not None:
                end(self._lighthouse)
        finally:
            assert self.network is not None
            self.network.close()


def inside(namespace: str, command: Sequence[str]) -> list[str]:
    """``command`` in a namespace. ``ip`` becomes the command, so its pid is the command's."""
    return ["ip", "netns", "exec", namespace, *command]


def _cable(group: int) -> str:
    return f"group{group}"


def _delete(name: str) -> None:
    """Nothing happens if there is no such namespace."""
    with suppress(PlanariaError):
        _ip("netns", "delete", name)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _tc(*words: str) -> None:
    _run("tc", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PlanariaError(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.stdout.strip()}")
