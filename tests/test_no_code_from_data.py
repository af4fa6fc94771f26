"""Nothing that comes from elsewhere is unpickled or evaluated, anywhere in the package."""

from __future__ import annotations

import ast
from pathlib import Path

import planaria

ROOT = Path(planaria.__file__).parent
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
YAML = {"yaml.safe_load", "yaml.safe_dump", "yaml.safe_dump_all"}  # what else there is makes objects
# These run a user's own script, by name.
MAY_EXEC = {"agent/rankmain.py"}
# torch's collectives of Python objects are pickles.
OBJECTS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


def found(path: Path) -> list[str]:
    name, told = path.relative_to(ROOT).as_posix(), []
    for node in ast.walk(ast.parse(path.read_text())):
        imported: list[str] = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported = [node.module]
        told += [f"{name}: import {each}" for each in imported if each.split(".")[0] in MODULES]
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in ("eval", "exec", "compile", "__import__") and name not in MAY_EXEC and not _checks(name, called):
            told.append(f"{name}:{node.lineno}: {called}")
        if called.startswith("yaml.") and called not in YAML:
            told.append(f"{name}:{node.lineno}: {called}")
        if called.endswith("torch.load"):
            safe = [k for k in node.keywords if k.arg == "weights_only" and getattr(k.value, "value", None) is True]
            told += [] if safe else [f"{name}:{node.lineno}: torch.load without weights_only=True"]
        if called.split(".")[-1] in OBJECTS:
            told.append(f"{name}:{node.lineno}: {called}")
        if any(k.arg == "shell" and getattr(k.value, "value", None) is True for k in node.keywords):
            told.append(f"{name}:{node.lineno}: a shell")
    return told


def _checks(name: str, called: str) -> bool:
    """Whether a script is only parsed, before anything is started."""
    return (name, called) == ("cli/options.py", "compile")


def test_no_code_from_data() -> None:
    paths = [path for path in ROOT.rglob("*.py") if not path.name.startswith("control_pb2")]
    assert len(paths) > 100
    assert [line for path in paths for line in found(path)] == []
