"""What another process needs to open an allocation of this one on a GPU. No pickle, nothing of torch's own sharing."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final, NamedTuple

from kvstored_client.cuda_driver import CudaDriver, CudaFailed

PROBE_BYTES: Final = 256
_HANDLE_BYTES: Final = 64
_IPC_CAPABLE: Final = 10
_BY_DESCRIPTOR: Final = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_NOT_SUPPORTED: Final = 801
_KERNEL: Final = Path("/proc/sys/kernel/osrelease")


class NotExportable(Exception):
    """The memory cannot be opened by others; the text says why."""


class Allocation(NamedTuple):
    """An allocation on a device, and how to open it."""

    handle: bytes
    base: int
    size_bytes: int


class Chunk(NamedTuple):
    """A piece of memory that its allocator made by chunks, and a descriptor by which others map it."""

    fd: int
    base: int
    size_bytes: int


class Exporter:
    """Handles of this process's allocations. Raises NotExportable from all calls."""

    def __init__(self) -> None:
        try:
            self._driver = CudaDriver()
        except CudaFailed as error:
            raise NotExportable(str(error)) from error

    def device_of(self, pointer: int) -> tuple[int, bytes]:
        """Ordinal and UUID of the device that has the memory."""
        try:
            ordinal = self._driver.ordinal_of(pointer)
            return ordinal, self._driver.uuid_of(ordinal)
        except CudaFailed as error:
            raise NotExportable(str(error)) from error

    def has_handles(self, pointer: int) -> bool:
        """Whether its allocation has an IPC handle; else it is made by chunks."""
        capable = ctypes.c_uint()
        try:
            with self._driver.bound(self._driver.ordinal_of(pointer)):
                self._driver.call(
                    "cuPointerGetAttribute", ctypes.byref(capable), _IPC_CAPABLE, ctypes.c_uint64(pointer)
                )
        except CudaFailed as error:
            raise NotExportable(str(error)) from error
        return bool(capable.value)

    def chunks_of(self, pointer: int, size_bytes: int, known: dict[int, Chunk]) -> None:
        """Add the chunks that a range lies in to `known`, by their start; the caller closes their descriptors."""
        at = pointer
        try:
            with self._driver.bound(self._driver.ordinal_of(pointer)):
                while at < pointer + size_bytes:
                    base, size = self._range_of(at)
                    if base not in known:
                        known[base] = Chunk(self._descriptor_of(base), base, size)
                    at = base + size
        except CudaFailed as error:
            raise NotExportable(
                f"the allocator's memory has no IPC handles (expandable segments), and {error}"
            ) from error

    def _range_of(self, pointer: int) -> tuple[int, int]:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        at = ctypes.c_uint64(pointer)
        self._driver.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), at)
        return base.value, size.value

    def _descriptor_of(self, base: int) -> int:
        retained, fd = ctypes.c_uint64(), ctypes.c_int()
        self._driver.call("cuMemRetainAllocationHandle", ctypes.byref(retained), ctypes.c_void_p(base))
        try:
            none = ctypes.c_uint64(0)
            self._driver.call("cuMemExportToShareableHandle", ctypes.byref(fd), retained, _BY_DESCRIPTOR, none)
        finally:
            self._driver.call("cuMemRelease", retained)
        return fd.value

    def allocation_of(self, pointer: int) -> Allocation:
        """The allocation that a pointer is in."""
        try:
            with self._driver.bound(self._driver.ordinal_of(pointer)):
                return self._allocation_of(pointer)
        except CudaFailed as error:
            raise NotExportable(_explained(error)) from error

    def _allocation_of(self, pointer: int) -> Allocation:
        base, size = self._range_of(pointer)
        handle = (ctypes.c_ubyte * _HANDLE_BYTES)()
        self._driver.call("cuIpcGetMemHandle", handle, ctypes.c_uint64(base))
        return Allocation(bytes(handle), base, size)

    def read(self, pointer: int, size_bytes: int) -> bytes:
        """Bytes of the device's memory."""
        seen = ctypes.create_string_buffer(size_bytes)
        try:
            with self._driver.bound(self._driver.ordinal_of(pointer)):
                self._driver.call("cuMemcpyDtoH_v2", seen, ctypes.c_uint64(pointer), ctypes.c_size_t(size_bytes))
        except CudaFailed as error:
            raise NotExportable(str(error)) from error
        return seen.raw


def _explained(error: CudaFailed) -> str:
    if error.code != _NOT_SUPPORTED:
        return str(error)
    try:
        where = "WSL" if "microsoft" in _KERNEL.read_text().lower() else "part of a GPU (MIG), or under WSL"
    except OSError:
        where = "part of a GPU (MIG), or under WSL"
    return f"{error}: there is no CUDA IPC on {where}"
