"""What the kernel's driver says of AMD's GPUs on this node: files, so nothing needs to be installed. Runs in a sensor.

Of https://docs.kernel.org/gpu/amdgpu (RAS error counts, bad pages, hwmon, PCIe replays). Not yet read on a real one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from planaria.core.health import Reading

NODES = "class/kfd/kfd/topology/nodes"  # below /sys: processors as HIP counts them
_LINKS = "xgmi_wafl"  # the block whose errors are those of links


class AmdGpus:
    """``gpus`` as HIP_VISIBLE_DEVICES names them: numbers, or "GPU-" and the unique id in hexadecimal.

    What a GPU does not support is left out, and so is not judged. ``missing`` has sentences about what that may be.
    """

    def __init__(self, gpus: Sequence[str], sys: Path = Path("/sys")) -> None:
        # The parts of one that is partitioned are devices of their own, of which there are no such files.
        known = {gpu: place for gpu, place in _devices(sys).items() if _is_there(place)}
        self._places = {gpu: known[gpu] for gpu in gpus if gpu in known}
        lost = [gpu for gpu in gpus if gpu not in known]
        self.missing = [f"the driver says nothing of GPU {', '.join(lost)}: its health is not read"] if lost else []

    @staticmethod
    def here(sys: Path = Path("/sys")) -> bool:
        """Whether this node has any."""
        return (sys / NODES).is_dir() and bool(_devices(sys))

    def read(self, seconds: float) -> list[Reading]:
        """Wait for so long, then read everything once."""
        time.sleep(seconds)
        return [reading for gpu, place in self._places.items() for reading in _of(gpu, place)]


def _devices(sys: Path) -> dict[str, Path]:
    """By every name that HIP_VISIBLE_DEVICES may have for it, where the driver's files about a GPU are."""
    found: dict[str, Path] = {}
    number = 0
    for node in sorted((sys / NODES).glob("*"), key=lambda path: int(path.name) if path.name.isdecimal() else -1):
        facts = dict(line.split(" ", 1) for line in _text(node / "properties").splitlines() if " " in line)
        if not int(facts.get("simd_count", "0")):
            continue  # a CPU
        place = sys / "class/drm" / f"renderD{facts.get('drm_render_minor', '')}" / "device"
        found[str(number)] = place
        if unique := int(facts.get("unique_id", "0")):
            found[f"GPU-{unique:016x}"] = place
        number += 1
    return found


def _is_there(place: Path) -> bool:
    return (place / "vendor").exists()


def _of(gpu: str, place: Path) -> Iterator[Reading]:
    gone = not _is_there(place)
    yield Reading("gpu_lost", float(gone), gpu, text="the driver has let go of it" if gone else "")
    if gone:
        return
    blocks = {path.name.removesuffix("_err_count"): _counts(path) for path in (place / "ras").glob("*_err_count")}
    for signal, key in (("ecc_uncorrectable", "ue"), ("ecc_correctable", "ce")):
        counts = {name: block[key] for name, block in blocks.items() if key in block}
        if counts:
            text = ", ".join(sorted(name for name, count in counts.items() if count))
            yield Reading(signal, float(sum(counts.values())), gpu, text=f"in {text}" if text else "")
    if _LINKS in blocks:
        yield Reading("nvlink_errors", float(sum(blocks[_LINKS].values())), gpu, text="XGMI")
    if (place / "ras/gpu_vram_bad_pages").exists():
        # "page number : page size : flag", the flag being R (reserved), P (will be), F (cannot be).
        flags = [line.rpartition(":")[2].strip() for line in _text(place / "ras/gpu_vram_bad_pages").splitlines()]
        yield Reading("remap_pending", float(flags.count("P")), gpu)
        yield Reading("remap_failed", float(flags.count("F")), gpu)
    if (replays := _number(place / "pcie_replay_count")) is not None:
        yield Reading("pcie_replays", float(replays), gpu)
    yield from _heat(gpu, place)


def _heat(gpu: str, place: Path) -> Iterator[Reading]:
    """The hottest of its sensors, and whether any is at the temperature at which clocks are lowered."""
    hot, degrees = False, list[float]()
    for path in place.glob("hwmon/hwmon*/temp*_input"):
        value = _number(path)
        critical = _number(path.with_name(path.name.replace("_input", "_crit")))
        if value is not None:
            degrees.append(value / 1000)
            hot = hot or (critical is not None and 0 < critical <= value)
    if degrees:
        yield Reading("temperature", max(degrees), gpu)
        yield Reading("thermal", float(hot), gpu)


def _counts(path: Path) -> dict[str, int]:
    """Of "ue: 0", a line for each kind."""
    return {key: int(count) for key, count in re.findall(r"^(\w+):\s*([0-9]+)$", _text(path), re.MULTILINE)}


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else None


def _text(path: Path) -> str:
    """Empty if it is not there, or cannot be said now."""
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text()
    return ""
