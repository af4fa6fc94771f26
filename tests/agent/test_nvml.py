"""What NVML says, on a machine with an NVIDIA GPU and ``nvidia-ml-py``."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from planaria.agent.nvml import Nvml
from planaria.core.health import SIGNALS

from .conftest import SCRIPTS, Run, plain_environ

pynvml = pytest.importorskip("pynvml")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="no NVIDIA GPU")]

# A store to an address that nobody has: an MMU fault, Xid 31 or 13, which ends this program's context and no more.
FAULT = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry fault() {
    .reg .b64 %where;
    .reg .b32 %what;
    mov.u64 %where, 16;
    mov.u32 %what, 0;
    st.global.u32 [%where], %what;
    ret;
}
"""


def make_a_fault() -> None:
    """On the first GPU, in this process."""
    cuda, at = ctypes.CDLL("libcuda.so.1"), ctypes.byref
    device, context, module, kernel = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDeviceGet(at(device), 0) == 0
    assert cuda.cuCtxCreate_v2(at(context), 0, device) == 0
    assert cuda.cuModuleLoadData(at(module), FAULT) == 0
    assert cuda.cuModuleGetFunction(at(kernel), module, b"fault") == 0
    assert cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None) == 0
    assert cuda.cuCtxSynchronize() != 0, "the fault was not one"


def test_a_gpu_that_is_well() -> None:
    nvml = Nvml(["0"])
    began = time.monotonic()
    readings = {reading.signal: reading.value for reading in nvml.read(0.0)}
    print(f"read in {time.monotonic() - began:.4f} s: {readings}; {nvml.missing}")
    assert set(readings) <= set(SIGNALS)
    assert readings["gpu_lost"] == 0 and 5 < readings["temperature"] < 110
    assert readings.get("ecc_uncorrectable", 0) == 0 == readings.get("remap_failed", 0)
    assert readings["thermal"] in (0, 1)


def test_gpus_by_name() -> None:
    nvml = Nvml(["0"])
    uuid = pynvml.nvmlDeviceGetUUID(nvml._handles["0"])
    named = Nvml([uuid, uuid[:12], "GPU-no-such", "77"])
    assert named.missing == ["NVML knows no GPU GPU-no-such, 77: its health is not read"]
    assert {reading.device for reading in named.read(0.0)} == {uuid, uuid[:12]}


def test_xid_errors_are_heard() -> None:
    nvml = Nvml(["0"])
    if any("Xid" in sentence for sentence in nvml.missing):
        pytest.skip(nvml.missing[0])
    here = os.path.dirname(os.path.abspath(__file__))
    command = [sys.executable, "-c", "from tests.agent.test_nvml import make_a_fault; make_a_fault()"]
    subprocess.run(command, check=True, cwd=os.path.dirname(os.path.dirname(here)), timeout=60)
    readings = {reading.signal: reading for reading in nvml.read(2.0)}
    print(readings["xid"], readings["xid_other"])
    assert readings["xid_other"].value >= 1 and readings["xid"].value == 0
    assert readings["xid_other"].text in ("the newest is Xid 31", "the newest is Xid 13")


def test_a_run_watches_its_gpus(start_run: Callable[..., Run]) -> None:
    uuid = pynvml.nvmlDeviceGetUUID(Nvml(["0"])._handles["0"])[:12]
    run = start_run(
        *("--groups", "1", "--health", "rules.toml", "--health-dry-run"),
        *(str(SCRIPTS / "speaker.py"), "100000", "0.01"),
        environ=plain_environ(CUDA_VISIBLE_DEVICES=uuid),
        files={"rules.toml": "every = 0.5\n[rules.any]\nsignal = 'temperature'\nabove = 0\naction = 'drain'\n"},
    )
    run.until(lambda: run.events("health"))
    (event,) = run.events("health")
    print(event["text"])
    assert event["text"].startswith(f"group 0: {uuid} has ") and event["text"].endswith(": would be drained (dry run)")
    run.interrupt()
    assert run.wait() == 130
