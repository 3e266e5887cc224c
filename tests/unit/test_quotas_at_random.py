"""Tenants at their limits, and operations at random: accounts to the byte, guarantees kept, nothing leaked."""

import asyncio
import random
from collections import Counter

import pytest

from kvstored.policy.quota import Quota, check_guarantees
from kvstored.policy.watermarks import Watermarks
from kvstored.store.outcomes import HIT, PENDING, RESERVED
from kvstored.store.parts import Limits
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import BLOCK_BYTES, Node, chain
from kvstored.testing.virtual import VirtualLoop

SEGMENTS, SEGMENT_BLOCKS = 16, 8
BLOCKS = SEGMENTS * SEGMENT_BLOCKS
QUOTAS = {
    "alice": Quota(60 * BLOCK_BYTES, 40 * BLOCK_BYTES, 1.0),
    "bob": Quota(70 * BLOCK_BYTES, 48 * BLOCK_BYTES, 2.0),
    "carol": Quota(),
}
TRIES = 4000  # of whoever is within its guarantee: the memory of a retired segment is made anew in between
KEYS = 40  # chains per tenant
AUDIT_EVERY = 250
PHASE = 200  # in each another tenant deletes more than it puts, so that its segments become sparse


class Tenant:
    """One client, and what it holds."""

    def __init__(self, name):
        self.name = name
        self.session = self.space = None
        self.leases = []
        self.reservations = []

    async def open(self, node):
        self.session = await node.session(self.name)
        self.space = await node.space(self.session)
        self.leases, self.reservations = [], []


class World:
    """A node whose evictions are watched, and clients that act at random."""

    def __init__(self, node, seed):
        self.node = node
        self.rng = random.Random(seed)
        self.tenants = [Tenant(name) for name in QUOTAS]
        self.acting = ""
        self.counts = Counter()
        self._evict = node.parts.room.evict
        node.parts.room.evict = self.evict
        if node.parts.below is not None:
            self._finish = node.parts.below.mover._finish
            node.parts.below.mover._finish = self.finish
            demotion = node.parts.below.mover._demotion
            self._for_demand, demotion._for_demand = demotion._for_demand, self.for_demand

    def evict(self, entries, *why):
        """What nobody else may do: take a tenant below its guarantee."""
        entries = list(entries)
        self._evict(entries, *why)
        for name in {entry.pool.space.tenant for entry in entries} - {self.acting}:
            used = self.node.parts.dram.used_bytes_of(name)
            assert used >= QUOTAS[name].guaranteed_bytes, f"{self.acting or 'nobody'} took what {name} is guaranteed"
            self.counts["taken"] += 1

    def finish(self, entries, admitted, done, why):
        """What the mover evicts, it does for whoever waits for the room."""
        before, self.acting = self.acting, why.asker if why is not None else ""
        self._finish(entries, admitted, done, why)
        self.acting = before

    def for_demand(self, pool, count):
        """The same of what is below already."""
        before, self.acting = self.acting, pool[0]
        try:
            return self._for_demand(pool, count)
        finally:
            self.acting = before

    async def run(self, operations):
        for tenant in self.tenants:
            await tenant.open(self.node)
        actions = (self.put,) * 10 + (self.get,) * 5 + (self.release,) * 5 + (self.delete,) * 2
        actions += (self.reserve, self.abort, self.leave)
        for number in range(operations):
            tenant = self.rng.choice(self.tenants)
            self.acting = tenant.name
            if not number % PHASE:
                shrinking = self.rng.choice(self.tenants)
            action = self.rng.choice(actions)
            await (self.delete if tenant is shrinking and action == self.put else action)(tenant)
            self.acting = ""
            self.node.clock.now += self.rng.random() * 0.1
            self.check_limits()
            if not number % AUDIT_EVERY:
                await self.audit()

    # ---- operations ----

    def some(self, tenant):
        hashes = chain(f"{tenant.name}-{self.rng.randrange(KEYS)}", 6)
        return hashes[: self.rng.randint(1, 6)]

    async def put(self, tenant):
        hashes = self.some(tenant)
        parts = self.node.parts
        used = parts.dram.used_bytes_of(tenant.name)
        within = used + BLOCK_BYTES <= QUOTAS[tenant.name].guaranteed_bytes
        for attempt in range(TRIES if within else 1):
            outcomes = await self.node.put(tenant.session, tenant.space, hashes)
            if outcomes[0] != RESERVED and attempt:
                await asyncio.sleep(0.01)
                self.node.clock.now += 0.01
            if set(outcomes) <= {RESERVED, HIT} or RESERVED in outcomes or PENDING in outcomes:
                break
        self.counts["within" if within else "beyond"] += RESERVED in outcomes
        if within and len(tenant.session.reservations) < 16:
            assert {RESERVED, HIT, PENDING} & set(outcomes), (
                f"{tenant.name} has {used} bytes, less than it is guaranteed, and found no room: {list(outcomes)}"
            )

    async def get(self, tenant):
        held = await self.node.get(tenant.session, tenant.space, self.some(tenant))
        tenant.leases += [lease.lease_id for lease in held.leases]
        self.counts["hits"] += held.blocks

    async def release(self, tenant):
        if tenant.leases:
            lease_id = tenant.leases.pop(self.rng.randrange(len(tenant.leases)))
            self.node.store.reads.release(tenant.session, [lease_id])

    async def delete(self, tenant):
        hashes = chain(f"{tenant.name}-{self.rng.randrange(KEYS)}", 6)
        await self.node.store.writes.delete(tenant.session, tenant.space, self.rng.sample(hashes, 3))

    async def reserve(self, tenant):
        if len(tenant.reservations) < 3:
            reserved = await self.node.reserve(tenant.session, tenant.space, self.some(tenant))
            tenant.reservations += [reserved.reservation_id] if reserved.reservation_id else []

    async def abort(self, tenant):
        if tenant.reservations:
            self.node.store.writes.abort(tenant.session, tenant.reservations.pop(), [])

    async def leave(self, tenant):
        if self.rng.random() < 0.2:
            self.node.store.end_session(tenant.session)
            await tenant.open(self.node)

    # ---- checks ----

    def check_limits(self):
        for name, quota in QUOTAS.items():
            used = self.node.parts.dram.used_bytes_of(name)
            assert quota.limit_bytes is None or used <= quota.limit_bytes, f"{name} has {used} bytes, over its limit"

    async def audit(self):
        await self.node.settle()  # what was deleted on its way down holds its slot till then
        parts = self.node.parts
        parts.dram.audit()
        counted = Counter()
        for space in parts.catalog.spaces.values():
            for entry in space.entries.values():
                counted[space.tenant] += entry.pool.slot_bytes
                assert parts.dram.owner(entry.slot) is entry
        for tenant in self.tenants:
            held = {
                entry.slot
                for lease in tenant.session.group.leases.values()
                for entry in lease.entries
                if tenant.space.entries.get(entry.hash) is not entry
            }
            used = parts.dram.used_bytes_of(tenant.name)
            assert used == counted[tenant.name] + len(held) * BLOCK_BYTES, f"{tenant.name}: {used} bytes are counted"


async def live(operations, seed, below):
    check_guarantees(
        "dram", {n: q.guaranteed_bytes for n, q in QUOTAS.items()}, BLOCKS * BLOCK_BYTES, SEGMENT_BLOCKS * BLOCK_BYTES
    )
    limits = Limits(1 << 16, 64, 16, BLOCKS * BLOCK_BYTES, 0.0, 0.0)
    marks = Watermarks(1.0, 0.99, 1.0)
    async with Node(
        BLOCKS, segment_blocks=SEGMENT_BLOCKS, quotas=QUOTAS, below=below, limits=limits, watermarks=marks
    ) as node:
        world = World(node, seed)
        await world.run(operations)
        for tenant in world.tenants:
            node.store.end_session(tenant.session)
        world.acting = ""
        await asyncio.sleep(1)
        await world.audit()
        assert not any(node.store.held().values()), "nobody is left"
        assert not +node.parts.catalog.named_blocks
        assert not any(node.parts.catalog.pinned.values())
        return world.counts


@pytest.mark.parametrize(("operations", "seed", "below"), [(100_000, 1, False), (10_000, 2, True)])
def test_limits_and_guarantees_hold_whatever_tenants_do(operations, seed, below):
    loop = VirtualLoop()
    try:
        counts = loop.run_until_complete(live(operations, seed, MemoryTier() if below else None))
    finally:
        loop.close()
    assert min(counts[name] for name in ("within", "beyond", "taken", "hits")) > operations // 1000, counts
