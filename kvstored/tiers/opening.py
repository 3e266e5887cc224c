"""Opening one path of the NVMe tier: its directory, its index, its threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from kvstored.clock import Clock
from kvstored.device.file import FileDevice
from kvstored.tiers.directory import VolumeDirectory
from kvstored.tiers.extent import ExtentTable
from kvstored.tiers.index import Index
from kvstored.tiers.nvme_config import NvmeConfig
from kvstored.tiers.recycling import OnEvicted
from kvstored.tiers.threads import MakePool, VolumeThreads, call
from kvstored.tiers.volume import Volume

MakeIndex: TypeAlias = Callable[[Path, int, int], Index]
"""The index in a directory: the directory, the volume's number, bytes of the map at first."""


class VolumeOpener:
    """Opens volumes, all with the same settings, on the same device."""

    def __init__(
        self,
        config: NvmeConfig,
        device: FileDevice,
        clock: Clock,
        on_evicted: OnEvicted,
        make_pool: MakePool,
        make_index: MakeIndex,
    ) -> None:
        self._config = config
        self._device = device
        self._clock = clock
        self._on_evicted = on_evicted
        self._make_pool = make_pool
        self._make_index = make_index

    async def open(self, number: int, path: Path) -> Volume:
        """Open a path; raises ConfigError where a setting is wrong, DeviceError where the device fails."""
        config = self._config
        directory = VolumeDirectory(self._device, path, open_files_max=config.open_files_max)
        threads = VolumeThreads(number, config.threads(), self._make_pool)
        index = self._make_index(directory.index, number, config.index_map_bytes)
        try:
            require = config.require_direct_io
            await call(threads.stores, directory.open, config.extent_bytes, require_direct_io=require)
            await call(threads.index_writer, index.open)
            rows = await call(threads.index_reader, index.rows)
            namespaces = await call(threads.index_reader, index.namespaces)
        except BaseException:
            index.close()
            directory.close()
            threads.stop()
            raise
        table = ExtentTable(config.extent_bytes, config.capacity_bytes // config.extent_bytes, rows)
        run_bytes, clock, on_evicted = config.run_bytes, self._clock, self._on_evicted
        volume = Volume(directory, table, index, namespaces, threads, run_bytes, clock, on_evicted)
        await volume.settle()
        return volume
