"""The CUDA driver as the engine's process has it loaded: its devices, their primary contexts, and calls by name.

The engine's own state stays as it is: a thread's current context is put back after each use. Nothing is imported
for it, and nothing is loaded before an engine registers memory of a GPU.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

LIBRARY_VARIABLE: Final = "KVSTORED_LIBCUDA"  # instead of libcuda.so.1
_UUID_BYTES: Final = 16
_POINTER_DEVICE_ORDINAL: Final = 9


class CudaFailed(Exception):
    """There is no driver, or a call failed: `code` is its CUresult, 0 where there is none."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class CudaDriver:
    """The library. Raises CudaFailed from all calls."""

    def __init__(self) -> None:
        path = os.environ.get(LIBRARY_VARIABLE) or "libcuda.so.1"
        try:
            self._library: Any = ctypes.CDLL(path)
        except OSError as error:
            raise CudaFailed(f"the CUDA driver cannot be loaded: {error}") from error
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._retaining = threading.Lock()
        self.call("cuInit", 0)
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.version = version.value

    def call(self, name: str, *arguments: Any) -> None:
        """A function by the name under which it is exported."""
        code = getattr(self._library, name)(*arguments)
        if code:
            raise CudaFailed(f"{name}: {self._name_of(code)} ({code})", code)

    def _name_of(self, code: int) -> str:
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(name))
        return (name.value or b"CUDA error").decode()

    def find(self, name: str, version: int, types: tuple[Any, ...]) -> Any:
        """A function by name and version of its interface; None where this driver has none."""
        address, status = ctypes.c_void_p(), ctypes.c_int()
        get = self._library.cuGetProcAddress_v2
        if get(name.encode(), ctypes.byref(address), version, ctypes.c_uint64(0), ctypes.byref(status)):
            return None
        return ctypes.CFUNCTYPE(ctypes.c_int, *types)(address.value) if address.value else None

    # ---- devices ----

    def ordinal_of(self, pointer: int) -> int:
        """The device that has this memory."""
        with self.bound(None):
            ordinal = ctypes.c_int()
            at = ctypes.c_uint64(pointer)
            self.call("cuPointerGetAttribute", ctypes.byref(ordinal), _POINTER_DEVICE_ORDINAL, at)
        return ordinal.value

    def uuid_of(self, ordinal: int) -> bytes:
        """The device's UUID."""
        uuid = (ctypes.c_ubyte * _UUID_BYTES)()
        self.call("cuDeviceGetUuid_v2", uuid, ordinal)
        return bytes(uuid)

    def attribute(self, ordinal: int, number: int) -> int:
        """An attribute of the device; 0 where the driver does not know it."""
        value = ctypes.c_int()
        try:
            self.call("cuDeviceGetAttribute", ctypes.byref(value), number, ordinal)
        except CudaFailed:
            return 0
        return value.value

    @contextmanager
    def bound(self, ordinal: int | None) -> Iterator[None]:
        """In this thread the device's primary context, which is the one of torch and cupy; None: any will do."""
        before = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(before))
        if ordinal is None and before.value:
            yield
            return
        self.call("cuCtxSetCurrent", self._context(ordinal or 0))
        try:
            yield
        finally:
            self.call("cuCtxSetCurrent", before)

    def _context(self, ordinal: int) -> ctypes.c_void_p:
        with self._retaining:
            if ordinal not in self._contexts:
                device, context = ctypes.c_int(), ctypes.c_void_p()
                self.call("cuDeviceGet", ctypes.byref(device), ordinal)
                self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
                self._contexts[ordinal] = context
            return self._contexts[ordinal]
