"""What amdgpu's files say, in the form in which the kernel's documentation has them."""

from __future__ import annotations

import shutil
from pathlib import Path

from planaria.agent.amdgpu import NODES, AmdGpus

UNIQUE = 0x18F68F6B7A2C11D3


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def node_of(sys: Path) -> Path:
    """One CPU and two GPUs, of which the second counts more. Returns the second's files."""
    write(sys / NODES / "0/properties", "cpu_cores_count 64\nsimd_count 0\n")
    write(sys / NODES / "10/properties", f"simd_count 416\nunique_id {UNIQUE}\ndrm_render_minor 129\n")
    write(sys / NODES / "2/properties", "simd_count 416\nunique_id 0\ndrm_render_minor 128\n")
    for minor in (128, 129):
        device = sys / f"class/drm/renderD{minor}/device"
        write(device / "vendor", "0x1002\n")
        write(device / "ras/umc_err_count", "ue: 0\nce: 7\nde: 1\n")
        write(device / "ras/gfx_err_count", "ue: 0\nce: 0\n")
    second = sys / "class/drm/renderD129/device"
    write(second / "ras/gfx_err_count", "ue: 2\nce: 1\n")
    write(second / "ras/xgmi_wafl_err_count", "ue: 0\nce: 5\n")
    write(second / "ras/gpu_vram_bad_pages", "0x00000001 : 0x00001000 : R\n0x00000002 : 0x00001000 : P\n")
    write(second / "pcie_replay_count", "3\n")
    write(second / "hwmon/hwmon4/temp1_input", "61000\n")
    write(second / "hwmon/hwmon4/temp2_input", "105000\n")
    write(second / "hwmon/hwmon4/temp2_crit", "105000\n")
    return second


def test_gpus_are_found_and_read(tmp_path: Path) -> None:
    second = node_of(tmp_path)
    assert AmdGpus.here(tmp_path) and not AmdGpus.here(tmp_path / "elsewhere")
    write(tmp_path / NODES / "11/properties", "simd_count 416\nunique_id 0\ndrm_render_minor 130\n")  # a partition
    (tmp_path / "class/drm/renderD130/device").mkdir(parents=True)
    gpus = AmdGpus(["0", f"GPU-{UNIQUE:016x}", "2", "7"], tmp_path)
    assert gpus.missing == ["the driver says nothing of GPU 2, 7: its health is not read"]
    readings = gpus.read(0.0)
    of = {gpu: {r.signal: r.value for r in readings if r.device == gpu} for gpu in ("0", f"GPU-{UNIQUE:016x}")}
    assert of["0"] == {"gpu_lost": 0, "ecc_uncorrectable": 0, "ecc_correctable": 7}
    assert of[f"GPU-{UNIQUE:016x}"] == {
        "gpu_lost": 0,
        "ecc_uncorrectable": 2,
        "ecc_correctable": 13,
        "nvlink_errors": 5,
        "remap_pending": 1,
        "remap_failed": 0,
        "pcie_replays": 3,
        "temperature": 105,
        "thermal": 1,
    }
    assert next(r.text for r in readings if r.signal == "ecc_uncorrectable" and r.value) == "in gfx"
    write(second / "ras/gpu_vram_bad_pages", "what is this")
    write(second / "ras/gfx_err_count", "\xff not a count\n")
    assert AmdGpus(["1"], tmp_path).read(0.0)[1].value == 0
    shutil.rmtree(second)
    assert [(r.signal, r.value) for r in gpus.read(0.0) if r.device != "0"] == [("gpu_lost", 1)]
