"""One boot of a node on a virtual loop: the real store and all below it, on simulated devices.

Wired as `kvstored.daemon.daemon` does it. What outlives a boot is the device's, and whatever a keeper keeps.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from kvstored.catalog.catalog import Catalog
from kvstored.catalog.history import RECYCLED, History, Reason
from kvstored.catalog.leases import Sessions
from kvstored.catalog.room import Room
from kvstored.daemon.warm_restart import WarmRestart
from kvstored.device.keeper import Keeper, NoKeeper
from kvstored.mover.gate import Gate
from kvstored.mover.mover import Mover
from kvstored.mover.promoter import Promoter
from kvstored.mover.revival import Revival
from kvstored.policy.admission import make_admission
from kvstored.policy.forecast import Forecast
from kvstored.policy.orders import make_order
from kvstored.policy.quota import Allotments, Quota
from kvstored.policy.watermarks import Watermarks
from kvstored.store.parts import Below, Limits, Parts, TenantStats
from kvstored.store.removal import gone_below
from kvstored.store.store import Store
from kvstored.tenancy.tenants import Tenants
from kvstored.testing.simulated_device import SimulatedDevice
from kvstored.testing.simulated_index import SimulatedIndex
from kvstored.testing.virtual import VirtualClock, VirtualLoop
from kvstored.tiers.base import LowerTier
from kvstored.tiers.dram import DramConfig, DramTier
from kvstored.tiers.epochs import Epochs
from kvstored.tiers.nvme import NvmeConfig, NvmeTier
from kvstored.tiers.opening import MakeIndex
from kvstored.tiers.staging import StagingPool

HISTORY_BLOCKS: Final = 256
COPY_THREADS: Final = 2
MASTER_KEY: Final = b"the master key of the simulation"
UNLOCK_EVERY_S: Final = 1.0


class NodeConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Settings of a small node."""

    dram: DramConfig
    nvme: NvmeConfig
    limits: Limits
    staging_bytes: int
    sessions: int
    eviction: str = "lru"
    admission: str = "admit_all"
    quotas: Mapping[str, Quota] = {}  # of DRAM
    nvme_quotas: Mapping[str, Quota] = {}
    watermarks: Watermarks = Watermarks()
    queue_blocks: int = 64
    inflight_bytes: int = 64 << 10
    speculative_bytes: int = 64 << 10  # of prefetches, of these
    predicts: bool = False
    encrypted: Mapping[str, str] = {}  # tenant -> algorithm


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
        self._history = History(self.clock, HISTORY_BLOCKS, HISTORY_BLOCKS)
        self.dram = DramTier(config.dram, keeper or NoKeeper())
        epochs = Epochs()
        self.nvme = NvmeTier(
            config.nvme,
            device,
            self.clock,
            self._evicted,
            on_dropped=self._evicted,
            allotment=Allotments(len(config.nvme.paths) * config.nvme.capacity_bytes, config.nvme_quotas),
            make_pool=loop.pool,
            epochs=epochs,
            on_expired=self._evicted,
            make_index=make_index or (lambda path, volume, size: _index(device, path, volume, size)),
        )
        allotments = Allotments(config.dram.capacity_bytes, config.quotas)
        self._room = Room(self._catalog, self.dram, self.clock, self._history, self.counters, allotments)
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
            tenants=Tenants(),
            epochs=epochs,
            predicts=config.predicts,
        )
        self.store = Store(self.parts)
        self._warm = WarmRestart(self.store)
        self.mover_task: asyncio.Task[None] | None = None
        self._unlocking: asyncio.Task[None] | None = None
        for tenant, algorithm in config.encrypted.items():
            self.nvme.keys.configure(tenant, algorithm)

    def _wire_below(self, tier: LowerTier) -> Below:
        config = self.config
        common = (self._catalog, self._room, self.dram, tier, self.clock, self.counters)
        deadline_s = config.nvme.io_deadline_s
        gate = Gate(make_admission(config.admission), name=config.admission)
        mover = Mover(*common, config.watermarks, gate, forecast=Forecast(), deadline_s=deadline_s)
        promoter = Promoter(
            *common,
            queue_blocks=config.queue_blocks,
            inflight_bytes=config.inflight_bytes,
            speculative_bytes=config.speculative_bytes,
            deadline_s=deadline_s,
        )
        return Below(tier, mover, promoter)

    def _evicted(self, _tenant: str, digest: bytes, hashes: list[bytes]) -> None:
        self._loop.call_soon(gone_below, self._catalog, self._history, digest, hashes, Reason.EVICTED, RECYCLED)

    async def start(self) -> None:
        """Open the tiers; when this returns, it serves."""
        await self.dram.open()
        await self._warm.enter()
        await self.below.tier.open()
        await self.unlock()
        self._unlocking = asyncio.create_task(self._unlock_late())
        for namespace in self.below.tier.namespaces():
            self._catalog.space(namespace)
        self.mover_task = asyncio.create_task(self.below.mover.run())
        self._warm.start()

    async def unlock(self) -> None:
        """Give the tier the master keys that it waits for; a real daemon reads them (`encryption.key_keeper`)."""
        for tenant in sorted(self.nvme.keys.waiting() & self.config.encrypted.keys()):
            await self.nvme.keys.unlock(tenant, [MASTER_KEY])

    async def _unlock_late(self) -> None:
        """Paths that come back while it serves may not have had their keys."""
        while True:
            await asyncio.sleep(UNLOCK_EVERY_S)
            await self.unlock()

    async def stop(self, *, flush_s: float = 30.0) -> None:
        """As the daemon stops: no new puts, no sessions, a flush, the tiers."""
        self.store.drains.begin()
        for session in list(self.parts.sessions):
            self.store.end_session(session)
        await self.store.predictions.stop()
        await self._warm.stop()
        if self._unlocking is not None:
            self._unlocking.cancel()
            await asyncio.wait([self._unlocking])
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
