"""Lines of code by folder: no blank lines, comments, docstrings or generated files."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of(path: Path) -> int:
    text = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            used |= set(range(token.start[0], token.end[0] + 1))
    return len(used - docstrings)


def main() -> None:
    totals = {}
    for root in ("planaria", "tests"):
        folders: dict[str, int] = {}
        for path in sorted(Path(root).rglob("*.py")):
            if "_pb2" not in path.name and not path.is_symlink():
                folder = "/".join(path.parts[:2]) if len(path.parts) > 2 else root
                folders[folder] = folders.get(folder, 0) + lines_of(path)
        for folder, count in folders.items():
            print(f"{count:7} {folder}")
        totals[root] = sum(folders.values())
    print(f"package {totals['planaria']}, tests {totals['tests']}, ratio {totals['tests'] / totals['planaria']:.2f}")


if __name__ == "__main__":
    sys.exit(main())
