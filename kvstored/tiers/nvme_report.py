"""What the NVMe tier says of itself: its account, its health and its counts, path by path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from kvstored.tiers.base import Health, PathStatus, Usage
from kvstored.tiers.path_wear import PathWear
from kvstored.tiers.recovery import VolumePath
from kvstored.tiers.tenant_keys import TenantKeys
from kvstored.tiers.volume import Volume
from kvstored.tiers.wear import WearMeter


class NvmeReport:
    """The reporting half of the tier."""

    def __init__(self) -> None:
        self.keys = TenantKeys()
        self._paths: list[VolumePath] = []
        self._counts: Counter[str] = Counter()
        self._meters: dict[int, WearMeter] = {}  # of every path that was open once

    @property
    def _volumes(self) -> dict[int, Volume]:
        """The open ones, by the number of their path."""
        return {path.number: path.volume for path in self._paths if path.volume is not None}

    def usage(self) -> Usage:
        """See `LowerTier.usage`; a path that is off has no capacity."""
        parts = [msgspec.structs.astuple(volume.table.usage()) for volume in self._volumes.values()]
        return Usage(*map(sum, zip(*parts, strict=True))) if parts else Usage(0, 0, 0, 0, 0, 0)

    def audit(self) -> None:
        """Recount the account of every volume; AssertionError where it is wrong."""
        for volume in self._volumes.values():
            volume.table.audit()

    def tenant_usage(self) -> Mapping[str, tuple[int, int]]:
        """See `LowerTier.tenant_usage`."""
        totals: dict[str, tuple[int, int]] = {}
        for volume in self._volumes.values():
            for tenant, (bytes_, blocks) in volume.table.tenant_usage().items():
                before = totals.get(tenant, (0, 0))
                totals[tenant] = (before[0] + bytes_, before[1] + blocks)
        return totals

    @property
    def health(self) -> Health:
        """The best that any path can do."""
        found = {volume.health for volume in self._volumes.values()}
        return next((health for health in (Health.OK, Health.READ_ONLY) if health in found), Health.OFF)

    def properties(self) -> dict[str, str]:
        """See `LowerTier.properties`: one line for every path."""
        paths = {f"path.{path.number}": path.status().describe() for path in self._paths}
        return {**paths, **self.keys.properties()}

    def paths(self) -> list[PathStatus]:
        """See `LowerTier.paths`."""
        return [path.status() for path in self._paths]

    def wear(self) -> list[PathWear]:
        """See `LowerTier.wear`."""
        meters = self._meters
        return [_wear(p, meters[p.number]) for p in self._paths if p.number in meters]

    def write_budget(self) -> tuple[int, int] | None:
        """See `LowerTier.write_budget`."""
        taking = [number for number, volume in self._volumes.items() if volume.health is Health.OK]
        shares = [share for number in taking if (share := self._meters[number].left()) is not None]
        return (sum(left for left, _ in shares), sum(day for _, day in shares)) if shares else None

    def counters(self) -> dict[str, int]:
        """See `LowerTier.counters`."""
        return dict(sum((path.counts for path in self._paths), start=Counter(self._counts)))


def _wear(path: VolumePath, meter: WearMeter) -> PathWear:
    counts = path.counts
    return msgspec.structs.replace(
        meter.report(path.number, str(path.path)),
        stored_bytes=counts["written_bytes"] - counts["reinserted_bytes"],
        reinserted_bytes=counts["reinserted_bytes"],
        written_bytes=sum(count for name, count in counts.items() if name.startswith("wear_")),
    )
