"""Opening one path of the NVMe tier: its directory, its index, its threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from kvstored.clock import Clock
from kvstored.device.file import FileDevice
from kvstored.tiers import wear
from kvstored.tiers.deadline import DeviceCalls, Late
from kvstored.tiers.directory import Place, VolumeDirectory
from kvstored.tiers.extent import ExtentTable
from kvstored.tiers.index import Index
from kvstored.tiers.key_ring import KeyRing, OpenKeys
from kvstored.tiers.nvme_config import NvmeConfig
from kvstored.tiers.one_extent import Extent
from kvstored.tiers.orphans import take_back
from kvstored.tiers.recycling import Notices
from kvstored.tiers.scrub import Scrubber
from kvstored.tiers.threads import MakePool, VolumeThreads, call
from kvstored.tiers.volume import Volume
from kvstored.tiers.wear import WearMeter

MakeIndex: TypeAlias = Callable[[Path, int, int], Index]
"""The index in a directory: the directory, the volume's number, bytes of the map at first."""


class VolumeOpener:
    """Opens volumes, all with the same settings, on the same device."""

    def __init__(
        self,
        config: NvmeConfig,
        device: FileDevice,
        clock: Clock,
        notices: Notices,
        make_pool: MakePool,
        make_index: MakeIndex,
        choose: Callable[[str, Sequence[Extent]], Extent | None],
        keys: OpenKeys,
        meters: dict[int, WearMeter],
    ) -> None:
        self._config = config
        self._device = device
        self._clock = clock
        self._notices = notices
        self._make_pool = make_pool
        self._make_index = make_index
        self._choose = choose
        self._keys = keys
        self._meters = meters
        # Set by the tier: so many bytes more a tenant may write, counted until they are settled (`TenantParts`).
        self.claim: Callable[[str, int], int] = lambda tenant, size_bytes: size_bytes
        self.settle: Callable[[str, int], None] = lambda tenant, size_bytes: None
        self._identities: dict[int, bytes] = {}  # of the volumes that they count for
        self._left: dict[int, tuple[VolumeDirectory, DeviceCalls]] = {}  # being opened, past the deadline

    async def open(self, number: int, path: Path, counts: Counter[str], was: Place | None) -> Volume:
        """Open a path; raises ConfigError where a setting is wrong, DeviceError where the device fails.

        `was` is where the volume lay that was open at this path before (see `VolumeDirectory.open`); its open
        extents take no more blocks then: it is not known what the last writes left in them.
        """
        config = self._config
        directory = VolumeDirectory(self._device, path, open_files_max=config.open_files_max)
        threads = VolumeThreads(number, config.threads(), self._make_pool)
        index = self._make_index(directory.index, number, config.index_map_bytes)
        try:
            await self._open_directory(number, directory, threads, was)
            await call(threads.index_writer, index.open, directory)
            await call(threads.stores, directory.check)  # notes which file the index is
            await call(threads.stores, directory.upgrade)
            rows = await call(threads.index_reader, index.rows)
            found = await call(threads.stores, take_back, directory, rows)
            await call(threads.stores, directory.reserve)
            namespaces = await call(threads.index_reader, index.namespaces)
            keys = KeyRing(directory, self._keys)
            await call(threads.stores, keys.load)
            meter = await self._meter(number, directory, threads)
        except BaseException:
            index.close()
            if number not in self._left:
                directory.close()
            threads.stop()
            raise
        table = ExtentTable(config.extent_bytes, config.capacity_bytes // config.extent_bytes, rows)
        table.choose = self._choose
        if was is not None:
            table.close_open()
        clock, notices = self._clock, self._notices
        place = (number, directory, table, index, namespaces, threads)
        volume = Volume(*place, config, clock, notices, counts, keys, meter)
        volume.reinsertion.claim, volume.reinsertion.settle = self.claim, self.settle
        counts.update(orphan_files=found.files, orphan_bytes=found.size_bytes)
        volume.suspects = dict.fromkeys(found.short)
        await volume.settle(found.lost)
        return volume

    async def _open_directory(
        self, number: int, directory: VolumeDirectory, threads: VolumeThreads, was: Place | None
    ) -> None:
        """The first that the device is asked; raises Late where it does not answer, or still not."""
        before = self._left.get(number)
        if before is not None:
            if before[1].running:
                raise Late("the device does not answer")
            before[0].close()
            del self._left[number]
        config = self._config
        calls = DeviceCalls(config.io_deadline_s, self._clock, lambda late: None)
        require = config.require_direct_io
        try:
            await calls.ask(threads.stores, directory.open, config.extent_bytes, require_direct_io=require, was=was)
        except Late:
            self._left[number] = (directory, calls)
            raise

    async def _meter(self, number: int, directory: VolumeDirectory, threads: VolumeThreads) -> WearMeter:
        """What was written to the drive: what this process knows of the volume, else what its file says."""
        if self._identities.get(number) == directory.identity:
            return self._meters[number]
        path = directory.path / wear.FILE
        kept = wear.unpack(await call(threads.stores, self._device.read_whole, path), path)
        endurance = self._config.endurance_bytes
        self._meters[number] = WearMeter(
            self._clock,
            kept,
            budget_bytes=self._config.write_budget_bytes_per_day,
            endurance_bytes=endurance[number] if number < len(endurance) else 0,
        )
        self._identities[number] = directory.identity
        return self._meters[number]

    @property
    def stuck(self) -> bool:
        """Whether a thread is still busy opening a path."""
        return any(calls.running for _, calls in self._left.values())

    def scrubber(self, volume: Volume) -> Scrubber | None:
        """The scrub of a volume, begun; None where it is switched off."""
        rate = self._config.scrub_bytes_per_s
        return Scrubber(volume, rate, self._clock) if rate else None
