"""The documented CUDA driver API (libcuda.so.1), as far as the device worker uses it, by ctypes.

Only the worker's process may import this: the daemon itself never maps the driver. No CUDA runtime,
no torch, cupy or cuda-bindings is needed. Every call releases the GIL. Pointers of the device are
plain integers, lists of them numpy arrays of uint64, which the driver reads as they are.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Final

from kvstored_proto.cuda_copies import Copies, CopyFailed, Pointers

from kvstored.device.doorbell import Doorbell

LIBRARY_VARIABLE: Final = "KVSTORED_LIBCUDA"  # instead of libcuda.so.1
REGISTER_BYTES_MAX: Final = 64 << 30  # in one call: drivers refuse half a TiB
IPC_HANDLE_BYTES: Final = 64
UUID_BYTES: Final = 16

NOT_READY: Final = 600
_HOST_REGISTER_PORTABLE_MAPPED: Final = 3  # usable in all contexts, and by kernels
_STREAM_NON_BLOCKING: Final = 1
_EVENT_NO_TIMING: Final = 2
_IPC_LAZY_PEER_ACCESS: Final = 1
_HOST_NUMA_ID: Final = 134

_int, _unsigned, _u64, _size, _pointer = (
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_uint64,
    ctypes.c_size_t,
    ctypes.c_void_p,
)
_ref = ctypes.POINTER


class _Bytes16(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * UUID_BYTES),)


class _Bytes64(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * IPC_HANDLE_BYTES),)


# Name -> version of the interface that is asked for, types of the arguments.
_FUNCTIONS: Final[dict[str, tuple[int, tuple[Any, ...]]]] = {
    "cuInit": (2000, (_unsigned,)),
    "cuDeviceGetCount": (2000, (_ref(_int),)),
    "cuDeviceGet": (2000, (_ref(_int), _int)),
    "cuDeviceGetName": (2000, (ctypes.c_char_p, _int, _int)),
    "cuDeviceGetPCIBusId": (4010, (ctypes.c_char_p, _int, _int)),
    "cuDeviceGetUuid": (11040, (_ref(_Bytes16), _int)),
    "cuDeviceGetAttribute": (2000, (_ref(_int), _int, _int)),
    "cuDevicePrimaryCtxRetain": (7000, (_ref(_pointer), _int)),
    "cuCtxSetCurrent": (4000, (_pointer,)),
    "cuGetErrorName": (6000, (_int, _ref(ctypes.c_char_p))),
    "cuMemGetInfo": (3020, (_ref(_size), _ref(_size))),
    "cuMemAlloc": (3020, (_ref(_u64), _size)),
    "cuMemFree": (3020, (_u64,)),
    "cuMemGetAddressRange": (3020, (_ref(_u64), _ref(_size), _u64)),
    "cuMemHostRegister": (6050, (_pointer, _size, _unsigned)),
    "cuMemHostUnregister": (4000, (_pointer,)),
    "cuMemcpyHtoD": (3020, (_u64, _pointer, _size)),
    "cuMemcpyDtoH": (3020, (_pointer, _u64, _size)),
    "cuStreamCreate": (2000, (_ref(_pointer), _unsigned)),
    "cuStreamSynchronize": (2000, (_pointer,)),
    "cuLaunchHostFunc": (10000, (_pointer, _pointer, _pointer)),
    "cuEventCreate": (2000, (_ref(_pointer), _unsigned)),
    "cuEventRecord": (2000, (_pointer, _pointer)),
    "cuEventQuery": (2000, (_pointer,)),
    "cuIpcGetMemHandle": (4010, (_ref(_Bytes64), _u64)),
    "cuIpcOpenMemHandle": (11000, (_ref(_u64), _Bytes64, _unsigned)),
    "cuIpcCloseMemHandle": (4010, (_u64,)),
    "cuModuleLoadData": (2000, (_ref(_pointer), ctypes.c_char_p)),
    "cuModuleGetFunction": (2000, (_ref(_pointer), _pointer, ctypes.c_char_p)),
    "cuLaunchKernel": (4000, (_pointer, *[_unsigned] * 7, _pointer, _pointer, _pointer)),
    "cuCtxGetDevice": (2000, (_ref(_int),)),
    "cuMemCreate": (10020, (_ref(_u64), _size, _pointer, _u64)),
    "cuMemRelease": (10020, (_u64,)),
    "cuMemAddressReserve": (10020, (_ref(_u64), _size, _size, _u64, _u64)),
    "cuMemAddressFree": (10020, (_u64, _size)),
    "cuMemMap": (10020, (_u64, _size, _size, _u64, _u64)),
    "cuMemUnmap": (10020, (_u64, _size)),
    "cuMemSetAccess": (10020, (_u64, _size, _pointer, _size)),
    "cuMemImportFromShareableHandle": (10020, (_ref(_u64), _pointer, _int)),
}


class CudaUnavailable(Exception):
    """There is no driver, no device, or not the one that is wanted."""


class CudaError(Exception):
    """A call failed. `code` is its CUresult."""

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"{function}: {name} ({code})")
        self.code = code


class Driver:
    """The loaded library. Calls raise CudaError; a thread must `bind` a device before it calls more than queries."""

    def __init__(self, library: str = "") -> None:
        """Load and initialise. Raises CudaUnavailable."""
        path = library or os.environ.get(LIBRARY_VARIABLE) or "libcuda.so.1"
        try:
            self._library = ctypes.CDLL(path)
            self._find = self._library.cuGetProcAddress_v2
        except (OSError, AttributeError) as error:
            raise CudaUnavailable(f"the CUDA driver cannot be loaded: {error}") from error
        self._find.argtypes = (ctypes.c_char_p, _ref(_pointer), _int, _u64, _ref(_int))
        version = _int()
        self._library.cuDriverGetVersion(ctypes.byref(version))
        self.version = version.value
        self._call: dict[str, Any] = {}
        for name, (since, types) in _FUNCTIONS.items():
            found = self._function(name, since, types)
            if found is None:
                raise CudaUnavailable(f"the CUDA driver {self.version} has no {name}: 12.0 or later is needed")
            self._call[name] = found
        self.copies = Copies(self._function, self.version)
        code = self._call["cuInit"](0)
        if code:
            raise CudaUnavailable(f"cuInit: {self.error_name(code)} ({code})")

    def _function(self, name: str, version: int, types: tuple[Any, ...]) -> Any:
        address, status = _pointer(), _int()
        if self._find(name.encode(), ctypes.byref(address), version, 0, ctypes.byref(status)) or not address.value:
            return None
        return ctypes.CFUNCTYPE(_int, *types)(address.value)

    def error_name(self, code: int) -> str:
        """The name of a CUresult."""
        name = ctypes.c_char_p()
        self._call["cuGetErrorName"](code, ctypes.byref(name))
        return (name.value or b"unknown error").decode()

    def call(self, name: str, *arguments: Any) -> None:
        """Any function of the table above. Raises CudaError."""
        code = self._call[name](*arguments)
        if code:
            raise CudaError(name, code, self.error_name(code))

    # ---- devices ----

    def device_uuids(self) -> list[bytes]:
        """Those that this process may use, by ordinal."""
        count = _int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        uuids = []
        for ordinal in range(count.value):
            uuid = _Bytes16()
            self.call("cuDeviceGetUuid", ctypes.byref(uuid), self._device(ordinal))
            uuids.append(bytes(uuid.data))
        return uuids

    def _device(self, ordinal: int) -> int:
        device = _int()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device.value

    def device_name(self, ordinal: int) -> str:
        """What the driver calls it."""
        name = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", name, len(name), self._device(ordinal))
        return name.value.decode(errors="replace")

    def attribute(self, ordinal: int, number: int, otherwise: int = 0) -> int:
        """An attribute of the device; `otherwise` where the driver does not say."""
        value = _int(otherwise)
        code = self._call["cuDeviceGetAttribute"](ctypes.byref(value), number, ordinal)
        return value.value if not code else otherwise

    def numa_node(self, ordinal: int) -> int:
        """The node of memory next to it; -1 where the driver does not say."""
        return self.attribute(ordinal, _HOST_NUMA_ID, -1)

    def pci_address(self, ordinal: int) -> str:
        """Where on the PCI bus it is, as `0000:3B:00.0`."""
        address = ctypes.create_string_buffer(32)
        self.call("cuDeviceGetPCIBusId", address, len(address), self._device(ordinal))
        return address.value.decode(errors="replace")

    def context(self, ordinal: int) -> int:
        """The device's primary context, for `bind`."""
        made = _pointer()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(made), self._device(ordinal))
        return made.value or 0

    def bind(self, context: int) -> None:
        """Make it this thread's; each thread must."""
        self.call("cuCtxSetCurrent", context)

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the device."""
        free, total = _size(), _size()
        self.call("cuMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    # ---- memory ----

    def allocate(self, size_bytes: int) -> int:
        """Device memory; what it holds is undefined."""
        made = _u64()
        self.call("cuMemAlloc", ctypes.byref(made), size_bytes)
        return made.value

    def free(self, pointer: int) -> None:
        """Give device memory back."""
        self.call("cuMemFree", pointer)

    def range_of(self, pointer: int) -> tuple[int, int]:
        """Start and size of the allocation that a device pointer is in."""
        base, size = _u64(), _size()
        self.call("cuMemGetAddressRange", ctypes.byref(base), ctypes.byref(size), pointer)
        return base.value, size.value

    def pin(self, address: int, size_bytes: int) -> None:
        """Register memory of this process, so that copies of it run by themselves."""
        self.call("cuMemHostRegister", address, size_bytes, _HOST_REGISTER_PORTABLE_MAPPED)

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        self.call("cuMemHostUnregister", address)

    def read(self, target: int, pointer: int, size_bytes: int) -> None:
        """Copy from the device to an address here, and wait for it."""
        self.call("cuMemcpyDtoH", target, pointer, size_bytes)

    def write(self, pointer: int, source: int, size_bytes: int) -> None:
        """Copy to the device from an address here, and wait for it."""
        self.call("cuMemcpyHtoD", pointer, source, size_bytes)

    def export(self, pointer: int) -> bytes:
        """The handle by which another process opens the allocation at `pointer`."""
        handle = _Bytes64()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        return bytes(handle.data)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; every open wants a close."""
        given, made = _Bytes64(), _u64()
        ctypes.memmove(ctypes.byref(given), handle, IPC_HANDLE_BYTES)
        self.call("cuIpcOpenMemHandle", ctypes.byref(made), given, _IPC_LAZY_PEER_ACCESS)
        return made.value

    def close(self, pointer: int) -> None:
        """Undo `open`."""
        self.call("cuIpcCloseMemHandle", pointer)

    # ---- streams ----

    def stream(self) -> int:
        """A stream that does not wait for the default one."""
        made = _pointer()
        self.call("cuStreamCreate", ctypes.byref(made), _STREAM_NON_BLOCKING)
        return made.value or 0

    def synchronize(self, stream: int) -> None:
        """Wait until all that was submitted to it has ended."""
        self.call("cuStreamSynchronize", stream)

    def event(self) -> int:
        """An event that is asked whether it has happened."""
        made = _pointer()
        self.call("cuEventCreate", ctypes.byref(made), _EVENT_NO_TIMING)
        return made.value or 0

    def record(self, event: int, stream: int) -> None:
        """The event happens when what was submitted to the stream so far has ended."""
        self.call("cuEventRecord", event, stream)

    def happened(self, event: int) -> bool:
        """Whether it has."""
        code: int = self._call["cuEventQuery"](event)
        if code not in (0, NOT_READY):
            raise CudaError("cuEventQuery", code, self.error_name(code))
        return code == 0

    def ring(self, stream: int, bell: Doorbell) -> None:
        """Ring when what was submitted to the stream so far has ended; where the context is lost it may not ring."""
        self.call("cuLaunchHostFunc", stream, bell.function, bell.argument)

    @property
    def batches(self) -> bool:
        """Whether one call submits many copies."""
        return self.copies.batches

    def copy(self, to: Pointers, source: Pointers, sizes: Pointers, stream: int, *, to_device: bool) -> None:
        """Submit copies to a stream (never the default one): all, or up to an error. Arrays are contiguous."""
        try:
            self.copies.submit(to, source, sizes, stream, to_device=to_device)
        except CopyFailed as failed:
            raise CudaError(failed.function, failed.code, self.error_name(failed.code)) from None
