"""What NVML says of the GPUs of this node. Needs ``nvidia-ml-py`` (``planaria[health]``), and runs in a sensor."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from planaria.core.health import Reading

# Of https://docs.nvidia.com/deploy/xid-errors: those whose cause is the GPU, its memory, its links or its firmware. 13,
# 31, 43 and 45 come from programs, and others may.
HARDWARE_XIDS = frozenset({48, 62, 64, 74, 79, 94, 95, 110, 119, 120, 140})
# Totals over all links, of the older kinds of counters (which newer GPUs still fill) and the newer ones.
_LINK_ERRORS = (
    "NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
    "NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    "NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
)


class Unreadable(Exception):
    """NVML is not there, or answers nothing. A sentence for people."""


class Nvml:
    """``gpus`` as CUDA_VISIBLE_DEVICES names them: numbers, or (beginnings of) the names of GPUs and MIG devices.

    What a GPU does not support is left out, and so is not judged. ``missing`` has sentences about what that may be.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        """Unreadable if it cannot be used at all."""
        try:
            import pynvml
        except ImportError:
            raise Unreadable(
                "the GPUs' signs of health are not read: nvidia-ml-py is not installed (pip install planaria[health])"
            ) from None
        self._nvml: Any = pynvml
        self.missing: list[str] = []
        self._xids: dict[str, dict[str, list[int]]] = {}  # of each GPU and signal, in order
        self._links: dict[str, set[int]] = {}  # that were up at first sight
        try:
            pynvml.nvmlInit()
            self._handles = {gpu: handle for gpu in gpus if (handle := self._handle(gpu)) is not None}
        except pynvml.NVMLError as error:
            raise Unreadable(f"the GPUs' signs of health are not read: NVML says {error}") from None
        if lost := [gpu for gpu in gpus if gpu not in self._handles]:
            self.missing.append(f"NVML knows no GPU {', '.join(lost)}: its health is not read")
        for gpu, handle in self._handles.items():
            self._links[gpu] = set(self._links_up(handle))
        self._events = self._listen()

    def read(self, seconds: float) -> list[Reading]:
        """Listen for Xid errors for so long, then read everything else once."""
        self._hear(time.monotonic() + seconds)
        return [reading for gpu, handle in self._handles.items() for reading in self._of(gpu, handle)]

    def _of(self, gpu: str, handle: Any) -> Iterator[Reading]:
        n = self._nvml
        try:
            n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU)
        except n.NVMLError as error:
            lost = error.value in (n.NVML_ERROR_GPU_IS_LOST, n.NVML_ERROR_RESET_REQUIRED)
            if lost:
                yield Reading("gpu_lost", 1.0, gpu, text=str(error))
                return
        yield Reading("gpu_lost", 0.0, gpu)
        if self._events is not None:
            for signal, numbers in self._xids[gpu].items():
                text = f"the newest is Xid {numbers[-1]}" if numbers else ""
                yield Reading(signal, float(len(numbers)), gpu, text=text)
        if (throttled := self._get(n.nvmlDeviceGetCurrentClocksEventReasons, handle)) is not None:
            hot = n.nvmlClocksEventReasonSwThermalSlowdown | n.nvmlClocksEventReasonHwThermalSlowdown
            yield Reading("thermal", float(bool(throttled & hot)), gpu)
            yield Reading("power_brake", float(bool(throttled & n.nvmlClocksEventReasonHwPowerBrakeSlowdown)), gpu)
        if (rows := self._get(n.nvmlDeviceGetRemappedRows, handle)) is not None:
            yield Reading("remap_pending", float(rows[2]), gpu)
            yield Reading("remap_failed", float(rows[3]), gpu)
        kinds = {
            "uncorrectable": n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            "correctable": n.NVML_MEMORY_ERROR_TYPE_CORRECTED,
        }
        for kind, number in kinds.items():
            if (count := self._get(n.nvmlDeviceGetTotalEccErrors, handle, number, n.NVML_VOLATILE_ECC)) is not None:
                yield Reading(f"ecc_{kind}", float(count), gpu)
        simple = {
            "temperature": (n.nvmlDeviceGetTemperature, n.NVML_TEMPERATURE_GPU),
            "pcie_replays": (n.nvmlDeviceGetPcieReplayCounter,),
        }
        for signal, (question, *words) in simple.items():
            if (value := self._get(question, handle, *words)) is not None:
                yield Reading(signal, float(value), gpu)
        for action in self._fields(handle, ["NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"]):
            yield Reading("reset_wanted", float(action), gpu)
        if self._links[gpu]:
            yield Reading("nvlink_down", float(len(self._links[gpu] - set(self._links_up(handle)))), gpu)
            if errors := self._fields(handle, _LINK_ERRORS):
                yield Reading("nvlink_errors", float(sum(errors)), gpu)

    def _handle(self, gpu: str) -> Any:
        """None if there is none of that name. Numbers are NVML's: they are CUDA's if all GPUs of a node are alike."""
        n = self._nvml
        if gpu.isdecimal():
            return self._get(n.nvmlDeviceGetHandleByIndex, int(gpu))
        if gpu.startswith("MIG"):
            part = self._get(n.nvmlDeviceGetHandleByUUID, gpu)
            return None if part is None else self._get(n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, part)
        for index in range(n.nvmlDeviceGetCount()):
            handle = self._get(n.nvmlDeviceGetHandleByIndex, index)
            if handle is not None and str(self._get(n.nvmlDeviceGetUUID, handle)).startswith(gpu):
                return handle
        return None

    def _get(self, question: Callable[..., Any], *words: Any) -> Any:
        """None if it is not supported, or cannot be said now."""
        try:
            return question(*words)
        except self._nvml.NVMLError:
            return None

    def _fields(self, handle: Any, names: Sequence[str]) -> list[int]:
        """The values of those of the fields that this GPU, this driver and this nvidia-ml-py know."""
        n = self._nvml
        ids = [getattr(n, name) for name in names if hasattr(n, name)]
        values = self._get(n.nvmlDeviceGetFieldValues, handle, ids) or []
        return [_number(n, value) for value in values if value.nvmlReturn == n.NVML_SUCCESS]

    def _links_up(self, handle: Any) -> Iterator[int]:
        n = self._nvml
        for link in range(n.NVML_NVLINK_MAX_LINKS):
            if self._get(n.nvmlDeviceGetNvLinkState, handle, link) == n.NVML_FEATURE_ENABLED:
                yield link

    # --- Xid errors, which NVML tells only to those who listen ------------------------------------------------

    def _listen(self) -> Any:
        n = self._nvml
        try:
            events = n.nvmlEventSetCreate()
            for gpu, handle in self._handles.items():
                n.nvmlDeviceRegisterEvents(handle, n.nvmlEventTypeXidCriticalError, events)
                self._xids[gpu] = {"xid": [], "xid_other": []}
        except n.NVMLError as error:
            self.missing.append(f"Xid errors are not seen: NVML says {error}")
            return None
        return events

    def _hear(self, until: float) -> None:
        n = self._nvml
        while (left := until - time.monotonic()) > 0:
            if self._events is None:
                time.sleep(left)
                return
            try:
                event = n.nvmlEventSetWait_v2(self._events, max(1, int(left * 1000)))
            except n.NVMLError as error:
                if error.value != n.NVML_ERROR_TIMEOUT:
                    time.sleep(min(left, 0.1))  # a GPU is lost: the next reading tells which
                continue
            self._note_xid(event)

    def _note_xid(self, event: Any) -> None:
        number = int(event.eventData)
        for gpu, handle in self._handles.items():
            if _address(handle) == _address(event.device):  # the name of a GPU that is lost cannot be asked for
                self._xids[gpu]["xid" if number in HARDWARE_XIDS else "xid_other"].append(number)


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _number(nvml: Any, value: Any) -> int:
    """Of one of the fields above, all of which are whole numbers."""
    names = {
        nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
        nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    }
    return int(getattr(value.value, names.get(value.valueType, "uiVal")))
