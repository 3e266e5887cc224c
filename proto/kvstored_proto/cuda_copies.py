"""Many copies between host and device in one call of the CUDA driver, for the device worker and for clients that copy
themselves. Needs numpy. The driver is loaded by whoever uses this, never here.

The batch copy has two signatures: that of 12.8 names the copy that failed, that of 13.0 does not. Before 12.8
there is none, and copies are submitted one by one. Pointers are arrays of uint64, which the driver reads as they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

BATCH_COPIES_MAX: Final = 4096  # in one call: drivers have hung at some ten thousand
_BATCH_SINCE: Final = 12080
_WITHOUT_FAILED_INDEX_SINCE: Final = 13000
_ORDER_OF_STREAM: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

Pointers = npt.NDArray[np.uint64]
# A function by its name, the version of the interface that is asked for, and the types of its arguments; or None.
Find = Callable[[str, int, tuple[Any, ...]], Any]

_pointer, _size, _u64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: order of access, two location hints of two ints each, flags."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


_BATCH_ARGUMENTS: Final = (
    *(_pointer, _pointer, _pointer, _size),
    *(ctypes.POINTER(CopyAttributes), ctypes.POINTER(_size), _size),
)


class CopyFailed(Exception):
    """A submission failed: some of it may be under way. The function, and its CUresult."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function}: CUDA error {code}")
        self.function = function
        self.code = code


class Copies:
    """How this driver takes many copies."""

    def __init__(self, find: Find, version: int) -> None:
        """`version`: the driver's."""
        self.names_failed = version < _WITHOUT_FAILED_INDEX_SINCE
        self._batch: Any = None
        if version >= _BATCH_SINCE:
            more = (ctypes.POINTER(_size), _pointer) if self.names_failed else (_pointer,)
            since = _BATCH_SINCE if self.names_failed else _WITHOUT_FAILED_INDEX_SINCE
            self._batch = find("cuMemcpyBatchAsync", since, (*_BATCH_ARGUMENTS, *more))
        self._each = {
            True: ("cuMemcpyHtoDAsync", find("cuMemcpyHtoDAsync", 3020, (_u64, _pointer, _size, _pointer))),
            False: ("cuMemcpyDtoHAsync", find("cuMemcpyDtoHAsync", 3020, (_pointer, _u64, _size, _pointer))),
        }
        self._attributes = CopyAttributes(order=_ORDER_OF_STREAM)
        self._attributes_from = _size(0)
        self._failed_index = _size(0)

    @property
    def batches(self) -> bool:
        """Whether one call submits many copies."""
        return self._batch is not None

    def submit(self, to: Pointers, source: Pointers, sizes: Pointers, stream: int, *, to_device: bool) -> None:
        """Submit copies to a stream (never the default one). Arrays are contiguous. Raises CopyFailed."""
        assert stream > 2, "the driver refuses batches in its default streams"
        if self._batch is None:
            self.submit_each(to, source, sizes, stream, to_device=to_device)
            return
        failed = (ctypes.byref(self._failed_index),) if self.names_failed else ()
        attributes = (ctypes.byref(self._attributes), ctypes.byref(self._attributes_from), 1)
        for start in range(0, len(sizes), BATCH_COPIES_MAX):
            part = slice(start, start + BATCH_COPIES_MAX)
            a, b, n = to[part], source[part], sizes[part]
            code = self._batch(a.ctypes.data, b.ctypes.data, n.ctypes.data, len(n), *attributes, *failed, stream)
            if code:
                raise CopyFailed("cuMemcpyBatchAsync", code)

    def submit_each(self, to: Pointers, source: Pointers, sizes: Pointers, stream: int, *, to_device: bool) -> None:
        """The same, a call for each copy: for memory of the host that is not pinned, too. Raises CopyFailed."""
        name, submit = self._each[to_device]
        for a, b, n in zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True):
            code = submit(a, b, n, stream)
            if code:
                raise CopyFailed(name, code)
