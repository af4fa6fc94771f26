"""Benchmarks, examples, tools and the code in the docs import names of ours that there are."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SCRIPTS = [path for place in ("bench", "examples", "tools") for path in sorted((ROOT / place).rglob("*.py"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def imported(text: str) -> set[tuple[str, str]]:
    """(module, name) of ours; the name is empty where all of a module is imported."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {(node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
    return {(module, name) for module, name in found if module.split(".")[0] in ("planaria", "bench", "tools")}


def missing(module: str, name: str) -> bool:
    try:
        there = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("planaria", "bench", "tools"):
            return True
        pytest.skip(f"{module} needs {error.name}")
    # A module of a package is an attribute of that only once it is imported.
    return bool(name) and not hasattr(there, name) and missing(f"{module}.{name}", "")


@pytest.mark.parametrize("path", [*SCRIPTS, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_all_names_are_there(path: Path) -> None:
    text = path.read_text()
    blocks = [text] if path.suffix == ".py" else CODE.findall(text)
    names = {each for block in blocks for each in imported(block)}
    assert {each for each in names if missing(*each)} == set()


def test_it_finds_what_is_not_there() -> None:
    assert missing("planaria.files", "write_half") and missing("planaria.nowhere", "")
    assert not missing("planaria.wire", "codec") and not missing("planaria.files", "write_whole")
