"""The invariant of quotas, asserted in the running daemon: no tenant has more of a tier than its limit, by a byte.

Two cases are none: a limit that was lowered below what its tenant has, and what an earlier process or a path that
was away brings back. Then the use at that moment is the ceiling, since from there on it only falls (`Trimming`);
on NVMe once the stores have ended that had their room before.
Costs a look at each tenant and each segment, at no block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvstored.store.parts import Parts

LINES_MAX: Final = 16
TIERS: Final = ("DRAM", "NVMe")
STORES_LAST_S: Final = 60.0  # at most: what they write counts when they end


class QuotaAudit:
    """Compares use with limits; to be asked now and then."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._ceilings: dict[tuple[str, str], int] = {}  # of a tier and tenant; over the limit
        self._settled_s: dict[str, float] = {}  # from when on the ceiling of a tenant whose limit changed stands
        self._paths: object = None
        self._begun = False
        parts.tenants.watch(self._changed)

    def check(self) -> list[str]:
        """What is wrong, one line each; each is counted."""
        used = self._used()
        self._note_returns(used)
        wrong = self._parts.dram.misaccounted()
        for tier, by_tenant in used.items():
            for tenant, used_bytes in by_tenant.items():
                limit = self._limit(tier, tenant)
                ceiling = self._ceilings.get((tier, tenant))
                if limit is None or used_bytes <= limit:
                    self._ceilings.pop((tier, tenant), None)
                elif ceiling is None or used_bytes > ceiling:
                    wrong.append(f"{tenant} has {used_bytes} bytes of {tier}: its limit is {limit}")
                else:
                    self._ceilings[tier, tenant] = used_bytes
        self._parts.counters["quota_violations"] += len(wrong)
        return wrong[:LINES_MAX]

    def _used(self) -> dict[str, Mapping[str, int]]:
        below = self._parts.below
        nvme = below.tier.tenant_usage() if below is not None else {}
        return {"DRAM": self._parts.dram.used_bytes_by_tenant(), "NVMe": {t: bytes_ for t, (bytes_, _) in nvme.items()}}

    def _limit(self, tier: str, tenant: str) -> int | None:
        found = self._parts.tenants.get(tenant)
        if found is None:  # removed: all of it goes
            return None
        return found.dram_limit_bytes if tier == "DRAM" else found.nvme_limit_bytes

    def _changed(self, tenant: str) -> None:
        self._settled_s[tenant] = self._parts.clock.monotonic() + STORES_LAST_S
        for tier, by_tenant in self._used().items():
            self._note(tier, tenant, by_tenant.get(tenant, 0))

    def _note(self, tier: str, tenant: str, used_bytes: int) -> None:
        limit = self._limit(tier, tenant)
        if limit is not None and used_bytes > limit:
            self._ceilings[tier, tenant] = used_bytes

    def _note_returns(self, used: Mapping[str, Mapping[str, int]]) -> None:
        """What was there before this process, and what paths had that came back since the last look."""
        below = self._parts.below
        paths = [(path.path, path.since_s) for path in below.tier.paths()] if below is not None else []
        for tier in TIERS:
            if not self._begun or (tier == "NVMe" and paths != self._paths):
                for tenant, used_bytes in used[tier].items():
                    self._note(tier, tenant, used_bytes)
        self._begun, self._paths = True, paths
        now_s = self._parts.clock.monotonic()
        self._settled_s = {tenant: end_s for tenant, end_s in self._settled_s.items() if end_s > now_s}
        for tenant in self._settled_s:
            self._note("NVMe", tenant, used["NVMe"].get(tenant, 0))
