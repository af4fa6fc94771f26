"""Fetches the packages of the lighthouse's pages from npm, as they are, into planaria/lighthouse/web/vendor.

    python tools/vendor_web.py

What is fetched is committed, so that nobody who installs or uses Planaria needs npm or the internet. A new version:
change version and integrity (``npm view NAME@VERSION dist.integrity``), run this, and look at the pages.
"""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

VENDOR = Path(__file__).resolve().parent.parent / "planaria" / "lighthouse" / "web" / "vendor"


@dataclass(frozen=True, slots=True)
class Package:
    """``files``: of the package, with their places below it kept, for modules import each other by them."""

    name: str
    version: str
    integrity: str
    files: tuple[str, ...]


PACKAGES = (
    Package(  # BSD-3-Clause; templates that escape whatever is put into them
        "lit-html",
        "3.3.3",
        "sha512-el8M6jK2o3RXBnrSHX3ZKrsN8zEV63pSExTO1wYJz7QndGYZ8353e2a5PPX+qHe2aGayfnchQmkAojaWAREOIA==",
        ("LICENSE", "lit-html.js", "directive.js", "directive-helpers.js", "directives/repeat.js"),
    ),
    Package(  # MIT; charts
        "uplot",
        "1.6.32",
        "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        ("LICENSE", "dist/uPlot.esm.js", "dist/uPlot.min.css"),
    ),
)


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        for package in PACKAGES:
            spec = f"{package.name}@{package.version}"
            done = subprocess.run(
                ["npm", "pack", "--silent", spec], cwd=directory, check=True, capture_output=True, text=True
            )
            data = (Path(directory) / done.stdout.split()[-1]).read_bytes()
            found = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
            if found != package.integrity:
                print(f"{spec} is not what it was: {found}", file=sys.stderr)
                return 1
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                for name in package.files:
                    member = archive.extractfile(f"package/{name}")
                    assert member is not None, name
                    target = VENDOR / package.name / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(member.read())
            print(f"{spec}: {len(package.files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
