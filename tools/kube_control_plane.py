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
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BINARIES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
# Of the 90 minutes that a whole run of all tests may take, no more than this is for tools.
LIMIT = 12 * 60.0
_REFLECT = "golang-github-modern-go-reflect2-dev"


class Unavailable(Exception):
    """A sentence about why there is no control plane."""


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "planaria" / "kube-1.20.2"


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
    if shutil.which("apt-get") is None or shutil.which("dpkg-source") is None:
        raise Unavailable("there is no apt-get or dpkg-source here: the build takes Debian's packages")
    apt = _sources(place)
    _run([*apt, "update"], place, until, "the list of source packages cannot be read")
    _run([*apt, "source", "--download-only", "kubernetes"], place, until, "the source package cannot be had")
    found = sorted(place.glob("kubernetes_1.20*.dsc"))
    if not found:
        raise Unavailable("the source package kubernetes is not of version 1.20 here")
    source = place / "src"
    _run(["dpkg-source", "--no-check", "-x", str(found[0]), str(source)], place, until, "the source cannot be unpacked")
    environ = _tools(place, apt, until)
    reflect = _unpacked(place, apt, until, _REFLECT) / "usr/share/gocode/src/github.com/modern-go/reflect2"
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
    _run(["nice", "make", what], source, until, "the build failed", environ)
    for name in BINARIES:
        draft = cache() / f"{name}.partial"
        shutil.copy2(source / "_output/local/bin/linux/amd64" / name, draft)
        draft.rename(cache() / name)


def _sources(place: Path) -> list[str]:
    """apt-get with a list of sources of its own, made from the machine's, that has the source packages too."""
    lines = []
    for path in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]:
        if path.suffix == ".sources":
            fields = dict(
                line.split(":", 1) for line in path.read_text().splitlines() if ":" in line and line[0] != "#"
            )
            signed = f"[signed-by={fields['Signed-By'].strip()}] " if "Signed-By" in fields else ""
            for uri in fields.get("URIs", "").split():
                for suite in fields.get("Suites", "").split():
                    lines.append(f"{signed}{uri} {suite} {fields.get('Components', '').strip()}")
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
    }
    return ["apt-get", "-qq", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]


def _tools(place: Path, apt: list[str], until: float) -> dict[str, str]:
    """An environment in which there are go, rsync and jq."""
    environ, paths = dict(os.environ), []
    if shutil.which("go") is None:
        root = _unpacked(place, apt, until, "golang-1.19-go", "golang-1.19-src")
        goroot = root / "usr/lib/go-1.19"
        for link in ("api", "misc", "src", "test"):  # they lead to /usr/share
            if (goroot / link).is_symlink():
                (goroot / link).unlink()
                (goroot / link).symlink_to(root / "usr/share/go-1.19" / link)
        environ["GOROOT"] = str(goroot)
        paths.append(goroot / "bin")
    if missing := [name for name in ("rsync", "jq") if shutil.which(name) is None]:
        paths.append(_unpacked(place, apt, until, *missing) / "usr/bin")
    environ["PATH"] = os.pathsep.join([*map(str, paths), environ["PATH"]])
    if shutil.which("etcd") is None:
        shutil.copy2(_unpacked(place, apt, until, "etcd-server") / "usr/bin/etcd", cache() / "etcd")
    return environ


def _unpacked(place: Path, apt: list[str], until: float, *packages: str) -> Path:
    root = place / "root" / packages[0]
    root.mkdir(parents=True)
    for package in packages:
        _run([*apt, "download", package], place, until, f"the package {package} cannot be had")
        (found,) = place.glob(f"{package}_*.deb")
        _run(["dpkg", "-x", str(found), str(root)], place, until, f"{package} cannot be unpacked")
    return root


def _run(command: list[str], where: Path, until: float, what: str, environ: dict[str, str] | None = None) -> None:
    process = subprocess.Popen(
        command, cwd=where, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=max(1.0, until - time.monotonic()))
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise Unavailable(f"building the control plane takes longer than {LIMIT / 60:.0f} minutes") from None
        raise
    if process.returncode:
        last = output.decode(errors="replace").strip().splitlines()[-3:]
        raise Unavailable(f"{what}: {' / '.join(last)}")


def main() -> int:
    try:
        print(binaries())
    except Unavailable as error:
        print(f"no control plane: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
