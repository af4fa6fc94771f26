"""Fetches Slurm and munge from Debian's packages, once, into a cache: for make test-slurm where they are not installed.

    python -m tools.slurm_daemons     # prints the directory under which they lie

They are unpacked with all that they need and the machine lacks. Installed, they would leave users and services behind.
"""

from __future__ import annotations

import fcntl
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tools import debian
from tools.debian import Unavailable, run, sources

LIMIT = 4 * 60.0
_PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
# What maintainers' scripts would link; the names before are those that everybody uses.
_LINKS = {"slurmctld": "slurmctld-wlm", "slurmd": "slurmd-wlm", "slurmstepd": "slurmstepd-wlm"}


def root() -> Path:
    return debian.cache("slurm") / "root"


def unpacked() -> Path:
    """The directory in which there is usr/sbin/slurmctld and all else; fetches it if it is not there. Raises
    Unavailable."""
    root().parent.mkdir(parents=True, exist_ok=True)
    with (root().parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one fetches, the others wait for it
        if not root().exists():
            with tempfile.TemporaryDirectory(prefix="slurm-packages-", dir=root().parent) as place:
                try:
                    _fetch(Path(place)).rename(root())
                except OSError as error:
                    raise Unavailable(f"Slurm's packages could not be unpacked: {error!r}") from error
    return root()


def _fetch(place: Path) -> Path:
    until = time.monotonic() + LIMIT
    apt = sources(place)
    run([*apt, "update"], place, until, "the list of packages cannot be read")
    words = ("install", "--download-only", "--yes", "--no-install-recommends", *_PACKAGES)
    run([*apt, *words], place, until, "Slurm's packages cannot be had")
    made = place / "root"
    for package in sorted((place / "archives").glob("*.deb")):
        run(["dpkg", "-x", str(package), str(made)], place, until, f"{package.name} cannot be unpacked")
    for name, program in _LINKS.items():
        if not (made / "usr/sbin" / program).exists():
            raise Unavailable(f"{program} is in none of Slurm's packages")
        (made / "usr/sbin" / name).symlink_to(program)
    shutil.rmtree(made / "usr/share/doc", ignore_errors=True)
    return made


def main() -> int:
    try:
        print(unpacked())
    except Unavailable as error:
        print(f"no Slurm: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
