"""Indexes on a simulated device: their commits fail, end the process, and survive it as the device has it."""

from __future__ import annotations

from pathlib import Path

import lmdb

from kvstored.testing.memory_index import MemoryIndex
from kvstored.testing.memory_lmdb import Trouble
from kvstored.testing.simulated_device import SimulatedDevice


class DeviceTrouble(Trouble):
    """An index suffers what its device does."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device

    def reading(self) -> None:
        """See `Trouble`."""
        self._device.called()
        self._fail(writing=False)

    def committing(self) -> None:
        """See `Trouble`."""
        self._device.called()
        self._fail(writing=True)

    def committed(self) -> None:
        """See `Trouble`."""
        self._device.called()

    def _fail(self, *, writing: bool) -> None:
        if self._device.happens("index_error"):
            raise lmdb.DiskError("Input/output error")
        try:
            if writing:
                self._device.fail_writing()
            else:
                self._device.fail_gone()
        except OSError as error:
            raise lmdb.DiskError(str(error)) from error


class SimulatedIndex(MemoryIndex):
    """An index on a simulated device."""

    def __init__(self, device: SimulatedDevice, path: Path, volume: int, map_bytes: int) -> None:
        super().__init__(path, volume, map_bytes, device.disk.index(path), trouble=DeviceTrouble(device))
