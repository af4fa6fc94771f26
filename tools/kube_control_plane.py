"""Builds a Kubernetes control plane (1.20.2) from Debian's source package, once, into a cache: for make test-k8s.

    python -m tools.kube_control_plane     # prints the directory with the binaries

Debian bookworm ships no API server, but the source of one with all that it needs, and a Go compiler. Whatever of go,
rsync and etcd is not installed is unpacked from its package beside the source: nothing is installed. Takes some six
minutes of one core, 3 GB of disk while it lasts and 240 MB afterwards.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tools import debian
from tools.debian import Unavailable, run, sources, unpacked

BINARIES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
# Of the 90 minutes that a whole run of all tests may take, no more than this is for tools.
LIMIT = 12 * 60.0
# What they need besides a C library, which comes in packages of its own: a small machine has none of them.
_PROGRAMS = {"rsync": ("rsync", "libpopt0"), "jq": ("jq", "libjq1", "libonig5")}
_REFLECT = "golang-github-modern-go-reflect2-dev"


def cache() -> Path:
    return debian.cache("kube-1.20.2")


def there() -> bool:
    return all((cache() / name).is_file() for name in BINARIES)


def binaries() -> Path:
    """The directory with BINARIES (and etcd, where none is installed); builds them if they are not there. Raises
    Unavailable."""
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one builds, the others wait for it
        if not there():
            with tempfile.TemporaryDirectory(prefix="kube-build-") as place:
                try:
                    _build(Path(place))
                except (
                    OSError,
                    ValueError,
                    LookupError,
                ) as error:  # packages are not as they were when this was written
                    raise Unavailable(f"the build of the control plane went wrong: {error!r}") from error
    return cache()


def _build(place: Path) -> None:
    until = time.monotonic() + LIMIT
    apt = sources(place)
    if shutil.which("dpkg-source") is None:
        raise Unavailable("there is no dpkg-source here (apt-get install dpkg-dev)")
    run([*apt, "update"], place, until, "the list of source packages cannot be read")
    run([*apt, "source", "--download-only", "kubernetes"], place, until, "the source package cannot be had")
    found = sorted(place.glob("kubernetes_1.20*.dsc"))
    if not found:
        raise Unavailable("the source package kubernetes is not of version 1.20 here")
    source = place / "src"
    run(["dpkg-source", "--no-check", "-x", str(found[0]), str(source)], place, until, "the source cannot be unpacked")
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
    environ |= {"GOCACHE": str(place / "go-cache"), "HOME": str(place)}
    what = "WHAT=" + " ".join(f"cmd/{name}" for name in BINARIES)
    run(["nice", "make", what], source, until, "the build failed", environ)
    for name in BINARIES:
        draft = cache() / f"{name}.partial"
        shutil.copy2(source / "_output/local/bin/linux/amd64" / name, draft)
        draft.rename(cache() / name)


def _tools(place: Path, apt: list[str], until: float) -> dict[str, str]:
    """An environment in which there are go, rsync and jq."""
    environ, paths = dict(os.environ), []
    if shutil.which("go") is None:
        root = unpacked(place, apt, until, "golang-1.19-go", "golang-1.19-src")
        goroot = root / "usr/lib/go-1.19"
        for link in ("api", "misc", "src", "test"):  # they lead to /usr/share
            if (goroot / link).is_symlink():
                (goroot / link).unlink()
                (goroot / link).symlink_to(root / "usr/share/go-1.19" / link)
        environ["GOROOT"] = str(goroot)
        paths.append(goroot / "bin")
    if missing := [package for name in _PROGRAMS if shutil.which(name) is None for package in _PROGRAMS[name]]:
        root = unpacked(place, apt, until, *missing)
        paths.append(root / "usr/bin")
        libraries = {str(path.parent) for path in root.glob("**/*.so.*")}
        environ["LD_LIBRARY_PATH"] = os.pathsep.join(
            [*sorted(libraries), *filter(None, [environ.get("LD_LIBRARY_PATH")])]
        )
    environ["PATH"] = os.pathsep.join([*map(str, paths), environ["PATH"]])
    if shutil.which("etcd") is None:
        shutil.copy2(unpacked(place, apt, until, "etcd-server") / "usr/bin/etcd", cache() / "etcd")
    return environ


def main() -> int:
    try:
        print(binaries())
    except Unavailable as error:
        print(f"no control plane: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
