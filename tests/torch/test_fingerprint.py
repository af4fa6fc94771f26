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

from planaria.torch.fingerprint import explain, fingerprint
from planaria.torch.settings import Settings, read_settings
from planaria.torch.state import ProtectedState

SETTINGS = read_settings(4, 7, None, None, {})


def now(model: nn.Module | None = None, settings: Settings = SETTINGS, **more: str) -> tuple[tuple[str, str], ...]:
    return fingerprint(ProtectedState(model=model or nn.Linear(2, 3)), settings, **more)


def test_sorted_strings_and_the_same_every_time() -> None:
    first = now()
    assert first == now() and list(first) == sorted(first)
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in first)
    assert explain(first, now()) == []


def test_values_of_parameters_do_not_matter_but_their_kind_does() -> None:
    first = now(nn.Linear(2, 3))
    assert now(nn.Linear(2, 3)) == first
    for other in (
        nn.Linear(2, 4),
        nn.Linear(2, 3).double(),
        nn.Linear(2, 3, bias=False),
        nn.Sequential(nn.Linear(2, 3)),
    ):
        (sentence,) = explain(first, now(other))
        assert sentence.startswith("the model (names, dtypes and shapes of its tensors) is ")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"shards": 5}, "the number of shards is 4 here but 5 there; give all groups the same"),
        ({"seed": 8}, "the seed is 7 here but 8 there; give all groups the same"),
        ({"reduction": "fast"}, "the reduction is tree here but fast there; give all groups the same"),
    ],
)
def test_settings(change: dict[str, Any], sentence: str) -> None:
    assert explain(now(), now(settings=dataclasses.replace(SETTINGS, **change))) == [sentence]


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
    assert explain(before, after) == [
        "torch.get_default_dtype() is float32 here but float64 there; set it alike in the script",
        "torch.use_deterministic_algorithms is off here but warn only there; set it alike in the script",
        "torch.get_float32_matmul_precision() is highest here but medium there; set it alike in the script",
        f"torch's thread count is {threads} here but {threads + 1} there; set OMP_NUM_THREADS alike for all groups",
    ]


def test_what_only_the_caller_knows() -> None:
    assert explain(now(batch="8"), now()) == ["batch is 8 here but not told there; make them alike"]


def test_empty_values_read_as_not_set() -> None:
    assert explain((("mkl_cbwr", ""),), (("mkl_cbwr", "AVX2"),)) == [
        "MKL_CBWR is not set here but AVX2 there; set it alike for all groups"
    ]


SCRIPT = """
from torch import nn
from planaria.torch.fingerprint import fingerprint
from planaria.torch.settings import read_settings
from planaria.torch.state import ProtectedState
for item in fingerprint(ProtectedState(m=nn.Linear(1, 1)), read_settings(1, 0, None, None, {})):
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
