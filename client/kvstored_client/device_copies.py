"""Copies between an engine's tensors on a GPU and the daemon's memory, by the client on streams of its own.

This is what `shm` means for tensors of a GPU: the way to go where the daemon cannot open them (see `cuda_export`). The
daemon's memory is registered with the driver at its first use, a mapping at a time, so that copies run by
themselves; where the driver refuses that, they are slower and one by one.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
from kvstored_proto.cuda_copies import Copies, CopyFailed, Pointers
from kvstored_proto.layout import Indices, Layout

from kvstored_client import mapping
from kvstored_client.cuda_driver import CudaDriver, CudaFailed
from kvstored_client.errors import Unavailable

_REGISTER_PORTABLE: Final = 1
_REGISTER_READ_ONLY: Final = 8
_READ_ONLY_SUPPORTED: Final = 113
_STREAM_NON_BLOCKING: Final = 1

_pinning = threading.Lock()  # a mapping may be used by several memories of this process


class DeviceCopier:
    """The streams of one device. Raises CudaFailed where there is no driver, or the memory is on several devices."""

    def __init__(self, pointers: Sequence[int]) -> None:
        """`pointers`: into memory of the device."""
        self._driver = CudaDriver()
        ordinals = {self._driver.ordinal_of(pointer) for pointer in pointers}
        if len(ordinals) != 1:
            raise CudaFailed("the tensors are on several devices: register those of each by themselves")
        self._ordinal = ordinals.pop()
        self._copies = Copies(self._driver.find, self._driver.version)
        self._streams: dict[bool, int] = {}
        with self._driver.bound(self._ordinal):
            for to_device in (True, False):
                stream = ctypes.c_void_p()
                self._driver.call("cuStreamCreate", ctypes.byref(stream), _STREAM_NON_BLOCKING)
                self._streams[to_device] = stream.value or 0

    def copy(self, device: Pointers, host: Pointers, sizes: Pointers, *, to_device: bool) -> None:
        """Copy, and wait for the end. Raises Unavailable, and nothing runs any more then."""
        to, source = (device, host) if to_device else (host, device)
        stream = self._streams[to_device]
        try:
            with self._driver.bound(self._ordinal):
                pinned = self._pinned(int(host.min()), int((host + sizes).max()))
                submit = self._copies.submit if pinned else self._copies.submit_each
                try:
                    submit(to, source, sizes, stream, to_device=to_device)
                finally:
                    self._driver.call("cuStreamSynchronize", ctypes.c_void_p(stream))
        except (CopyFailed, CudaFailed) as error:
            raise Unavailable(f"copying between the GPU and shared memory: {error}") from None

    def _pinned(self, first: int, end: int) -> bool:
        """Whether this memory, which may be a part of a mapping, is registered; tries to where it is not."""
        found = mapping.containing(first, end)
        if found is None:
            return False
        with _pinning:
            if found.pinned is None:
                found.pinned = self._pin(found)
        return found.pinned

    def _pin(self, found: mapping.Mapping) -> bool:
        flags = _REGISTER_PORTABLE
        if not found.writable:
            if not self._driver.attribute(self._ordinal, _READ_ONLY_SUPPORTED):
                return False
            flags |= _REGISTER_READ_ONLY
        address, driver, ordinal = ctypes.c_void_p(found.address), self._driver, self._ordinal

        def unpin() -> None:
            try:
                with driver.bound(ordinal):
                    driver.call("cuMemHostUnregister", address)
            except CudaFailed:
                pass  # the context is gone, and all registrations with it

        try:
            driver.call("cuMemHostRegister_v2", address, ctypes.c_size_t(found.size_bytes), flags)
        except CudaFailed:
            return False
        found.before_unmap(unpin)
        return True


class DevicePlace:
    """See `buffers.Place`: stored blocks in an engine's memory on a GPU, of one engine block or several each."""

    def __init__(self, copier: DeviceCopier, layout: Layout, bases: Sequence[int], ids: Indices, part: slice) -> None:
        """`part`: of the layout's fragments."""
        self._copier = copier
        self._layout = layout
        self._bases = bases
        self._ids = ids
        self._part = part
        self.sizes_bytes: Sequence[int] = [layout.block_bytes * ids.shape[1]] * ids.shape[0]

    def part(self, start: int, end: int) -> DevicePlace:
        """See `Place`."""
        return DevicePlace(self._copier, self._layout, self._bases, self._ids[start:end], self._part)

    def read(self, indices: Sequence[int], targets: Sequence[int]) -> None:
        """See `Place`. Raises Unavailable."""
        self._copy(self._ids[list(indices)], np.asarray(targets, np.uint64), to_device=False)

    def write(self, first: int, count: int, source: int, stride: int) -> None:
        """See `Place`. Raises Unavailable."""
        stored = np.uint64(source) + np.arange(count, dtype=np.uint64) * np.uint64(stride)
        self._copy(self._ids[first : first + count], stored, to_device=True)

    def _copy(self, ids: Indices, stored: Pointers, *, to_device: bool) -> None:
        device, host, sizes = self._layout.plan(ids, self._bases, stored, self._part)
        self._copier.copy(device, host, sizes, to_device=to_device)
