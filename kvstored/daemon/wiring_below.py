"""What lies below DRAM, put together: a part of the daemon's wiring."""

from __future__ import annotations

import asyncio
from collections import Counter

from kvstored.catalog.catalog import Catalog
from kvstored.catalog.history import RECYCLED, History, Reason
from kvstored.catalog.room import Room
from kvstored.clock import Clock
from kvstored.config.config import Config
from kvstored.daemon.tier_settings import forecast, gate, nvme_allotments, nvme_config
from kvstored.device.file import FileDevice
from kvstored.mover.mover import Mover
from kvstored.mover.promoter import Promoter
from kvstored.policy.watermarks import Watermarks
from kvstored.store.expiry import ENDED
from kvstored.store.parts import Below
from kvstored.store.removal import gone_below
from kvstored.tenancy.tenants import Tenants
from kvstored.tiers.dram import DramTier
from kvstored.tiers.epochs import Epochs
from kvstored.tiers.nvme import NvmeTier


def wire_below(
    config: Config,
    clock: Clock,
    counters: Counter[str],
    epochs: Epochs,
    catalog: Catalog,
    room: Room,
    dram: DramTier,
    history: History,
    tenants: Tenants,
) -> Below | None:
    """The NVMe tier, and the two that move blocks to it and from it; None where there are no paths."""
    if not config.nvme.paths:
        return None
    loop = asyncio.get_running_loop()

    def evicted(tenant: str, digest: bytes, hashes: list[bytes]) -> None:
        why = (Reason.EVICTED, RECYCLED)
        loop.call_soon_threadsafe(gone_below, catalog, history, digest, hashes, *why)

    def dropped(tenant: str, digest: bytes, hashes: list[bytes]) -> None:
        why = (Reason.CORRUPT, "its bytes on NVMe were unreadable or not what was stored")
        loop.call_soon_threadsafe(gone_below, catalog, history, digest, hashes, *why)

    def expired(tenant: str, digest: bytes, hashes: list[bytes]) -> None:
        gone_below(catalog, history, digest, hashes, ENDED.reason, ENDED.rule)

    nvme = NvmeTier(
        nvme_config(config),
        FileDevice(),
        clock,
        evicted,
        on_dropped=dropped,
        epochs=epochs,
        on_expired=expired,
        allotment=nvme_allotments(config, tenants),
    )
    mover = Mover(
        catalog,
        room,
        dram,
        nvme,
        clock,
        counters,
        Watermarks(config.mover.high_watermark, config.mover.low_watermark, config.mover.batch_share),
        gate(config, nvme.write_budget),
        forecast=forecast(config),
        deadline_s=config.nvme.io_deadline_s,
    )
    promoter = Promoter(
        catalog,
        room,
        dram,
        nvme,
        clock,
        counters,
        queue_blocks=config.mover.queue_blocks,
        inflight_bytes=config.mover.inflight_bytes,
        speculative_bytes=config.prefetch.inflight_bytes,
        deadline_s=config.nvme.io_deadline_s,
    )
    return Below(nvme, mover, promoter, nvme.keys)
