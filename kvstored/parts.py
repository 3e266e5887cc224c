"""What the store works with, wired together by `daemon` (or by a test), and what a session may hold."""

from __future__ import annotations

from collections import Counter, defaultdict
from concurrent.futures import Executor

import msgspec

from kvstored.catalog import Catalog
from kvstored.clock import Clock
from kvstored.history import History
from kvstored.leases import Sessions
from kvstored.mover import Mover
from kvstored.promoter import Promoter
from kvstored.revival import Revival
from kvstored.room import Room
from kvstored.tiers.base import LowerTier
from kvstored.tiers.dram import DramTier
from kvstored.tiers.staging import StagingPool


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
    blocks_put: int = 0


class Below(msgspec.Struct, frozen=True):
    """The lower tier and the two that move blocks to it and from it."""

    tier: LowerTier
    mover: Mover
    promoter: Promoter


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
