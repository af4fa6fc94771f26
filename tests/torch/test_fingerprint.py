"""The fingerprint names everything that changes bits, and its differences read as sentences."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from planaria.core.fingerprint import SOFT, differing
from planaria.core.messages import Member, Ready
from planaria.errors import UsageError
from planaria.rank import promise
from planaria.rank.settings import Settings, read_settings
from planaria.torch.fingerprint import fingerprint
from planaria.torch.state import ProtectedState

SETTINGS = read_settings(4, 7, None, None, {})


Print = tuple[tuple[str, str], ...]


def now(model: nn.Module | None = None, settings: Settings = SETTINGS, exact: str = "bits", **more: str) -> Print:
    return fingerprint(ProtectedState(model=model or nn.Linear(2, 3)), settings, exact, **more)


def told(there: Print, here: Print, soft: bool = False) -> str:
    """What the lighthouse says of the difference."""
    first, second = (Ready(Member(0, 0), "", each, "", int(dict(each)["shards"]), 1) for each in (there, here))
    return differing(first, second, soft)


def test_sorted_strings_and_the_same_every_time() -> None:
    first = now()
    assert first == now() and list(first) == sorted(first)
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in first)
    assert told(first, now()) == ""


def test_values_of_parameters_do_not_matter_but_their_kind_does() -> None:
    first = now(nn.Linear(2, 3))
    assert now(nn.Linear(2, 3)) == first
    for other in (
        nn.Linear(2, 4),
        nn.Linear(2, 3).double(),
        nn.Linear(2, 3, bias=False),
        nn.Sequential(nn.Linear(2, 3)),
    ):
        assert told(first, now(other)).startswith("model (")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"shards": 5}, "shards (4 there, 5 here)"),
        ({"seed": 8}, "seed (7 there, 8 here)"),
        ({"reduction": "fast"}, "reduction (tree there, fast here)"),
    ],
)
def test_settings(change: dict[str, Any], sentence: str) -> None:
    assert told(now(), now(settings=dataclasses.replace(SETTINGS, **change))).endswith(sentence)


def test_members_of_a_job_have_one_fingerprint() -> None:
    environ = {"PLANARIA_GROUP": "3", "PLANARIA_INCARNATION": "2", "PLANARIA_JOB": "x"}
    assert now(settings=read_settings(4, 7, None, None, environ)) == now()


def test_flags_of_torch() -> None:
    before, threads = now(), torch.get_num_threads()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_num_threads(threads + 1)
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        after = now(nn.Linear(2, 3, dtype=torch.float32))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
    keys = "default_dtype (float32 there, float64 here), deterministic (off there, warn only here), "
    keys += f"float32_matmul (highest there, medium here), threads ({threads} there, {threads + 1} here)"
    assert told(before, after) == keys


def test_what_only_changes_bits_is_soft_if_only_samples_are_promised() -> None:
    def strays(exact: str) -> tuple[str, str]:
        before = now(exact=exact)
        after = tuple((key, "other" if key.endswith(("torch", "threads", "model")) else value) for key, value in before)
        return told(before, after), told(before, after, soft=True)

    hard, soft = strays("bits")
    assert ("model" in hard, "threads" in hard, "torch" in hard, soft) == (True, True, True, "")
    hard, soft = strays("samples")
    assert ("model" in hard, "threads" in hard, "threads" in soft, "torch" in soft) == (True, False, True, True)
    assert SOFT not in soft


def test_promises() -> None:
    cpu, gpu = True, False
    fast = read_settings(4, 7, None, "fast", {})
    shrink = read_settings(4, 7, "shrink", None, {})
    assert promise.choose(None, SETTINGS, cpu) == "bits"
    assert [promise.choose(None, each, cpu) for each in (fast, shrink)] == ["samples"] * 2
    assert promise.choose(None, SETTINGS, gpu) == "samples"
    assert promise.choose("bits", SETTINGS, gpu) == "bits"
    with pytest.raises(UsageError, match="needs another reduction than 'fast'"):
        promise.choose("bits", fast, cpu)
    with pytest.raises(UsageError, match="unknown exact='most'; known: bits, samples"):
        promise.choose("most", SETTINGS, cpu)


SCRIPT = """
from torch import nn
from planaria.torch.fingerprint import fingerprint
from planaria.rank.settings import read_settings
from planaria.torch.state import ProtectedState
for item in fingerprint(ProtectedState(m=nn.Linear(1, 1)), read_settings(1, 0, None, None, {}), "bits"):
    print(*item, sep="=")
"""


def test_the_environment_of_kernels() -> None:
    """Read by libraries when they start, so in a process of its own."""
    environ = os.environ | {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=True)
    told = dict(line.split("=", 1) for line in run.stdout.splitlines())
    assert told["cpu_capability"] in ("DEFAULT", "NO AVX")
    assert told["mkl_cbwr"] == "COMPATIBLE"
    assert "ONEDNN_MAX_CPU_ISA=SSE41" in told["onednn"]
