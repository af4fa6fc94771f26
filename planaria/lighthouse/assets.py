"""The files of the web pages: read once, kept compressed, and named by what is in them."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parent / "web"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    "": "text/plain; charset=utf-8",  # licences
}


@dataclass(frozen=True, slots=True)
class Asset:
    kind: str
    body: bytes
    packed: bytes  # by gzip
    tag: str  # changes with the content, as an ETag has it


@cache
def assets() -> dict[str, Asset]:
    """By path below ``/web/``. Only what is in this table is ever served, whatever is asked for."""
    files = (path for path in sorted(_ROOT.rglob("*")) if path.is_file() and path.suffix in _KINDS)
    return {path.relative_to(_ROOT).as_posix(): _asset(path) for path in files}


def _asset(path: Path) -> Asset:
    body = path.read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    return Asset(_KINDS[path.suffix], body, gzip.compress(body, mtime=0), tag)
