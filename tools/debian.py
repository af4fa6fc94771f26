"""Packages of Debian's for tests, unpacked beside what is there: nothing is installed, so no service is started."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

_ENDING = (signal.SIGINT, signal.SIGTERM)


class Unavailable(Exception):
    """A sentence about why something cannot be had."""


def cache(name: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "planaria" / name


def sources(place: Path) -> list[str]:
    """apt-get with a list of sources of its own, made from the machine's, that has the source packages too. Raises
    Unavailable."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise Unavailable("there is no apt-get here: this takes Debian's packages")
    lines = []
    for path in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]:
        if path.suffix == ".sources":
            lines += _stanzas(path.read_text())
        elif path.exists() and path.suffix in (".list", ""):
            lines += [line[4:] for line in path.read_text().splitlines() if line.startswith("deb ")]
    (place / "sources.list").write_text("".join(f"deb {line}\ndeb-src {line}\n" for line in dict.fromkeys(lines)))
    (place / "lists/partial").mkdir(parents=True)
    (place / "archives/partial").mkdir(parents=True)
    options = {
        "Dir::Etc::sourcelist": place / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": place / "lists",
        "Dir::Cache": place,
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "DPkg::Lock::Timeout": "60",  # seconds; on a new machine something may be installing by itself
    }
    return ["apt-get", "-qq", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]


def _stanzas(text: str) -> list[str]:
    """What a file in the newer of apt's formats says of packages, in words of the older: several stanzas, or one."""
    lines = []
    for stanza in re.split(r"\n\s*\n", text):
        told = [line.split(":", 1) for line in stanza.splitlines() if ":" in line and line[0] not in "# "]
        fields = {name: value.strip() for name, value in told}
        signed = f"[signed-by={fields['Signed-By']}] " if "Signed-By" in fields else ""
        for uri in fields.get("URIs", "").split():
            for suite in fields.get("Suites", "").split():
                lines.append(f"{signed}{uri} {suite} {fields.get('Components', '')}")
    return lines


def unpacked(place: Path, apt: list[str], until: float, *packages: str) -> Path:
    """The directory under which these packages, without those that they need, lie now. Raises Unavailable."""
    root = place / "root" / packages[0]
    root.mkdir(parents=True)
    for package in packages:
        run([*apt, "download", package], place, until, f"the package {package} cannot be had")
        (found,) = place.glob(f"{package}_*.deb")
        run(["dpkg", "-x", str(found), str(root)], place, until, f"{package} cannot be unpacked")
    return root


def run(command: list[str], where: Path, until: float, what: str, environ: dict[str, str] | None = None) -> None:
    """Wait for it, until ``until`` at most. Raises Unavailable with ``what`` if it fails."""
    process = None
    # Whoever is told to end in the middle of a start would not know what to end.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        # A process group, to be ended as a whole; not a session, which would be scheduled as one of its own.
        process = subprocess.Popen(
            command,
            cwd=where,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        output, _ = process.communicate(timeout=max(1.0, until - time.monotonic()))
    except BaseException as error:
        if process is not None:
            with suppress(ProcessLookupError):  # it has ended by itself in this moment
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        if isinstance(error, subprocess.TimeoutExpired):
            raise Unavailable(f"{what}: it takes too long") from None
        raise
    if process.returncode:
        last = output.decode(errors="replace").strip().splitlines()[-3:]
        raise Unavailable(f"{what}: {' / '.join(last)}")
