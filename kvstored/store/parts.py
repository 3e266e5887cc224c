"""What the store works with, wired together by `daemon` (or by a test), and what a session may hold."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor

import msgspec

from kvstored.catalog.catalog import Catalog, Space
from kvstored.catalog.history import History
from kvstored.catalog.leases import Sessions
from kvstored.catalog.room import Room
from kvstored.clock import Clock
from kvstored.explain.hit_rates import HitRates
from kvstored.mover.mover import Mover
from kvstored.mover.promoter import Promoter
from kvstored.mover.revival import Revival
from kvstored.policy.cost import ASSUMED_COPY_BYTES_PER_S, SharedTime
from kvstored.policy.turns import Turns
from kvstored.tenancy.tenants import Tenants
from kvstored.tiers.base import LowerTier, Record
from kvstored.tiers.dram import DramTier
from kvstored.tiers.epochs import Epochs
from kvstored.tiers.gpu import Gpus
from kvstored.tiers.staging import StagingPool
from kvstored.tiers.tenant_keys import TenantKeys


class Limits(msgspec.Struct, frozen=True):
    """What one session (for leases: one group) may hold, and the longest waits."""

    staging_bytes_per_session: int
    leases_per_session: int
    reservations_per_session: int
    held_bytes: int  # by leases, and again by reservations
    put_wait_max_s: float
    get_wait_max_s: float


class TenantStats(msgspec.Struct):
    """Counts since the start."""

    lookups: int = 0
    blocks_asked: int = 0  # by get
    blocks_hit: int = 0
    blocks_looked_up: int = 0
    blocks_found: int = 0
    blocks_put: int = 0
    puts_throttled: int = 0  # no room at present, or over the limit of what it may hold
    puts_over_rate: int = 0
    gets_throttled: int = 0
    misses: Counter[str] = msgspec.field(default_factory=Counter)  # lookups and gets that ended in one, by reason
    rates: HitRates = msgspec.field(default_factory=HitRates)
    warn_again_s: float = 0.0  # monotonic: no log line about hit rates before


class Below(msgspec.Struct, frozen=True):
    """The lower tier and the two that move blocks to it and from it."""

    tier: LowerTier
    mover: Mover
    promoter: Promoter
    keys: TenantKeys | None = None  # where the tier can encrypt

    async def records(self, space: Space, hashes: Sequence[bytes]) -> dict[bytes, Record]:
        """Where the lower tier has these blocks, by hash, of those that it has; nothing is pinned, so they may go."""
        found = await self.tier.find(space.tenant, space.digest, hashes, prefix=False)
        self.tier.unpin([record for record in found if record is not None])
        return {hash_: record for hash_, record in zip(hashes, found, strict=True) if record is not None}


class Parts(msgspec.Struct, frozen=True):
    """One node's state and devices."""

    catalog: Catalog
    dram: DramTier
    room: Room
    below: Below | None
    sessions: Sessions
    staging: StagingPool
    history: History
    clock: Clock
    counters: Counter[str]
    limits: Limits
    copiers: Executor  # threads that copy and hash
    copy_threads: int
    stats: defaultdict[str, TenantStats]
    revival: Revival
    tenants: Tenants
    epochs: Epochs
    predicts: bool = False  # what is expected to be asked for comes up before it is
    turns: defaultdict[str, Turns] = msgspec.field(default_factory=lambda: defaultdict(Turns))  # per tenant
    copies: SharedTime = msgspec.field(default_factory=lambda: SharedTime(ASSUMED_COPY_BYTES_PER_S))
    gpus: Gpus | None = None
    spare_copier: Executor | None = None  # one thread more, for copies whose client waits for all of them

    @property
    def note_asked(self) -> Callable[[Space, Iterable[bytes]], None] | None:
        """To be told of blocks that are put or got; None where nothing that goes below is decided by it."""
        return None if self.below is None or self.below.mover.gate.open else self.below.mover.gate.asked
