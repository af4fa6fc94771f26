"""Bad input is one sentence and exit code 2, before anything is started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import planaria
from planaria.cli import main as cli
from planaria.cli import run as run_command
from planaria.cli.options import RunOptions, check, new_job, policy_named
from planaria.core.messages import Policy
from planaria.errors import UsageError

from .conftest import HOME, plain_environ


@pytest.fixture
def good(tmp_path: Path) -> RunOptions:
    script = tmp_path / "train.py"
    script.write_text("print('hello')\n")
    return RunOptions(
        script=str(script),
        args=(),
        module=False,
        groups=4,
        shards=8,
        lighthouse=None,
        job="job-1",
        first_group=0,
        local_groups=4,
        policy=Policy.REDISTRIBUTE,
        reduction="tree",
        log_dir=tmp_path / "logs",
        quiet=False,
        live=False,
        max_replacements=100,
        restart_backoff=1.0,
        min_groups=1,
        http=None,
        host="127.0.0.1",
        device="cpu",
    )


def refusal(options: RunOptions, **changes: Any) -> str:
    with pytest.raises(UsageError) as caught:
        check(replace(options, **changes))
    sentence = str(caught.value)
    assert "\n" not in sentence and caught.value.exit_code == 2
    return sentence


def test_good_options_pass_and_make_the_directory(good: RunOptions) -> None:
    check(good)
    assert good.log_dir.is_dir()
    check(replace(good, shards=None, http="127.0.0.1:0", job="a.b_c-D9"))
    check(replace(good, lighthouse="[::1]:5"))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"groups": 0}, "--groups 0: a job needs at least one group"),
        ({"nproc_per_group": 0}, "--nproc-per-group 0: a group has between 1 and"),
        ({"groups": 9, "local_groups": 9}, "9 groups cannot share 8 shards"),
        ({"shards": 0}, "--shards 0"),
        ({"min_groups": 0}, "--min-groups 0"),
        ({"min_groups": 5}, "--min-groups 5: must be between 1 and --groups 4"),
        ({"first_group": -1}, "--first-group -1"),
        ({"first_group": 2}, "--first-group 2 with --local-groups 4"),
        ({"local_groups": 0}, "--local-groups 0"),
        ({"local_groups": 2}, "give the --lighthouse"),
        ({"buddy": 0, "nproc_per_group": 2}, "--buddy 0: copies can be made every step or less often"),
        ({"buddy": -3, "nproc_per_group": 2}, "--buddy -3"),
        ({"buddy": 5}, "groups of one rank have none"),
        ({"checkpoint_every": 0}, "--checkpoint-every 0: must be at least 1"),
        ({"checkpoint_keep": -1}, "--checkpoint-keep -1: must be at least 1"),
        ({"checkpoint": Path("/proc/nowhere")}, "--checkpoint /proc/nowhere: cannot write there"),
        ({"reduction": "magic"}, "--reduction magic: unknown; known reductions: tree, fast, int8, fp8"),
        ({"job": "a/b"}, "--job 'a/b'"),
        ({"job": ""}, "--job ''"),
        ({"lighthouse": "nowhere"}, "--lighthouse 'nowhere' is not of the form host:port"),
        ({"http": "127.0.0.1:0", "lighthouse": "h:1"}, "--http 127.0.0.1:0: the pages are the lighthouse's"),
        ({"http": "127.0.0.1"}, "--http '127.0.0.1' is not of the form host:port"),
        ({"max_replacements": -1}, "--max-replacements -1"),
        ({"restart_backoff": -0.5}, "--restart-backoff -0.5"),
        ({"restart_backoff": float("nan")}, "--restart-backoff nan"),
        ({"script": "/no/such/script.py"}, "no script at /no/such/script.py"),
        ({"script": "nothing"}, "no script at nothing (for a module, use -m)"),
        ({"script": "no_such_module_x.tool", "module": True}, "there is no module no_such_module_x here"),
    ],
)
def test_bad_options(good: RunOptions, changes: dict[str, Any], part: str) -> None:
    assert part in refusal(good, **changes)
    assert not good.log_dir.exists(), "nothing was made"


@pytest.mark.parametrize(
    ("visible", "changes", "part"),
    [
        ("0,1,2", {"device": None}, "4 GPUs are needed for 4 groups with 1 process each, but 3 GPUs are visible here"),
        ("0,1,2,3", {"device": None, "nproc_per_group": 2}, "8 GPUs are needed for 4 groups with 2 processes each"),
        ("3", {"device": "cuda"}, "but one GPU is visible here: give fewer, or --device cpu"),
        ("", {"device": "cuda"}, "but no GPU is visible here"),
        ("", {"device": "abacus"}, "--device abacus: unknown; known devices: cpu, cuda"),
    ],
)
def test_too_few_devices(
    good: RunOptions, monkeypatch: pytest.MonkeyPatch, visible: str, changes: dict[str, Any], part: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert part in refusal(good, **changes)


@pytest.mark.parametrize(("visible", "device"), [("0,1,2,3,4,5,6,7", None), ("", None), ("0", "cpu")])
def test_enough_devices(good: RunOptions, monkeypatch: pytest.MonkeyPatch, visible: str, device: str | None) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    check(replace(good, nproc_per_group=2, device=device))


def test_unknown_policy() -> None:
    assert policy_named("shrink") is Policy.SHRINK
    with pytest.raises(UsageError, match="--policy pray: unknown policy; known policies: redistribute, shrink"):
        policy_named("pray")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"#!/bin/sh\nif true; then echo hi; fi\n", "is not a Python script: line 2"),
        (b"\x7fELF\0\0\0", "is not a Python script"),
        (b"def f(:\n", "is not a Python script: line 1"),
    ],
)
def test_only_python_is_run(good: RunOptions, content: bytes, part: str) -> None:
    Path(good.script).write_bytes(content)
    assert part in refusal(good)


def test_directories(good: RunOptions, tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    assert "without __main__.py" in refusal(good, script=str(tmp_path / "app"))
    (tmp_path / "app" / "__main__.py").touch()
    check(replace(good, script=str(tmp_path / "app")))


def test_modules_are_looked_for_here(good: RunOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("raise SystemExit('must not run in the agent')\n")
    monkeypatch.chdir(tmp_path)
    check(replace(good, script="mine.tool", module=True))
    check(replace(good, script="json.tool", module=True))


def test_log_directory_that_cannot_be(good: RunOptions, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot write there" in refusal(good, log_dir=tmp_path / "file" / "logs")


def test_port_in_use(good: RunOptions) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"--http {address}: cannot listen there" in refusal(good, http=address)


def test_names_for_jobs() -> None:
    first, second = new_job("path/to/my train.py"), new_job("path/to/my train.py")
    assert first.startswith("my-train-") and first != second
    assert new_job("...").startswith("job-")


# --- the command line ----------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[RunOptions]]:
    """What ``planaria run`` would have supervised."""
    seen: list[RunOptions] = []

    async def supervise(options: RunOptions) -> int:
        seen.append(options)
        return 7

    monkeypatch.setattr(run_command, "supervise", supervise)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").touch()
    for name in [name for name in os.environ if name.startswith("PLANARIA_")]:
        monkeypatch.delenv(name)
    yield seen


def invoke(*args: str, **environ: str) -> int:
    if not cli.app.registered_commands:
        cli._register(())
    return CliRunner().invoke(cli.app, ["run", *args], env=environ).exit_code


def test_everything_after_the_script_is_the_scripts(asked: list[RunOptions]) -> None:
    code = invoke("--groups", "3", "s.py", "--groups", "9", "-x", "--", "--help")
    assert code == 7, "the outcome's exit code"
    (options,) = asked
    assert options.groups == 3 and options.args == ("--groups", "9", "-x", "--", "--help")


def test_defaults(asked: list[RunOptions], tmp_path: Path) -> None:
    invoke("s.py")
    (options,) = asked
    assert (options.groups, options.local_groups, options.shards, options.min_groups) == (1, 1, None, 1)
    assert options.policy is Policy.REDISTRIBUTE and options.reduction == "tree"
    assert options.log_dir == tmp_path / "planaria_logs" / options.job


@pytest.mark.parametrize(
    "words",
    [
        (
            "--log-dir",
            "d",
            "--min-groups",
            "2",
            "--max-replacements",
            "5",
            "--restart-backoff",
            "2",
            "--first-group",
            "0",
        ),
        (
            "--log_dir",
            "d",
            "--min_groups",
            "2",
            "--max_replacements",
            "5",
            "--restart_backoff",
            "2",
            "--first_group",
            "0",
        ),
        ("--log-dir=d", "--min_groups=2", "--replace-budget=5", "--restart-backoff=2"),
        ("--log-dir=d", "--min_groups=2", "--replace_budget=5", "--restart-backoff=2"),
    ],
)
def test_both_spellings(asked: list[RunOptions], words: tuple[str, ...]) -> None:
    assert invoke("--groups", "4", "--nproc_per_group", "1", *words, "s.py") == 7
    (options,) = asked
    assert options.log_dir.name == "d" and options.min_groups == 2
    assert (options.max_replacements, options.restart_backoff) == (5, 2.0)


def test_environment_and_command_line(asked: list[RunOptions]) -> None:
    invoke("--groups", "2", "s.py", PLANARIA_RUN_GROUPS="5", PLANARIA_RUN_SHARDS="8", PLANARIA_RUN_POLICY="shrink")
    (options,) = asked
    assert (options.groups, options.shards, options.policy) == (2, 8, Policy.SHRINK)


def test_quiet_live_and_tee(asked: list[RunOptions]) -> None:
    invoke("--quiet", "s.py")
    invoke("--quiet", "--live", "--tee", "s.py")
    assert [(o.quiet, o.live) for o in asked] == [(True, False), (False, False)]


def test_groups_on_this_node(asked: list[RunOptions]) -> None:
    invoke("--groups", "5", "--lighthouse", "h:1", "--first-group", "2", "s.py")
    invoke("--groups", "5", "--lighthouse", "h:1", "--first-group", "2", "--local-groups", "2", "s.py")
    assert [(o.first_group, o.local_groups) for o in asked] == [(2, 3), (2, 2)]


def planaria_command(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "planaria", *args],
        cwd=cwd,
        env=plain_environ(),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_errors_are_sentences_without_traceback(tmp_path: Path) -> None:
    done = planaria_command("run", "--policy", "pray", "x.py", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "planaria: --policy pray: unknown policy; known policies: redistribute, shrink\n"
    assert list(tmp_path.iterdir()) == []


def test_missing_and_unknown_words(tmp_path: Path) -> None:
    assert planaria_command("run", cwd=tmp_path).returncode == 2
    assert planaria_command("run", "--no-such-option", "x.py", cwd=tmp_path).returncode == 2
    assert planaria_command("run", "--groups", "many", "x.py", cwd=tmp_path).returncode == 2


def test_version_and_help(tmp_path: Path) -> None:
    assert planaria_command("--version", cwd=tmp_path).stdout == f"planaria {planaria.__version__}\n"
    shown = planaria_command("--help", cwd=tmp_path).stdout
    for word in ("run", "status", "kill", "drain", "scale", "evict", "lighthouse", "chaos", "demo"):
        assert word in shown
    assert (HOME / "planaria").is_dir()
