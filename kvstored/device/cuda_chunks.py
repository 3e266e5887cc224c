"""Memory of a device that is made by chunks (cuMemCreate), as torch's expandable segments are: mapped side by side.

Such memory has no IPC handles. Each chunk is shared by a descriptor, whoever may have it, and mapped into address
space that is reserved here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvstored.device.cuda import CudaError, Driver

_PINNED: Final = 1
_ON_DEVICE: Final = 1
_BY_DESCRIPTOR: Final = 1
_READ_WRITE: Final = 3


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp: kind, kinds of handles, place of two ints, a pointer for Windows, flags."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("place", ctypes.c_int * 2),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc: place of two ints, what is allowed."""

    _fields_ = (("place", ctypes.c_int * 2), ("flags", ctypes.c_int))


class Mapped(NamedTuple):
    """Chunks, one after the other."""

    pointer: int
    size_bytes: int


def made(driver: Driver, sizes: Sequence[int], *, exportable: bool = True) -> Mapped:
    """New chunks, mapped: what an allocator of this kind gives. For tests. Raises CudaError."""
    place = (ctypes.c_int * 2)(_ON_DEVICE, _ordinal(driver))
    wanted = AllocationProperties(_PINNED, _BY_DESCRIPTOR if exportable else 0, place)
    handles = []
    for size in sizes:
        handle = ctypes.c_uint64()
        driver.call("cuMemCreate", ctypes.byref(handle), size, ctypes.addressof(wanted), 0)
        handles.append(handle.value)
    return _mapped(driver, handles, sizes)


def imported(driver: Driver, descriptors: Sequence[int], sizes: Sequence[int]) -> Mapped:
    """Another process's chunks. The descriptors stay open and are not needed any more. Raises CudaError."""
    handles: list[int] = []
    try:
        for fd in descriptors:
            handle = ctypes.c_uint64()
            driver.call("cuMemImportFromShareableHandle", ctypes.byref(handle), fd, _BY_DESCRIPTOR)
            handles.append(handle.value)
    except CudaError:
        _release(driver, handles)
        raise
    return _mapped(driver, handles, sizes)


def _mapped(driver: Driver, handles: Sequence[int], sizes: Sequence[int]) -> Mapped:
    """Map side by side; the mappings alone hold the chunks then."""
    at, total = ctypes.c_uint64(), sum(sizes)
    done = 0
    try:
        driver.call("cuMemAddressReserve", ctypes.byref(at), total, 0, 0, 0)
        for handle, size in zip(handles, sizes, strict=True):
            driver.call("cuMemMap", at.value + done, size, 0, handle, 0)
            done += size
        access = AccessDescription((ctypes.c_int * 2)(_ON_DEVICE, _ordinal(driver)), _READ_WRITE)
        driver.call("cuMemSetAccess", at.value, total, ctypes.addressof(access), 1)
    except CudaError:
        if done:
            driver.call("cuMemUnmap", at.value, done)
        if at.value:
            driver.call("cuMemAddressFree", at.value, total)
        raise
    finally:
        _release(driver, handles)
    return Mapped(at.value, total)


def unmap(driver: Driver, mapped: Mapped) -> None:
    """Let go of them. No copy may use them. Raises CudaError."""
    driver.call("cuMemUnmap", *mapped)
    driver.call("cuMemAddressFree", *mapped)


def _release(driver: Driver, handles: Sequence[int]) -> None:
    for handle in handles:
        driver.call("cuMemRelease", handle)


def _ordinal(driver: Driver) -> int:
    """The device of this thread's context."""
    ordinal = ctypes.c_int()
    driver.call("cuCtxGetDevice", ctypes.byref(ordinal))
    return ordinal.value
