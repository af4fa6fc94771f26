"""Having torch let go of the backends of a process group, which it keeps until the group itself is gone.

A process group outlives its backends here (see ``ingroup``), and each that is left behind keeps its threads, files and
connections to stores: some nine files and six threads for every rank that was ever lost. What torch does when a process
group ends is ``ProcessGroup::release_resources``, a public member of its C++ class without arguments that Python is not
given. It is called here, on the object to which pybind11's conduit for other extension modules points.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
_RELEASE = "_ZN4c10d12ProcessGroup17release_resourcesEv"
_KIND = "_ZTIN4c10d12ProcessGroupE"  # its std::type_info
# Both are how pybind11 makes sure that caller and callee were built alike (pybind11/conduit).
_BUILT = b"system_libstdcpp_gxx_abi_1xxx_use_cxx11_abi_1"
_TYPE_INFO = b"St9type_info"


@functools.cache
def _found() -> tuple[Callable[[int], None], Any, Callable[[Any], int]] | None:
    """(release, the capsule that says what is asked for, address in a capsule), None if this torch has them not."""
    try:
        library = ctypes.CDLL(str(_LIBRARY))
        release = library[_RELEASE]
        kind = ctypes.addressof(ctypes.c_char.in_dll(library, _KIND))
    except (OSError, AttributeError, ValueError):
        return None
    release.argtypes, release.restype = [ctypes.c_void_p], None
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
        ("PyCapsule_New", ctypes.pythonapi)
    )
    name = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
    read = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    return release, make(kind, _TYPE_INFO, None), lambda capsule: int(read(capsule, name(capsule)))


def let_go(group: Any) -> bool:
    """Have ``group`` drop its store and backends; those that nobody else refers to end, which may block for as long as
    they are in use. False if this torch offers no way: then it still has them."""
    if (found := _found()) is None or not hasattr(group, "_pybind11_conduit_v1_"):
        return False
    release, asked, address = found
    if (capsule := group._pybind11_conduit_v1_(_BUILT, asked, b"raw_pointer_ephemeral")) is None:
        return False
    release(address(capsule))
    return True
