"""A store without a daemon: real catalogue, DRAM tier and policies, a lower tier in memory, a clock at will."""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.catalog.catalog import Catalog, Space
from kvstored.catalog.history import History
from kvstored.catalog.leases import Caller, Session, Sessions
from kvstored.catalog.room import Room
from kvstored.config.tenants import Tenant
from kvstored.device.keeper import Keeper
from kvstored.mover.gate import Gate
from kvstored.mover.mover import Mover
from kvstored.mover.promoter import Promoter
from kvstored.mover.revival import Revival
from kvstored.policy.forecast import Forecast
from kvstored.policy.orders import OrderSettings
from kvstored.policy.quota import Allotments, Quota
from kvstored.policy.watermarks import Watermarks
from kvstored.store.answers import Held
from kvstored.store.parts import Below, Limits, Parts, TenantStats
from kvstored.store.quarantine import UNSEEN_S
from kvstored.store.store import Store
from kvstored.store.writes import Reserved
from kvstored.tenancy.tenants import Tenants
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.waiting import PATIENCE_S, until
from kvstored.tiers.dram import DramConfig, DramTier
from kvstored.tiers.epochs import Epochs
from kvstored.tiers.staging import StagingPool

BLOCK_BYTES = 4096
STAGING_BYTES = 1 << 20


class ManualClock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """See `Clock`."""
        return self.now

    def wall(self) -> float:
        """See `Clock`."""
        return 1.7e9 + self.now


class Node:
    """A store with its parts, and short ways to use it from a test. `async with` opens and closes it."""

    def __init__(
        self,
        blocks: int = 16,
        *,
        below: MemoryTier | None = None,
        segment_blocks: int = 0,
        limits: Limits | None = None,
        quotas: Mapping[str, Quota] | None = None,
        watermarks: Watermarks | None = None,
        queue_blocks: int = 4096,
        deadline_s: float = 0.0,
        keeper: Keeper | None = None,
        eviction: str | OrderSettings = "lru",
        gate: Gate | None = None,
        forecast: Forecast | None = None,
        tenants: Sequence[Tenant] = (),
        predicts: bool = False,
    ) -> None:
        self.clock = ManualClock()
        self.order_settings = eviction if isinstance(eviction, OrderSettings) else OrderSettings(eviction)
        self.lower = below
        self.counters: Counter[str] = Counter()
        self._gate, self._forecast = gate or Gate(), forecast
        catalog, history = Catalog(self.order_settings), History(self.clock, 1024, 128)
        dram = DramTier(DramConfig(blocks * BLOCK_BYTES, segment_blocks * BLOCK_BYTES, "never", "never"), keeper)
        room = Room(catalog, dram, self.clock, history, self.counters, Allotments(blocks * BLOCK_BYTES, quotas))
        self._copiers = ThreadPoolExecutor(2)
        self.parts = Parts(
            catalog=catalog,
            dram=dram,
            room=room,
            below=self._below(catalog, room, dram, below, watermarks or Watermarks(), queue_blocks, deadline_s),
            sessions=Sessions(64, 64),
            staging=StagingPool(64 << 20),
            history=history,
            clock=self.clock,
            counters=self.counters,
            limits=limits or Limits(STAGING_BYTES, 64, 16, blocks * BLOCK_BYTES, PATIENCE_S, PATIENCE_S),
            copiers=self._copiers,
            copy_threads=2,
            stats=defaultdict(TenantStats),
            revival=Revival(catalog, room, dram, self.clock, self.counters, history, self._copiers, 2, below),
            tenants=Tenants(tenants),
            epochs=Epochs(),
            predicts=predicts,
        )
        self.store = Store(self.parts)
        self._mover: asyncio.Task[None] | None = None

    def _below(
        self,
        catalog: Catalog,
        room: Room,
        dram: DramTier,
        tier: MemoryTier | None,
        watermarks: Watermarks,
        queue_blocks: int,
        deadline_s: float,
    ) -> Below | None:
        if tier is None:
            return None
        clock, counters = self.clock, self.counters
        mover = Mover(
            *(catalog, room, dram, tier, clock, counters, watermarks, self._gate),
            forecast=self._forecast,
            deadline_s=deadline_s,
        )
        promoter = Promoter(
            *(catalog, room, dram, tier, clock, counters),
            queue_blocks=queue_blocks,
            inflight_bytes=1 << 20,
            deadline_s=deadline_s,
        )
        return Below(tier, mover, promoter)

    async def __aenter__(self) -> Node:
        await self.parts.dram.open()
        self.store.bumps.enter()
        await self.parts.revival.enter()
        self.store.quarantine.enter()
        self.parts.sessions.begin_ids(self.parts.dram.boot)
        if self.parts.below is not None:
            self._mover = asyncio.create_task(self.parts.below.mover.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        for session in list(self.parts.sessions):
            self.store.end_session(session)
        await self.store.predictions.stop()
        if self._mover is not None:
            self._mover.cancel()
            await asyncio.wait([self._mover])
        if self.parts.below is not None:
            await self.store.writes.durability.drained()
            await self.parts.below.promoter.drained()
        await self.parts.revival.run()
        self.clock.now += UNSEEN_S  # the clients of an earlier node, which had no process, had time to come back
        await self.store.quarantine.look()
        self.audit()
        await self.parts.dram.close()
        self._copiers.shutdown()

    # ---- short ways ----

    async def session(self, tenant: str = "alice", *, role: str = "tenant", **group: bytes | bool) -> Session:
        """A session with a staging ring."""
        caller = Caller(tenant, role, "session")
        return await self.store.open_session(
            caller,
            staging_bytes=STAGING_BYTES,
            create_group=bool(group.get("create_group")),
            join_group=bytes(group.get("join_group", b"")),
        )

    async def space(self, session: Session, model: str = "m", **fields: Any) -> Space:
        """A namespace of the session's tenant."""
        _, space, _ = await self.store.open_namespace(session, pb.NamespaceSpec(model=model, **fields))
        return space

    async def reserve(
        self, session: Session, space: Space, hashes: Sequence[bytes], parent: bytes = b"", wait_s: float = 0.0
    ) -> Reserved:
        """Reserve blocks of the usual size."""
        reserving = self.store.writes.reserve(session, space, hashes, [BLOCK_BYTES] * len(hashes), parent, wait_s)
        return reserving if isinstance(reserving, Reserved) else await reserving

    async def commit(self, session: Session, reserved: Reserved, hashes: Sequence[bytes]) -> bytes:
        """Commit all that was reserved, with each block's `payload`."""
        assert session.staging is not None, "opened with one"
        indices = list(session.reservation(reserved.reservation_id).open)
        for place, index in enumerate(indices):
            data = payload(hashes[index])
            ctypes.memmove(session.staging.address_of(place * BLOCK_BYTES, BLOCK_BYTES), data, BLOCK_BYTES)
        offsets = [place * BLOCK_BYTES for place in range(len(indices))]
        committing = self.store.commits.commit(session, reserved.reservation_id, indices, offsets)
        return committing if isinstance(committing, bytes) else await committing

    async def put(
        self, session: Session, space: Space, hashes: Sequence[bytes], parent: bytes = b"", wait_s: float = 0.0
    ) -> bytes:
        """Reserve and commit; the outcomes of the reservation."""
        reserved = await self.reserve(session, space, hashes, parent, wait_s)
        if reserved.reservation_id:
            await self.commit(session, reserved, hashes)
        return bytes(reserved.outcomes)

    async def put_below(self, session: Session, space: Space, hashes: Sequence[bytes]) -> None:
        """Store blocks and make them leave DRAM, which holds nothing else of the space."""
        assert self.parts.below is not None, "made with a lower tier"
        await self.put(session, space, hashes, wait_s=PATIENCE_S)
        await self.parts.below.mover.flush(PATIENCE_S)
        await self.settle()
        self.parts.room.evict([entry for entry in list(space.entries.values()) if not entry.holds], "test")
        assert not space.entries, "all of them are below"

    async def get(self, session: Session, space: Space, hashes: Sequence[bytes], wait_s: float = 0.0) -> Held:
        """Lease the leading blocks; checks that their bytes are right."""
        getting = self.store.reads.get(session, [space], hashes, wait_s)
        held = getting if isinstance(getting, Held) else await getting
        for lease in held.leases:
            for entry in lease.entries:
                found = bytes(self.parts.dram.view(entry.slot, entry.size_bytes))
                assert found == payload(entry.hash), f"wrong bytes under {entry.hash!r}"
        return held

    async def settle(self) -> None:
        """Let tasks that are ready run, until the mover and the promoter are idle."""
        await asyncio.sleep(0)
        await until(self._idle)

    def _idle(self) -> bool:
        below = self.parts.below
        return below is None or (below.mover.idle and not below.promoter.queued_blocks + below.promoter.inflight_bytes)

    def audit(self) -> None:
        """With no session left: nothing is held, the account balances, no record is pinned."""
        usage = self.parts.dram.usage()
        assert usage.balanced(), usage
        if len(self.parts.sessions):
            return
        assert not any(self.store.held().values()), self.store.held()
        assert not self.store.quarantine.leases, "held for nobody"
        spaces = (*self.parts.catalog.spaces.values(), *self.parts.catalog.retired)
        assert all(space.known is None or space.known.right(space.entries) for space in spaces), "a run has changed"
        entries = [entry for space in spaces for entry in space.entries.values()]
        assert not any(entry.holds for entry in entries), "held by nobody"
        assert usage.blocks == len(entries), f"{usage.blocks} slots for {len(entries)} blocks"
        if self.lower is not None:
            assert not +self.lower.pins, "pinned by nobody"


def payload(hash_: bytes) -> bytes:
    """The bytes that belong to a hash in tests."""
    return (hash_ * (BLOCK_BYTES // len(hash_) + 1))[:BLOCK_BYTES]


def chain(name: str, count: int) -> list[bytes]:
    """Hashes of a chain."""
    return [f"{name}-{index:05}".encode().ljust(16, b".") for index in range(count)]
