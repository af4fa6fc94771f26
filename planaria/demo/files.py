"""Which files the demo's text is made of. No torch: a command can ask before it starts anything."""

from __future__ import annotations

import sysconfig
from glob import glob
from pathlib import Path

from planaria.errors import UsageError


def text_files(pattern: str | None, length: int) -> list[Path]:
    """All files that match ``pattern``, sorted; without one, the source of Python's own standard library.

    Raises UsageError if there are none, or too few bytes for a single sample of ``length`` + 1.
    """
    pattern = pattern or str(Path(sysconfig.get_paths()["stdlib"], "*.py"))
    # Sorted, because every group must see the same text in the same order.
    files = [path for name in sorted(glob(pattern, recursive=True)) if (path := Path(name)).is_file()]
    if not files:
        raise UsageError(f"no file matches {pattern!r}; give a pattern such as 'texts/**/*.txt', in quotes")
    size = sum(path.stat().st_size for path in files)
    if size <= length:
        raise UsageError(f"{pattern!r} matches {size} bytes of text; a sample needs {length + 1}")
    return files
