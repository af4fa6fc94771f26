"""Builds, once, a virtual environment of its own for torchft, outside the repository.

    python bench/peers.py            # builds it if needed and prints where it is and what is in it

torchft pulls in packages that Planaria does not want, and must not decide which torch Planaria is measured
with. Environment variables:

- ``PLANARIA_BENCH_CACHE``: where environments are kept (default ``~/.cache/planaria-bench``).
- ``PLANARIA_BENCH_TORCHFT``: the requirement to install (default: the nightly that RESULTS.md was measured with).
- ``PLANARIA_BENCH_PIP_ARGS``: further arguments for pip, such as an index that has CPU builds of torch.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

DEFAULT_TORCHFT = "torchft-nightly==2026.10.26"
FALLBACK_TORCH = "2.13.0"
PACKAGES = ("torch", "numpy", "torchft", "torchft-nightly")

ASK_VERSIONS = """
import importlib.metadata as m, json, platform
found = {"python": platform.python_version()}
for name in %r:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
import torchft
print(json.dumps(found))
"""


class PeerError(Exception):
    """The environment of a peer cannot be made; the message says what to do."""


@dataclass(frozen=True)
class Peer:
    """An environment that is ready: its interpreter, torchft's lighthouse, and the versions of what is in it."""

    python: Path
    lighthouse: Path
    versions: dict[str, str]


def cache_dir() -> Path:
    return Path(os.environ.get("PLANARIA_BENCH_CACHE", "~/.cache/planaria-bench")).expanduser()


def own_torch() -> str:
    """The torch release of this interpreter, without the build tag, so that all contestants use the same one."""
    try:
        return importlib.metadata.version("torch").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return FALLBACK_TORCH


def _run(command: list[str], doing: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise PeerError(
            f"{doing} failed (exit {done.returncode}):\n{tail}\n"
            "torchft has wheels for Linux x86-64 and a few Python versions only, and needs a package index. Use such "
            "a machine, or leave torchft out of --peers."
        )
    return done.stdout


def _build(venv: Path, torch: str, torchft: str) -> dict[str, str]:
    python = str(venv / "bin" / "python")
    pip = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        *shlex.split(os.environ.get("PLANARIA_BENCH_PIP_ARGS", "")),
    ]
    _run([sys.executable, "-m", "venv", "--clear", str(venv)], f"making a virtual environment at {venv}")
    # torch first and exactly pinned: left to torchft's ">=", pip takes the newest build with gigabytes of CUDA.
    _run([*pip, f"torch=={torch}", "numpy"], f"installing torch {torch} for torchft")
    _run([*pip, f"torch=={torch}", torchft], f"installing {torchft}")
    versions: dict[str, str] = json.loads(_run([python, "-c", ASK_VERSIONS % (PACKAGES,)], "importing torchft"))
    return versions


def ensure() -> Peer:
    """Give the torchft environment for this interpreter's torch, building it on first use (a minute or two).

    Raises PeerError, with what pip said, when it cannot be built.
    """
    torch, torchft = own_torch(), os.environ.get("PLANARIA_BENCH_TORCHFT", DEFAULT_TORCHFT)
    name = re.sub(r"[^\w.]+", "-", f"{torchft}-torch-{torch}-py{sys.version_info[0]}.{sys.version_info[1]}")
    root = cache_dir()
    venv, ready = root / name, root / f"{name}.json"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PeerError(f"cannot make {root}: {error}; set PLANARIA_BENCH_CACHE to a folder you can write") from error
    with open(root / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two benchmarks started together build it once
        if not ready.exists():
            print(f"building {venv} ({torchft}, torch {torch}) ...", file=sys.stderr, flush=True)
            versions = _build(venv, torch, torchft)
            ready.with_suffix(".part").write_text(json.dumps(versions))
            ready.with_suffix(".part").rename(ready)  # the record appears only when all of it is there
    return Peer(venv / "bin" / "python", venv / "bin" / "torchft_lighthouse", json.loads(ready.read_text()))


if __name__ == "__main__":
    try:
        peer = ensure()
    except PeerError as error:
        sys.exit(str(error))
    print(json.dumps({"python": str(peer.python), "versions": peer.versions}, indent=2))
