"""Builds a Kubernetes control plane (1.20.2) from Debian's source package, once, into a cache: for make test-k8s.

    python -m tools.kube_control_plane                                # prints the directory with the binaries
    python -m tools.kube_control_plane --background --minutes 60      # beside tests that are to get on undisturbed

Debian bookworm ships no API server, but the source of one with all that it needs, and a Go compiler. That compiler, and
whatever of rsync, jq and etcd is not installed, is unpacked from its package beside the source: nothing is installed,
so no service is started. Takes some nine minutes of one core, longer in the background, where it waits for one; up to
1.6 GB of memory, 3 GB of disk in the cache while it lasts and 240 MB afterwards.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from tools import debian
from tools.debian import Unavailable, run, sources, unpacked

BINARIES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
LIMIT_MINUTES = 20.0  # of one that somebody waits for
# What they need besides a C library, which comes in packages of its own: a small machine has none of them.
_PROGRAMS = {"rsync": ("rsync", "libpopt0"), "jq": ("jq", "libjq1", "libonig5")}
_REFLECT = "golang-github-modern-go-reflect2-dev"


def cache() -> Path:
    return debian.cache("kube-1.20.2")


def there() -> bool:
    return all((cache() / name).is_file() for name in BINARIES) and etcd() is not None


def etcd() -> str | None:
    """The one that is installed, or that in the cache."""
    return shutil.which("etcd") or shutil.which("etcd", path=str(cache()))


def binaries(minutes: float = LIMIT_MINUTES) -> Path:
    """The directory with BINARIES (and etcd, where none is installed); builds what is not there, in so many minutes at
    most. Raises Unavailable."""
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one builds, the others wait for it
        if not there():
            place = cache() / "build"
            shutil.rmtree(place, ignore_errors=True)  # of one that was killed
            place.mkdir()
            try:
                _build(place, time.monotonic() + 60 * minutes)
            except (OSError, ValueError, LookupError) as error:  # packages are not as they were when this was written
                raise Unavailable(f"the build of the control plane went wrong: {error!r}") from error
            finally:
                shutil.rmtree(place, ignore_errors=True)
    return cache()


def _build(place: Path, until: float) -> None:
    apt = sources(place)
    run([*apt, "update"], place, until, "the list of source packages cannot be read")
    if etcd() is None:
        _keep(unpacked(place, apt, until, "etcd-server") / "usr/bin/etcd")
    if all((cache() / name).is_file() for name in BINARIES):
        return
    # Debian's own changes are to kubectl alone.
    run([*apt, "source", "--tar-only", "kubernetes"], place, until, "the source package cannot be had")
    found = sorted(place.glob("kubernetes_*1.20.2.orig.tar.gz"))
    if not found:
        raise Unavailable("the source package kubernetes is not of version 1.20.2 here")
    source = place / "src"
    source.mkdir()
    words = ["tar", "-xf", str(found[0]), "--strip-components=1", "-C", str(source)]
    run(words, place, until, "the source cannot be unpacked")
    environ = _tools(place, apt, until)
    reflect = unpacked(place, apt, until, _REFLECT) / "usr/share/gocode/src/github.com/modern-go/reflect2"
    # The one that comes with the source crashes with Go 1.18 and newer.
    shutil.rmtree(source / "vendor/github.com/modern-go/reflect2")
    shutil.copytree(reflect, source / "vendor/github.com/modern-go/reflect2")
    (source / "vendor/github.com/modern-go/reflect2/go.mod").unlink(missing_ok=True)
    gopath = source / ".go"
    (gopath / "src/k8s.io").mkdir(parents=True)
    (gopath / "src/k8s.io/kubernetes").symlink_to("../../..")
    environ |= {"GOPATH": str(gopath), "CGO_ENABLED": "0", "GOPROXY": "off", "GOFLAGS": "-mod=vendor"}
    environ |= {"HOME": str(place), "TMPDIR": str(place)}  # all that it writes goes with it, also if it is killed
    what = "WHAT=" + " ".join(f"cmd/{name}" for name in BINARIES)
    run(["make", what], source, until, "the build failed", environ)
    for name in BINARIES:
        _keep(source / "_output/bin" / name)


def _keep(program: Path) -> None:
    """In the cache, whole or not at all."""
    draft = cache() / f"{program.name}.partial"
    shutil.copy2(program, draft)
    draft.rename(cache() / program.name)


def _tools(place: Path, apt: list[str], until: float) -> dict[str, str]:
    """An environment in which there are go, rsync and jq."""
    environ = dict(os.environ)
    root = unpacked(place, apt, until, "golang-1.19-go", "golang-1.19-src")  # the source knows no newer one
    goroot = root / "usr/lib/go-1.19"
    for link in ("api", "misc", "src", "test"):  # they lead to /usr/share
        if (goroot / link).is_symlink():
            (goroot / link).unlink()
            (goroot / link).symlink_to(root / "usr/share/go-1.19" / link)
    environ["GOROOT"] = str(goroot)
    paths = [goroot / "bin"]
    if missing := [package for name in _PROGRAMS if shutil.which(name) is None for package in _PROGRAMS[name]]:
        root = unpacked(place, apt, until, *missing)
        paths.append(root / "usr/bin")
        libraries = {str(path.parent) for path in root.glob("**/*.so.*")}
        environ["LD_LIBRARY_PATH"] = os.pathsep.join(
            [*sorted(libraries), *filter(None, [environ.get("LD_LIBRARY_PATH")])]
        )
    environ["PATH"] = os.pathsep.join([*map(str, paths), environ["PATH"]])
    return environ


def _step_back() -> None:
    """Take no more of the machine than others leave, with all that is started from here."""
    # Where sessions are scheduled against each other (autogroup), niceness counts within one alone, and tests have
    # sessions of their own: beside each of them this would get as much as they do.
    with suppress(OSError):  # a shell has given it a group of its own, or there is no such scheduling here
        os.setsid()
        Path("/proc/self/autogroup").write_text("19")
    os.nice(19)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _end_with(parent: int) -> None:
    """Who is killed ends nobody, and this has a session of its own: for an hour it would go on by itself."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit("whoever wanted a control plane is gone")


def main() -> int:
    parent = os.getppid()
    parser = argparse.ArgumentParser(prog="python -m tools.kube_control_plane")
    parser.add_argument("--background", action="store_true", help="take only what others leave of the machine")
    parser.add_argument("--minutes", type=float, default=LIMIT_MINUTES, help="give up after so many")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # ends what it has started
    if options.background:
        _end_with(parent)
        _step_back()
    try:
        print(binaries(options.minutes))
    except Unavailable as error:
        print(f"no control plane: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
