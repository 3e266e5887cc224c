"""Arrays in the memory of a GPU, for tests and benches: what an engine's tensors are, without torch or cupy.

Of all processes the test's own is the engine here, so it loads the driver; never the daemon.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstored.device import cuda_chunks
from kvstored.device.cuda import Driver
from kvstored.testing.contract_paged import Registered

CHUNK_BYTES: Final = 2 << 20
Array = npt.NDArray[np.uint8]


class DeviceArray:
    """An array of bytes on the device, with the strides of the one that it is made from."""

    def __init__(self, driver: Driver, like: Array, offset: int = 0) -> None:
        """Allocate and copy; it starts `offset` bytes into its allocation."""
        self._driver = driver
        self.shape, self.strides = like.shape, like.strides
        self.span_bytes = sum((n - 1) * s for n, s in zip(like.shape, like.strides, strict=True)) + 1
        self.pointer = self._allocate(self.span_bytes + offset)
        self.address = self.pointer + offset
        self.write(like)

    def _allocate(self, size_bytes: int) -> int:
        return self._driver.allocate(size_bytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What other libraries look at."""
        data = (self.address, False)
        return {"shape": self.shape, "strides": self.strides, "typestr": "|u1", "data": data, "version": 3}

    def read(self) -> Array:
        """The array as it is now."""
        held = np.empty(self.span_bytes, np.uint8)
        self._driver.read(held.ctypes.data, self.address, self.span_bytes)
        return np.lib.stride_tricks.as_strided(held, self.shape, self.strides)

    def write(self, array: Array) -> None:
        """Set all of it."""
        held = np.empty(self.span_bytes, np.uint8)
        np.lib.stride_tricks.as_strided(held, self.shape, self.strides)[...] = array
        self._driver.write(self.address, held.ctypes.data, self.span_bytes)

    def free(self) -> None:
        """Give the memory back; it must not be registered any more."""
        self._driver.free(self.pointer)


class ChunkedArray(DeviceArray):
    """The same in memory that its allocator made by chunks, as torch does with expandable segments."""

    def __init__(self, driver: Driver, like: Array, offset: int = 0, *, exportable: bool = True) -> None:
        """In as many chunks of 2 MiB as it takes."""
        self._exportable = exportable
        super().__init__(driver, like, offset)

    def _allocate(self, size_bytes: int) -> int:
        sizes = [CHUNK_BYTES] * -(-size_bytes // CHUNK_BYTES)
        self._mapped = cuda_chunks.made(self._driver, sizes, exportable=self._exportable)
        return self._mapped.pointer

    def free(self) -> None:
        """See `DeviceArray`."""
        cuda_chunks.unmap(self._driver, self._mapped)


class Columns:
    """Some columns of an array of two axes: a tensor of its own, which shares its memory."""

    def __init__(self, array: DeviceArray, columns: slice) -> None:
        self._array = array  # kept alive
        self.__cuda_array_interface__ = {
            **array.__cuda_array_interface__,
            "data": (array.address + columns.start, False),
            "shape": (array.shape[0], columns.stop - columns.start),
        }


def arrays_on(driver: Driver, arrays: Sequence[Array]) -> list[DeviceArray]:
    """Each on the device, none at the start of its allocation."""
    return [DeviceArray(driver, array, 512 * (i + 1)) for i, array in enumerate(arrays)]


class HeldByADevice:
    """What a `Bench` does otherwise in the memory of a device, which nobody can look at without it."""

    arrays: list[Any]
    transfers: Any

    def read(self) -> list[Array]:
        """See `Bench`."""
        return [array.read() for array in self.arrays]

    def write(self, arrays: Sequence[Array]) -> None:
        """See `Bench`."""
        for mine, theirs in zip(self.arrays, arrays, strict=True):
            mine.write(theirs)

    def close(self) -> None:
        """Give the registration and the memory back."""
        self.transfers.close()
        for array in self.arrays:
            array.free()


class OnDevice(HeldByADevice, Registered):
    """The `Bench` of the contract there."""
