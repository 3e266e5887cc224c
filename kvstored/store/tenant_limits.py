"""What one tenant may do and hold at once, as the tenants say at this moment: rates, sessions, leases, namespaces.

What it may fill of the tiers is `policy.quota`'s. Beyond its guarantee a tenant's leases and reservations are
capped too, in whole segments: for nothing in a segment can go while one block of it is held.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvstored.catalog.catalog import Catalog
from kvstored.catalog.leases import Sessions
from kvstored.catalog.spaces import Space
from kvstored.clock import Clock
from kvstored.errors import LimitExceeded
from kvstored.keys import SLOT_ALIGN_BYTES
from kvstored.policy.quota import Allotments, reserve_bytes
from kvstored.policy.rate import TokenBucket
from kvstored.tenancy.tenants import Tenants
from kvstored.tiers.dram import DramTier

NAMESPACES_MAX: Final = 65_536
# Blocks that leases name, a block as often as it is leased: some 50 bytes each that no other limit counts.
LEASED_BLOCKS_MAX: Final = 8 << 20


class TenantLimits:
    """The limits of all tenants, kept in step with the registry."""

    def __init__(
        self,
        tenants: Tenants,
        sessions: Sessions,
        catalog: Catalog,
        dram: DramTier,
        allotments: Allotments,
        clock: Clock,
    ) -> None:
        self._tenants = tenants
        self._sessions = sessions
        self._catalog = catalog
        self._dram = dram
        self._allotments = allotments
        self._clock = clock
        self.rates: dict[str, TokenBucket] = {}
        self.max_leases: dict[str, int] = {}
        for name in tenants.names:
            self._learn(name)
        tenants.watch(self._learn)

    def _learn(self, name: str) -> None:
        tenant = self._tenants.get(name)
        self.max_leases.pop(name, None)
        if tenant is not None and tenant.max_leases is not None:
            self.max_leases[name] = tenant.max_leases
        rate, bucket = tenant.put_bytes_per_s if tenant is not None else None, self.rates.get(name)
        if rate is None:
            self.rates.pop(name, None)
        elif bucket is None or bucket.bytes_per_s != rate:
            self.rates[name] = TokenBucket(rate)

    # ---- rates ----

    def put_wait_s(self, tenant: str) -> float:
        """For how long the tenant may put nothing."""
        bucket = self.rates.get(tenant)
        return 0.0 if bucket is None else bucket.wait_s(self._clock.monotonic())

    def put(self, tenant: str, size_bytes: int) -> None:
        """Count what a put reserved."""
        bucket = self.rates.get(tenant)
        if bucket is not None:
            bucket.take(size_bytes, self._clock.monotonic())

    # ---- numbers ----

    def check_session(self, name: str) -> None:
        """Raises LimitExceeded where the tenant may not open one more session."""
        tenant = self._tenants.get(name)
        most = None if tenant is None else tenant.max_sessions
        if most is not None and sum(session.caller.tenant == name for session in self._sessions) >= most:
            raise LimitExceeded(f"{most} sessions of this tenant are open: close some or ask for a higher max_sessions")

    def check_namespace(self, name: str) -> None:
        """Raises LimitExceeded where the tenant may not have one more namespace; the message tells of no other's."""
        tenant = self._tenants.get(name)
        most = tenant.max_namespaces if tenant is not None else None
        if most is None:
            most = NAMESPACES_MAX // max(1, len(self._tenants))
        if len(self._catalog.tenant_spaces(name)) >= most:
            raise LimitExceeded(
                f"{most} namespaces of this tenant are known: restart the daemon to forget unused ones, "
                "or ask for a higher max_namespaces"
            )
        if len(self._catalog.spaces) >= NAMESPACES_MAX:
            raise LimitExceeded(f"{NAMESPACES_MAX} namespaces are known: restart the daemon to forget unused ones")

    def too_many_leases(self, tenant: str, more: int) -> bool:
        """Whether so many more leases are over the tenant's number."""
        most = self.max_leases.get(tenant)
        if most is None:
            return False
        groups = {id(s.group): s.group for s in self._sessions if s.caller.tenant == tenant}.values()
        return sum(len(group.leases) + group.ending_leases for group in groups) + more > most

    def leasable_blocks(self, tenant: str, blocks: int) -> int:
        """How many more blocks the tenant's leases may name: half of what all may, so that one cannot use it up."""
        named = self._catalog.named_blocks
        return max(0, min(blocks, LEASED_BLOCKS_MAX - named.total(), LEASED_BLOCKS_MAX // 2 - named[tenant]))

    def staging_max_bytes(self, name: str, total_bytes: int) -> int:
        """How much staging memory the tenant's sessions may have together, of what all may.

        Where it does not say: half, so that nobody alone leaves the others without; all of it where it is alone.
        """
        tenant = self._tenants.get(name)
        if tenant is not None and tenant.staging_limit_bytes is not None:
            most = tenant.staging_limit_bytes
        else:
            most = total_bytes // (2 if len(self._tenants) > 1 else 1)
        return most // SLOT_ALIGN_BYTES * SLOT_ALIGN_BYTES

    # ---- what is held in place ----

    def holdable_bytes(self, tenant: str) -> int:
        """How many more bytes of segments the tenant may pin by leases and reservations."""
        held = self.held_bytes()
        segment_bytes = self._dram.largest_slot_bytes
        reserve = reserve_bytes(self._allotments.guarantees(), segment_bytes)
        return self._allotments.held_max_bytes(tenant, held, reserve) - held.get(tenant, 0)

    def held_bytes(self) -> dict[str, int]:
        """Per tenant: the segments in which it leases something, and what it has reserved."""
        held: Counter[str] = Counter()
        for tenant, pinned in self._catalog.pinned.items():
            held[tenant] += len(pinned) * self._dram.largest_slot_bytes
        for session in self._sessions:
            held[session.caller.tenant] += session.reserved_bytes
        return held

    def fitting(self, space: Space, slots: list[int]) -> int:
        """How many leading blocks, by their slots, may be leased within what the tenant may hold in place."""
        pinned = self._catalog.pinned[space.tenant]
        left = self.holdable_bytes(space.tenant) // self._dram.largest_slot_bytes
        fresh: set[int] = set()
        for index, slot in enumerate(slots):
            segment_id = slot >> 20
            if segment_id not in pinned and segment_id not in fresh:
                if len(fresh) >= left:
                    return index
                fresh.add(segment_id)
        return len(slots)
