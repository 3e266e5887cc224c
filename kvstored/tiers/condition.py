"""What a volume can do, since when and why: OK, READ_ONLY where only its writes fail, OFF.

It gets worse by what calls to the device tell; `recovery` asks by `check` and `probe` whether it
may go on. OK comes back from READ_ONLY by `resume`, from OFF never: then it is opened anew.
"""

from __future__ import annotations

import logging
from collections import Counter

from kvstored.clock import Clock
from kvstored.device.file import NoSpace
from kvstored.errors import DeviceError
from kvstored.tiers.base import Health
from kvstored.tiers.deadline import DeviceCalls, Late
from kvstored.tiers.directory import VolumeDirectory
from kvstored.tiers.extent import ExtentTable
from kvstored.tiers.nvme_config import NvmeConfig
from kvstored.tiers.threads import VolumeThreads

_log = logging.getLogger(__name__)


class Condition:
    """The health of one volume, and its calls to its device."""

    def __init__(
        self,
        directory: VolumeDirectory,
        table: ExtentTable,
        threads: VolumeThreads,
        config: NvmeConfig,
        clock: Clock,
        counts: Counter[str],
    ) -> None:
        self.directory = directory
        self.table = table
        self.threads = threads
        self.counts = counts
        self.calls = DeviceCalls(config.io_deadline_s, clock, self._hangs)
        self.health = Health.OK
        self.reason = ""
        self.since_s = clock.wall()
        self.in_doubt = False  # the index may hold something else than the table says: to be opened anew
        self.no_room = False  # the file system was full: fewer extents than configured
        self._limit = config.capacity_bytes // config.extent_bytes
        self._clock = clock

    # --- worse ---

    def turn(self, health: Health, reason: str) -> None:
        """From here on it can do no more than this."""
        if self.health in (Health.OFF, health):
            return
        self.health, self.reason, self.since_s = health, reason, self._clock.wall()
        _log.error("%s is now %s: %s", self.directory.path, health.value, reason)

    def doubt(self, error: DeviceError) -> None:
        """The index failed while it was changed, or an extent between two of its states."""
        self.in_doubt = True
        self.turn(Health.READ_ONLY, str(error))

    def write_failed(self, error: DeviceError) -> None:
        """Blocks could not be written; the extent takes no more."""
        if isinstance(error, NoSpace):
            self.counts["no_space"] += 1
            self.no_room = True
            self.table.stop_growing()
        else:
            self.turn(Health.READ_ONLY, str(error))

    def recycler_failed(self, error: DeviceError) -> None:
        """An extent could not be brought from one state to the next."""
        if isinstance(error, NoSpace):
            self.write_failed(error)
        else:
            self.doubt(error)

    def _hangs(self, late: Late) -> None:
        self.counts["late_calls"] += 1
        self.turn(Health.OFF, str(late))

    # --- asked ---

    async def check(self) -> None:
        """Turn off where the directory is not there any more, or not the one that was opened."""
        try:
            await self.calls.ask(self.threads.loads, self.directory.check)
        except DeviceError as error:
            self.turn(Health.OFF, str(error))

    async def probe(self) -> None:
        """Write, sync and read a small file of its own; raises DeviceError where that fails."""
        try:
            await self.calls.ask(self.threads.stores, self.directory.probe)
        except NoSpace:
            await self.release()
            if self.in_doubt:  # perhaps it was the index that could not grow
                raise

    async def release(self) -> None:
        """Let the index have the room that was kept for it."""
        try:
            await self.calls.ask(self.threads.stores, self.directory.release)
        except DeviceError as error:
            _log.warning("%s: %s", self.directory.path, error)

    # --- better ---

    async def look_for_room(self) -> None:
        """Where the file system was full: have as many extents as configured again, if it has room for some now."""
        try:
            free_bytes = await self.calls.ask(self.threads.stores, self.directory.free_bytes)
        except DeviceError:
            return
        if free_bytes >= 2 * self.table.extent_bytes:
            self.no_room = False
            self.table.grow_to(self._limit)

    def resume(self) -> None:
        """Writes work again; extents that were in doubt were closed when they failed."""
        assert self.health is Health.READ_ONLY, "only a volume whose writes failed goes on as it is"
        assert not self.in_doubt, "a volume in doubt is opened anew"
        self.health, self.reason, self.since_s = Health.OK, "", self._clock.wall()
        self.table.retry_seals()
        _log.warning("%s takes writes again", self.directory.path)
