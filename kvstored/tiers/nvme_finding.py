"""The finding half of the NVMe tier: which records there are, of all its paths together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from kvstored.clock import Clock
from kvstored.errors import DeviceError
from kvstored.lifetime import EndClock
from kvstored.tiers.base import Health, Record
from kvstored.tiers.end_sweep import Ends
from kvstored.tiers.extent import ExtentTable
from kvstored.tiers.formats import DIGEST_BYTES
from kvstored.tiers.nvme_report import NvmeReport

PAGE_RECORDS_MAX: Final = 8192


class NvmeFinding(NvmeReport):
    """Asks the indexes of all paths. What has ended is not found."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.ends = Ends(EndClock(clock).now_s)

    def limit_ages(self, max_age_of: Callable[[str], float], now_s: Callable[[], float]) -> None:
        """See `LowerTier.limit_ages`."""
        self.ends.max_age_of, self.ends.now_s = max_age_of, now_s
        for volume in self._volumes.values():
            volume.end_agenda.look_at(volume.table.with_records())

    async def find(self, tenant: str, digest: bytes, hashes: Sequence[bytes], *, prefix: bool) -> list[Record | None]:
        """See `LowerTier.find`."""
        records, _ = await self._find(tenant, digest, hashes, prefix=prefix)
        return records

    async def _find(
        self, tenant: str, digest: bytes, hashes: Sequence[bytes], *, prefix: bool
    ) -> tuple[list[Record | None], list[tuple[bytes, Record]]]:
        """What is found, and the entries that are in an index still, but have ended."""
        # A prefix may go on in another volume, so that only a lone one may stop at its first miss.
        paths = [path for path in self._paths if path.volume is not None]
        finds = [path.find(digest, hashes, prefix=prefix and len(paths) == 1) for path in paths]
        answers = await asyncio.gather(*finds)
        reachable = [self.ends.reachable(tenant, found) for found in answers]
        ended = [
            (hash_, record)
            for found, left in zip(answers, reachable, strict=True)
            if left is not found
            for hash_, record, kept in zip(hashes, found, left, strict=False)
            if record is not None and kept is None
        ]
        records = self._merge(tenant, len(hashes), reachable)
        if self.keys.any_sealed:
            records = [r if r is None or self.keys.opens(r) else None for r in records]
        if prefix and None in records:
            del records[records.index(None) :]
        for record in records:
            if record is not None:
                self._table(record).pin(record)
        return records, ended

    def _merge(self, tenant: str, count: int, answers: Sequence[Sequence[Record | None]]) -> list[Record | None]:
        """For each hash the first valid record of this tenant that a volume answered."""
        records: list[Record | None] = [None] * count
        for found in answers:
            for i, record in enumerate(found):
                if record is not None and records[i] is None and self._owner(record) == tenant:
                    records[i] = record
        return records

    def unpin(self, records: Sequence[Record]) -> None:
        """See `LowerTier.unpin`."""
        for record in records:
            volume = self._paths[record.location.volume].volume
            if volume is not None:  # else: closed meanwhile
                volume.table.unpin(record)

    async def list_records(
        self, digest: bytes | None, cursor: bytes, limit: int
    ) -> tuple[list[tuple[bytes, bytes, Record]], bytes]:
        """A page of at most `limit` valid records (digest, hash, record), of one namespace or of all.

        `cursor` is empty at first and then what the last call returned, which is empty at the
        end. A page may be short, or empty, before that. Raises DeviceError.
        """
        limit = min(limit, PAGE_RECORDS_MAX)
        start, after = (cursor[0], cursor[1:]) if cursor else (0, b"")
        for number, volume in sorted(self._volumes.items()):
            if number < start or volume.health is Health.OFF:
                continue
            page = await volume.page(digest or b"", after if number == start else b"", limit)
            if page:
                valid = [(k[:DIGEST_BYTES], k[DIGEST_BYTES:], r) for k, r in page if volume.table.owner(r) is not None]
                return valid, bytes([number]) + page[-1][0]
        return [], b""

    async def evicted_s(self, digest: bytes, hash_: bytes) -> float | None:
        """See `LowerTier.evicted_s`; a path that cannot be read knows of none."""
        times: list[float] = []
        for volume in list(self._volumes.values()):
            with suppress(DeviceError):
                found = await volume.evicted_s(digest + hash_)
                times += [] if found is None else [found]
        return max(times, default=None)

    def _owner(self, record: Record) -> str | None:
        volume = self._paths[record.location.volume].volume  # None or off: closed while its index was asked
        return volume.table.owner(record) if volume is not None and volume.health is not Health.OFF else None

    def _table(self, record: Record) -> ExtentTable:
        volume = self._paths[record.location.volume].volume
        assert volume is not None, "found in it in this turn"
        return volume.table
