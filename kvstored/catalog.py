"""The catalogue: which block is in DRAM, in which state, and in which eviction order it stands.

Blocks that are only on NVMe have no entry here; the lower tier's index knows them. All calls
are plain state changes without I/O. The life of an entry:

    reserve -> WRITING, PROMOTING or REVIVING --publish--> READY --forget--> gone
                                              --forget---> gone    (DEAD while something still holds its slot)

A block that an earlier process left is REVIVING until its bytes are verified.

`holds` counts leases and I/O that use the slot. A held entry stands in no eviction order, so
nobody has to skip it; it enters the order when it is published and when its last hold ends.
Forgetting takes the key away at once; the slot comes back with the last hold.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Final

from kvstored.keys import Namespace, slot_bytes
from kvstored.policy.eviction import EvictionOrder, Node
from kvstored.policy.orders import OrderMaker, make_order

WRITING: Final = 0
PROMOTING: Final = 1
READY: Final = 2
DEAD: Final = 3
REVIVING: Final = 4
STATE_NAMES: Final = ("writing", "promoting", "ready", "dead", "reviving")


class Pool:
    """The entries of one namespace and slot size; they share an eviction order with others of the tenant."""

    __slots__ = ("order", "slot_bytes", "space")

    def __init__(self, space: Space, slot_bytes: int, order: EvictionOrder) -> None:
        self.space = space
        self.slot_bytes = slot_bytes
        self.order = order


class Entry(Node, gc=False, eq=False, kw_only=True):
    """One block in DRAM. Not tracked by the collector: `forget` cuts every link that could form a cycle."""

    hash: bytes
    parent: bytes
    pool: Pool
    slot: int
    size_bytes: int
    state: int
    holds: int = 0
    leases: int = 0  # of the holds
    below: bool = False  # a copy of it is on NVMe

    @property
    def identity(self) -> Hashable:
        """See `Node`; shards of one model share it, as they share their fate."""
        return self.hash


class Space:
    """The entries of one namespace."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.entries: dict[bytes, Entry] = {}
        self.pools: dict[int, Pool] = {}
        self.used_bytes = 0
        self.unready = 0  # entries that are being written or promoted

    def ready_run(self, hashes: Sequence[bytes]) -> list[Entry]:
        """The entries of the longest run from the start that can be read now."""
        entries = self.entries
        try:
            run = list(map(entries.__getitem__, hashes))  # all of it is there, as mostly
        except KeyError:
            run = []
            for hash_ in hashes:
                entry = entries.get(hash_)
                if entry is None:
                    break
                run.append(entry)
        if self.unready:
            del run[ready_length(run) :]
        return run

    @property
    def only_pool(self) -> Pool | None:
        """The pool that all entries are in, as nearly always; None where there are several or none."""
        return next(iter(self.pools.values())) if len(self.pools) == 1 else None

    def slot_bytes_of(self, entries: Sequence[Entry]) -> int:
        """Bytes of the slots of some of its entries."""
        pool = self.only_pool
        return len(entries) * pool.slot_bytes if pool else sum([entry.pool.slot_bytes for entry in entries])

    @property
    def tenant(self) -> str:
        """Whose namespace it is."""
        return self.namespace.tenant

    @property
    def digest(self) -> bytes:
        """Its part of every key."""
        return self.namespace.digest


def ready_length(run: Sequence[Entry]) -> int:
    """How many leading blocks of a run can be read now."""
    return next((index for index, entry in enumerate(run) if entry.state != READY), len(run))


def _by_order(entries: Sequence[Entry]) -> list[tuple[EvictionOrder, Sequence[Entry]]]:
    """Entries by the order they stand in, each group as it was given; nearly always there is one."""
    orders = {entry.pool.order for entry in entries}
    if len(orders) == 1:
        return [(orders.pop(), entries)]
    return [(order, [entry for entry in entries if entry.pool.order is order]) for order in orders]


class Catalog:
    """All spaces and eviction orders of the daemon."""

    def __init__(self, new_order: OrderMaker = make_order) -> None:
        self._new_order = new_order
        self.spaces: dict[bytes, Space] = {}
        self.orders: dict[tuple[str, int], EvictionOrder] = {}
        self.leased_bytes: Counter[str] = Counter()  # per tenant, a block counted once however often leased
        self._waiters: dict[int, asyncio.Future[None]] = {}
        # When each segment was last used, in calls of `_used`: what reclaim compares.
        self.segment_used: dict[int, int] = {}
        self._tick = 0

    # ---- spaces and orders ----

    def space(self, namespace: Namespace) -> Space:
        """The space of a namespace, made at first use."""
        found = self.spaces.get(namespace.digest)
        if found is None:
            found = self.spaces[namespace.digest] = Space(namespace)
        assert found.tenant == namespace.tenant, "a digest covers its tenant"
        return found

    def order(self, tenant: str, slot_size: int) -> EvictionOrder:
        """The eviction order of a tenant's blocks of one slot size."""
        found = self.orders.get((tenant, slot_size))
        if found is None:
            found = self.orders[tenant, slot_size] = self._new_order()
        return found

    def tenant_spaces(self, tenant: str) -> list[Space]:
        """Every space of a tenant."""
        return [space for space in self.spaces.values() if space.tenant == tenant]

    @property
    def uses(self) -> int:
        """Grows with every use of any block."""
        return self._tick

    def __len__(self) -> int:
        return sum(len(space.entries) for space in self.spaces.values())

    # ---- life of an entry ----

    def reserve(self, space: Space, hash_: bytes, parent: bytes, slot: int, size_bytes: int, state: int) -> Entry:
        """Enter a block that is being written, promoted or verified; the caller holds it once."""
        assert hash_ not in space.entries, "a key has one entry"
        size = slot_bytes(size_bytes)
        pool = space.pools.get(size)
        if pool is None:
            pool = space.pools[size] = Pool(space, size, self.order(space.tenant, size))
        entry = Entry(
            hash=hash_,
            parent=parent,
            pool=pool,
            slot=slot,
            size_bytes=size_bytes,
            state=state,
            holds=1,
            below=state == PROMOTING,
        )
        space.entries[hash_] = entry
        space.used_bytes += size
        space.unready += 1
        return entry

    def publish(self, entry: Entry) -> bool:
        """Make a block readable; its maker's hold stays. False: it was forgotten meanwhile."""
        if entry.state == DEAD:
            return False
        assert entry.state in (WRITING, PROMOTING, REVIVING), "published twice"
        entry.state = READY
        entry.pool.space.unready -= 1
        self._wake(entry)
        return True

    def hold(self, entries: Sequence[Entry], *, leaving: bool = False) -> None:
        """Keep blocks from being moved, reused or zeroed until `unhold`; `leaving`: they are on their way down."""
        for order, group in _by_order([e for e in entries if not e.holds and e.state == READY]):
            (order.evict_many if leaving else order.remove_many)(group)
        for entry in entries:
            entry.holds += 1

    def unhold(self, entries: Sequence[Entry], *, used: bool = False) -> list[int]:
        """End one hold of each block, given in chain order; returns the slots that are free now.

        With the last hold they come back to their order, `used` by a client or only held for another
        reason. Tail first, so that a child is evicted before its parent.
        """
        self._used(entries)
        for entry in entries:
            assert entry.holds > 0, "unheld more often than held"
            entry.holds -= 1
        released = [entry for entry in reversed(entries) if not entry.holds]
        for order, group in _by_order([entry for entry in released if entry.state == READY]):
            (order.touch_many if used else order.enter_many)(group)
        return list({entry.slot: None for entry in released if entry.state == DEAD})  # each once

    def lease(self, space: Space, entries: Sequence[Entry]) -> None:
        """Hold readable blocks of a space for clients; `unlease` goes before their `unhold`."""
        unheld = [entry for entry in entries if not entry.holds]
        for order, group in [(space.only_pool.order, unheld)] if space.only_pool else _by_order(unheld):
            order.remove_many(group)
        fresh: list[Entry] = []
        for entry in entries:  # which may name a block twice
            if not entry.leases:
                fresh.append(entry)
            entry.leases += 1
            entry.holds += 1
        self.leased_bytes[space.tenant] += space.slot_bytes_of(fresh)

    def unlease(self, entries: Sequence[Entry]) -> None:
        """Note that a lease ends."""
        last_bytes = 0
        for entry in entries:
            entry.leases -= 1
            if not entry.leases:
                last_bytes += entry.pool.slot_bytes
        if last_bytes:
            self.leased_bytes[entries[0].pool.space.tenant] -= last_bytes

    def forget(self, entry: Entry) -> int | None:
        """Take a block's key away; returns its slot where that is free now."""
        assert entry.state != DEAD, "forgotten twice"
        space = entry.pool.space
        del space.entries[entry.hash]
        space.used_bytes -= entry.pool.slot_bytes
        if entry.state != READY:
            space.unready -= 1
        elif not entry.holds:
            entry.pool.order.remove(entry)
        entry.state = DEAD
        self._wake(entry)
        return None if entry.holds else entry.slot

    # ---- use ----

    def touch(self, entries: Sequence[Entry], *, used: bool = True) -> None:
        """Note a use of blocks, given in chain order, tail first. Held ones are touched when released.

        Not `used`: they are warmed all the same, as for what new blocks hang on.
        """
        self._used(entries)
        for order, group in _by_order([e for e in reversed(entries) if not e.holds and e.state == READY]):
            (order.touch_many if used else order.enter_many)(group)

    def evict(self, entries: Iterable[Entry]) -> None:
        """Take what is not held out of the orders, to make room; `forget` each then."""
        for order, group in _by_order([entry for entry in entries if not entry.holds and entry.state == READY]):
            order.evict_many(group)

    def ancestors(self, space: Space, parent: bytes, limit: int) -> list[Entry]:
        """The chain above a block, from its root down to `parent`, as far as it is in DRAM."""
        chain: list[Entry] = []
        entries = space.entries
        while parent and len(chain) < limit:
            entry = entries.get(parent)
            if entry is None:
                break
            chain.append(entry)
            parent = entry.parent
        chain.reverse()
        return chain

    def _used(self, entries: Iterable[Entry]) -> None:
        self._tick += 1
        tick, used = self._tick, self.segment_used
        for segment_id in {entry.slot >> 20 for entry in entries}:
            used[segment_id] = tick

    # ---- waiting for a block that is being written or promoted ----

    def change_of(self, entry: Entry) -> asyncio.Future[None]:
        """A future that is done when the entry is published or forgotten."""
        waiter = self._waiters.get(id(entry))
        if waiter is None:
            waiter = self._waiters[id(entry)] = asyncio.get_running_loop().create_future()
        return waiter

    def awaited(self, entry: Entry) -> bool:
        """Whether anybody waits for the entry."""
        return id(entry) in self._waiters

    def _wake(self, entry: Entry) -> None:
        waiter = self._waiters.pop(id(entry), None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # ---- for people ----

    def find(self, tenant: str, hash_: bytes) -> Iterator[Entry]:
        """A hash in all of a tenant's spaces."""
        for space in self.tenant_spaces(tenant):
            entry = space.entries.get(hash_)
            if entry is not None:
                yield entry
