"""By which method copies are submitted: in batches (or one by one, where the driver has none), or by a kernel.

The kernel is for small pieces, where the copy engines are slow: below a size that is measured at the worker's start,
for each direction by itself. Stores in batches never use it: it takes time of the device away from its engine.
"""

from __future__ import annotations

import mmap
import time
from typing import Final

import numpy as np
import numpy.typing as npt
from kvstored_proto.cuda_copies import Pointers

from kvstored.device import copy_kernel
from kvstored.device.copy_kernel import CopyKernel
from kvstored.device.cuda import CudaError, Driver

SIZES: Final = (4 << 10, 8 << 10, 16 << 10, 24 << 10, 32 << 10, 64 << 10)
TOTAL_BYTES: Final = 4 << 20
REPEATS: Final = 3


class CopyMethods:
    """What the driver and the kernel do, chosen by direction and size of the pieces."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        """Load the kernel and measure; a failure of either means that there is none."""
        self._driver = driver
        self._kernel, self.why_none = copy_kernel.loaded(driver, ordinal)
        self.below_bytes = {True: 0, False: 0}
        self._registered: npt.NDArray[np.uint8] | None = None
        if self._kernel is not None:
            try:
                self._calibrate(self._kernel)
            except CudaError as error:
                # Kept all the same: its lists are registered with the driver, and no other memory may lie there.
                self._dropped, self._kernel, self.why_none = self._kernel, None, str(error)

    def said(self) -> str:
        """For status: the method, and below which size of pieces the kernel is used."""
        plain = "batch" if self._driver.batches else "loop"
        if self._kernel is None:
            return f"{plain} (no kernel: {self.why_none})"
        return f"{plain}, kernel below {self.below_bytes[True]} bytes (loads), {self.below_bytes[False]} (stores)"

    def copy(self, to: Pointers, source: Pointers, sizes: Pointers, stream: int, *, to_device: bool) -> None:
        """Submit copies to a stream: all, or up to an error. Raises CudaError."""
        below = self.below_bytes[to_device]
        if below and self._kernel is not None and int(sizes.sum()) < below * len(sizes):
            done = self._kernel.copy(to, source, sizes, stream)
            to, source, sizes = to[done:], source[done:], sizes[done:]
        if len(sizes):
            self._driver.copy(to, source, sizes, stream, to_device=to_device)

    def _calibrate(self, kernel: CopyKernel) -> None:
        """The largest size up to which the kernel is faster, on memory of our own. Raises CudaError."""
        driver, held = self._driver, mmap.mmap(-1, TOTAL_BYTES)
        host = np.frombuffer(held, np.uint8)
        host[::4096] = 1
        stream, device = driver.stream(), driver.allocate(TOTAL_BYTES)
        driver.pin(host.ctypes.data, TOTAL_BYTES)
        self._registered = host  # as long as it is: no other memory may lie there
        try:
            for to_device in (True,) if driver.batches else (True, False):
                for size in SIZES:
                    count = TOTAL_BYTES // size
                    apart = np.random.default_rng(0).permutation(count).astype(np.uint64) * np.uint64(size)
                    there, here = np.uint64(device) + apart, np.uint64(host.ctypes.data) + apart[::-1]
                    to, source = (there, here) if to_device else (here, there)
                    lists = (np.ascontiguousarray(to), np.ascontiguousarray(source), np.full(count, size, np.uint64))
                    by_kernel = min(self._seconds(lists, stream, to_device, kernel) for _ in range(REPEATS))
                    by_driver = min(self._seconds(lists, stream, to_device, None) for _ in range(REPEATS))
                    if by_kernel >= by_driver:
                        break
                    self.below_bytes[to_device] = size + 1
        finally:
            driver.synchronize(stream)
            driver.free(device)
            driver.unpin(host.ctypes.data)
            self._registered = None

    def _seconds(
        self, lists: tuple[Pointers, Pointers, Pointers], stream: int, to_device: bool, kernel: CopyKernel | None
    ) -> float:
        started = time.perf_counter()
        if kernel is not None:
            kernel.copy(*lists, stream)
        else:
            self._driver.copy(*lists, stream, to_device=to_device)
        self._driver.synchronize(stream)
        return time.perf_counter() - started
