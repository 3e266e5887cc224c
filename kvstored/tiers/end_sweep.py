"""Blocks on NVMe that have ended: found by nobody from that moment on, and their space given back in batches.

Nothing is kept in memory per block. Of each extent it is known when it is worth a look: when an eighth of
its blocks that end will have ended; so the work is a small multiple of what ends. After opening, and when
a tenant's maximum age changes, nothing is known: every extent is looked at once, at a gentle pace.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

from kvstored.errors import DeviceError
from kvstored.lifetime import step_down
from kvstored.tiers.base import Health, Record, Store
from kvstored.tiers.formats import DIGEST_BYTES
from kvstored.tiers.recycling import OnEvicted, report
from kvstored.tiers.volume import Volume

LOOK_S: Final = 1.0
REST_S: Final = 0.05  # after each extent that is looked at
REVISIT_S: Final = 10.0  # an extent whose blocks end one by one is not looked at more often
PIECE_BLOCKS: Final = 256
SHARE: Final = 8  # an extent is looked at when one in so many of its blocks that end will have ended

Entry = tuple[bytes, Record]
_log = logging.getLogger(__name__)


class Ends:
    """Tells which records have ended."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        """`now_s`: the time that ends are compared with."""
        self.now_s = now_s
        self.max_age_of: Callable[[str], float] = lambda tenant: 0.0

    def reachable(self, tenant: str, records: Sequence[Record | None]) -> Sequence[Record | None]:
        """The same without those that have ended; the very same where none can."""
        max_age_s = self.max_age_of(tenant)
        if not max_age_s and not any(record is not None and record.expiry is not None for record in records):
            return records
        now_s = self.now_s()
        return [r if r is None or not 0 < end_s(r, max_age_s) <= now_s else None for r in records]


def outlives(store: Store, record: Record) -> bool:
    """Whether a block in DRAM ends later than its copy on NVMe, because it was used since."""
    above, below = store.expiry, record.expiry
    return above is not None and below is not None and above.expires_s > below.expires_s


def end_s(record: Record, max_age_s: float) -> float:
    """When a record ends; 0: it does not."""
    ends = [record.expiry.expires_s] if record.expiry is not None else []
    if max_age_s:
        ends.append(step_down(record.created_s + max_age_s))
    return min(ends, default=0.0)


class EndSweep:
    """Takes away what has ended, on all volumes of a tier."""

    def __init__(self, ends: Ends, volumes: Callable[[], Iterable[Volume]], on_expired: OnEvicted) -> None:
        self._ends = ends
        self._volumes = volumes
        self._on_expired = on_expired
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; the tier is open."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """End here; what a thread is at goes to its end."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.sweep()
            except Exception:  # room must go on coming back
                _log.exception("sweeping blocks that have ended")

    async def sweep(self) -> None:
        """Look at every extent that is due now."""
        for volume in list(self._volumes()):
            while volume.health is Health.OK and (number := volume.end_agenda.next(self._ends.now_s())) is not None:
                with volume.use(), suppress(DeviceError):  # the volume has turned off by itself then
                    await self._visit(volume, number)
                await asyncio.sleep(REST_S)

    async def _visit(self, volume: Volume, number: int) -> None:
        extent = volume.table.get(number)
        if extent is None or not extent.live_blocks:
            return
        max_age_s, tenant = self._ends.max_age_of(extent.tenant), extent.tenant
        keys = await volume.recycler.keys_that_end(extent, all_of_them=bool(max_age_s))
        left: list[float] = []
        for start in range(0, len(keys), PIECE_BLOCKS):
            entries = await _lying_in(volume, number, keys[start : start + PIECE_BLOCKS])
            now_s = self._ends.now_s()
            ends = [(end_s(record, max_age_s), entry) for entry in entries for record in [entry[1]]]
            over = [entry for end, entry in ends if 0 < end <= now_s]
            left += [end for end, _ in ends if end > now_s]
            if over:
                blocks, _ = await volume.forget(over)
                volume.counts["expired_blocks"] += blocks
                report(self._on_expired, tenant, [key for key, _ in over])
        if left:
            left.sort()
            volume.end_agenda.note(number, max(left[len(left) // SHARE], self._ends.now_s() + REVISIT_S))


async def _lying_in(volume: Volume, number: int, keys: Sequence[bytes]) -> list[Entry]:
    by_digest: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for key in keys:
        by_digest[key[:DIGEST_BYTES]].append(key[DIGEST_BYTES:])
    found: list[Entry] = []
    for digest, hashes in by_digest.items():
        records = await volume.find(digest, hashes, prefix=False)
        found += [(digest + h, r) for h, r in zip(hashes, records, strict=False) if r is not None]
    return [entry for entry in found if entry[1].location.extent == number]
