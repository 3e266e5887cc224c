"""The account of one open volume's writes: who counts what, and when its file is written."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kvstored.device.accounting import thread_written_bytes
from kvstored.errors import DeviceError
from kvstored.tiers.deadline import DeviceCalls
from kvstored.tiers.directory import VolumeDirectory
from kvstored.tiers.threads import VolumeThreads
from kvstored.tiers.wear import FILE, WearMeter

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)


class WearFile:
    """Counts what is written and keeps it in a file of the directory; that this cannot be written stops nothing."""

    def __init__(
        self,
        meter: WearMeter,
        directory: VolumeDirectory,
        threads: VolumeThreads,
        calls: DeviceCalls,
        counts: Counter[str],
    ) -> None:
        self.meter = meter
        self._device = directory.device
        self._path = directory.path / FILE
        self._threads = threads
        self._calls = calls
        self._counts = counts
        self._saving = asyncio.Lock()
        self._index_bytes = 0  # that the index's thread has written, as it said last
        self._index_counted_bytes = 0

    async def before(self, size_bytes: int) -> None:
        """Called before so many bytes are written: makes sure that a kill does not make them forgotten."""
        self._collect()
        if self.meter.overdue(size_bytes):
            async with self._saving:
                if self.meter.overdue(size_bytes):
                    await self._save(size_bytes)

    async def close(self) -> None:
        """Write down exactly what was written. Raises Late as `DeviceCalls.ask` does."""
        self._collect()
        data, _ = self.meter.pack()
        await self._calls.ask(self._threads.stores, self._replace, data)

    async def _save(self, size_bytes: int) -> None:
        data, up_to_bytes = self.meter.pack(size_bytes)
        if await self._calls.call(self._threads.stores, self._replace, data):
            self.meter.saved(up_to_bytes)
            self.wrote(len(data), "other")

    def _replace(self, data: bytes) -> bool:
        """In a thread."""
        try:
            self._device.replace(self._path, data)
        except DeviceError as error:
            _log.warning("what was written to this drive is not on record: %s", error)
            return False
        return True

    # --- counting ---

    def wrote(self, size_bytes: int, kind: str) -> None:
        """So many bytes of a kind were handed to the device: `blocks`, `footers`, `index` or `other`."""
        self._counts[f"wear_{kind}_bytes"] += size_bytes
        self.meter.wrote(size_bytes)

    def measured(self, change: Callable[P, T]) -> Callable[P, T]:
        """A change of the index, which has no count of its own: what its thread has written is noted after it.

        So other work of that thread (tombstones, names) is counted too, with the next such change; what a
        process of its own writes, to make an index anew, is not.
        """
        if not self._threads.accounted:
            return change

        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return change(*args, **kwargs)
            finally:
                self._index_bytes = thread_written_bytes()

        return run

    def _collect(self) -> None:
        grown_bytes = self._index_bytes - self._index_counted_bytes
        if grown_bytes > 0:
            self._index_counted_bytes += grown_bytes
            self.wrote(grown_bytes, "index")
