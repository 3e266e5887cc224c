"""One boot of a node on a virtual loop: the real store and all below it, on simulated devices.

Wired as `kvstored.daemon` does it. What outlives a boot is the device's, and whatever a keeper keeps.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from kvstored.catalog import Catalog
from kvstored.device.keeper import Keeper, NoKeeper
from kvstored.history import Gone, History
from kvstored.leases import Sessions
from kvstored.mover import Mover
from kvstored.parts import Below, Limits, Parts, TenantStats
from kvstored.policy.admission import AdmitAll
from kvstored.policy.orders import make_order
from kvstored.policy.quota import Quota
from kvstored.policy.watermarks import Watermarks
from kvstored.promoter import Promoter
from kvstored.revival import Revival
from kvstored.room import Room
from kvstored.store import Store
from kvstored.testing.simulated_device import SimulatedDevice
from kvstored.testing.simulated_index import SimulatedIndex
from kvstored.testing.virtual import VirtualClock, VirtualLoop
from kvstored.tiers.base import LowerTier
from kvstored.tiers.dram import DramConfig, DramTier
from kvstored.tiers.nvme import NvmeConfig, NvmeTier
from kvstored.tiers.opening import MakeIndex
from kvstored.tiers.staging import StagingPool
from kvstored.warm_restart import WarmRestart

HISTORY_BLOCKS: Final = 256
COPY_THREADS: Final = 2


class NodeConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Settings of a small node."""

    dram: DramConfig
    nvme: NvmeConfig
    limits: Limits
    staging_bytes: int
    sessions: int
    eviction: str = "lru"
    quotas: Mapping[str, Quota] = {}
    watermarks: Watermarks = Watermarks()
    queue_blocks: int = 64
    inflight_bytes: int = 64 << 10


class SimulatedNode:
    """The store of one boot. `observe` may put something between it and the NVMe tier."""

    def __init__(
        self,
        loop: VirtualLoop,
        device: SimulatedDevice,
        config: NodeConfig,
        *,
        keeper: Keeper | None = None,
        make_index: MakeIndex | None = None,
        observe: Callable[[NvmeTier], LowerTier] = lambda tier: tier,
    ) -> None:
        self.config = config
        self._loop = loop
        self.clock = VirtualClock(loop)
        self.counters: Counter[str] = Counter()
        self._catalog = Catalog(partial(make_order, config.eviction))
        self._history = History(HISTORY_BLOCKS)
        self.dram = DramTier(config.dram, keeper or NoKeeper())
        self.nvme = NvmeTier(
            config.nvme,
            device,
            self.clock,
            self._evicted,
            on_dropped=self._evicted,
            make_pool=loop.pool,
            make_index=make_index or (lambda path, volume, size: _index(device, path, volume, size)),
        )
        self._room = Room(self._catalog, self.dram, self.clock, self._history, self.counters, config.quotas)
        self.below = self._wire_below(observe(self.nvme))
        copiers = loop.pool(COPY_THREADS)
        revival = Revival(
            *(self._catalog, self._room, self.dram, self.clock, self.counters, self._history),
            *(copiers, COPY_THREADS, self.below.tier),
        )
        self.parts = Parts(
            catalog=self._catalog,
            dram=self.dram,
            room=self._room,
            below=self.below,
            sessions=Sessions(config.sessions, 8),
            staging=StagingPool(config.staging_bytes),
            history=self._history,
            clock=self.clock,
            counters=self.counters,
            limits=config.limits,
            copiers=copiers,
            copy_threads=COPY_THREADS,
            stats=defaultdict(TenantStats),
            revival=revival,
        )
        self.store = Store(self.parts)
        self._warm = WarmRestart(self.store)
        self.mover_task: asyncio.Task[None] | None = None

    def _wire_below(self, tier: LowerTier) -> Below:
        config = self.config
        common = (self._catalog, self._room, self.dram, tier, self.clock, self.counters)
        deadline_s = config.nvme.io_deadline_s
        mover = Mover(*common, config.watermarks, AdmitAll(), deadline_s=deadline_s)
        promoter = Promoter(
            *common, queue_blocks=config.queue_blocks, inflight_bytes=config.inflight_bytes, deadline_s=deadline_s
        )
        return Below(tier, mover, promoter)

    def _evicted(self, _tenant: str, digest: bytes, hashes: list[bytes]) -> None:
        self._loop.call_soon(self._note_evicted, digest, hashes)

    def _note_evicted(self, digest: bytes, hashes: list[bytes]) -> None:
        space = self._catalog.spaces.get(digest)
        for hash_ in hashes:
            entry = space.entries.get(hash_) if space is not None else None
            if entry is not None:
                entry.below = False
        self._history.note(digest, hashes, Gone("evicted", "its extent was recycled", self.clock.wall()))

    async def start(self) -> None:
        """Open the tiers; when this returns, it serves."""
        await self.dram.open()
        await self._warm.enter()
        await self.below.tier.open()
        for namespace in self.below.tier.namespaces():
            self._catalog.space(namespace)
        self.mover_task = asyncio.create_task(self.below.mover.run())
        self._warm.start()

    async def stop(self, *, flush_s: float = 30.0) -> None:
        """As the daemon stops: no new puts, no sessions, a flush, the tiers."""
        self.store.drains.begin()
        for session in list(self.parts.sessions):
            self.store.end_session(session)
        await self._warm.stop()
        if self.mover_task is not None:
            self.mover_task.cancel()
            await asyncio.wait([self.mover_task])
        if flush_s:
            await self.below.mover.flush(flush_s)
        await self.store.writes.durability.drained()
        await self.below.promoter.drained()
        await self.below.tier.close()
        if not self.nvme.stuck:  # else a thread may still be at its memory
            await self.dram.close()


def _index(device: SimulatedDevice, path: Path, volume: int, map_bytes: int) -> SimulatedIndex:
    return SimulatedIndex(device, path, volume, map_bytes)
