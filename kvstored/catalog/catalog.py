"""The catalogue: which block is in DRAM, in which state, and in which eviction order it stands.

Blocks that are only on NVMe have no entry here; the lower tier's index knows them. All calls
are plain state changes without I/O. The life of an entry:

    reserve -> WRITING, PROMOTING or REVIVING --publish--> READY --forget--> gone
                                              --forget---> gone    (DEAD while something still holds its slot)

A block that an earlier process left is REVIVING until its bytes are verified.
`holds` counts leases and I/O that use the slot. A held entry stands in no eviction order, so nobody has to skip it; it
enters the order when it is published and when its last hold ends. Forgetting takes the key away at once; the slot comes
back with the last hold.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from kvstored.catalog.spaces import (
    BELOW,
    CAME_UP,
    DEAD,
    LEASE,
    PROMOTING,
    READY,
    REVIVING,
    STATE_NAMES,
    WRITING,
    Entry,
    Pool,
    Space,
    by_order,
    ready_length,
)
from kvstored.keys import Namespace, slot_bytes
from kvstored.lifetime import Expiry
from kvstored.policy.eviction import EvictionOrder
from kvstored.policy.orders import OrderMaker, make_order

__all__ = [
    "DEAD",
    "PROMOTING",
    "READY",
    "REVIVING",
    "STATE_NAMES",
    "WRITING",
    "Catalog",
    "Entry",
    "Pool",
    "Space",
    "ready_length",
]


class Catalog:
    """All spaces and eviction orders of the daemon."""

    def __init__(self, new_order: OrderMaker = make_order) -> None:
        self.new_order = new_order
        self.changing = False  # the orders are being replaced by others (`reordering`)
        self.spaces: dict[bytes, Space] = {}  # by the digest of their namespace
        self.stored: dict[bytes, Space] = {}  # by the digest under which their blocks are stored
        self.retired: list[Space] = []  # of past epochs: reached by no key, and taken away in the background
        self.timed: dict[Space, None] = {}  # with blocks that end, and maybe some that had; swept in this order
        # Set by who knows of ends: blocks are about to be looked at, in a space where some end; some were used there.
        self.on_look: Callable[[Space, Sequence[bytes]], None] = lambda space, hashes: None
        self.on_use: Callable[[Sequence[Entry]], None] = lambda entries: None
        self.now_s: Callable[[], float] = lambda: 0.0  # the time that ends are compared with
        # Set by who knows of tenants: how old its blocks may become; 0: as old as they will.
        self.max_age_of: Callable[[str], float] = lambda tenant: 0.0
        # Set by who knows of epochs: under which digest the blocks of a namespace are stored at present.
        self.digest_of: Callable[[Namespace], bytes] = lambda namespace: namespace.digest
        self.orders: dict[tuple[str, int], EvictionOrder] = {}
        self.leased_bytes: Counter[str] = Counter()  # per tenant, a block counted once however often leased
        self.named_blocks: Counter[str] = Counter()  # the same as often as it is leased
        self.pinned: defaultdict[str, Counter[int]] = defaultdict(Counter)  # per tenant: segment -> leases in it
        self._waiters: dict[int, asyncio.Future[None]] = {}
        # When each segment was last used, in calls of `_used`: what reclaim compares.
        self.segment_used: dict[int, int] = {}
        self._tick = 0

    # ---- spaces and orders ----

    def space(self, namespace: Namespace) -> Space:
        """The space of a namespace, made at first use."""
        found = self.spaces.get(namespace.digest)
        if found is None:
            found = self.spaces[namespace.digest] = Space(namespace, self.digest_of(namespace))
            found.max_age_s, found.on_look = self.max_age_of(namespace.tenant), self.on_look
            self.stored[found.digest] = found
        assert found.tenant == namespace.tenant, "a digest covers its tenant"
        return found

    def drop(self, space: Space) -> None:
        """Forget an empty space."""
        assert not space.entries, "dropped with blocks in it"
        del self.spaces[space.namespace.digest], self.stored[space.digest]

    def retire(self, space: Space) -> Space:
        """Begin a space's next epoch, whose digest is known by now; returns what was in it before."""
        old = space.retire(self.digest_of(space.namespace))
        del self.stored[old.digest]
        self.stored[space.digest] = space
        self.retired.append(old)
        if old.timers is not None:
            self.timed[old] = None
        return old

    def order(self, tenant: str, slot_size: int) -> EvictionOrder:
        """The eviction order of a tenant's blocks of one slot size."""
        found = self.orders.get((tenant, slot_size))
        if found is None:
            found = self.orders[tenant, slot_size] = self.new_order()
        return found

    def tenant_spaces(self, tenant: str) -> list[Space]:
        """Every space of a tenant."""
        return [space for space in self.spaces.values() if space.tenant == tenant]

    @property
    def uses(self) -> int:
        """Grows with every use of any block."""
        return self._tick

    def __len__(self) -> int:
        return sum(len(space.entries) for space in (*self.spaces.values(), *self.retired))

    # ---- life of an entry ----

    def reserve(
        self,
        space: Space,
        hash_: bytes,
        parent: bytes,
        slot: int,
        size_bytes: int,
        state: int,
        expiry: Expiry | None = None,
    ) -> Entry:
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
            held=1,
            flags=BELOW | CAME_UP if state == PROMOTING else 0,
        )
        if state == PROMOTING:
            pool.order.from_below(entry)
        space.entries[hash_] = entry
        space.used_bytes += size
        space.unready += 1
        if expiry is not None:
            self.end_at(entry, expiry)
        return entry

    def end_at(self, entry: Entry, expiry: Expiry | None) -> None:
        """Have a block end; one that ends already then instead."""
        if expiry is not None:
            entry.pool.space.time(entry, expiry)
            self.timed[entry.pool.space] = None

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
        for order, group in by_order([e for e in entries if not e.held and e.state == READY]):
            (order.evict_many if leaving else order.remove_many)(group)
        for entry in entries:
            entry.held += 1

    def unhold(self, entries: Sequence[Entry], *, used: bool = False) -> list[int]:
        """End one hold of each block, given in chain order; returns the slots that are free now.

        With the last hold they come back to their order, `used` by a client or only held for another
        reason. Tail first, so that a child is evicted before its parent.
        """
        self._used({entry.slot >> 20 for entry in entries})
        released: list[Entry] = []
        for entry in reversed(entries):
            assert entry.holds > 0, "unheld more often than held"
            entry.held -= 1
            if not entry.held:
                released.append(entry)
        return self._released(released, used=used)

    def _released(self, entries: Sequence[Entry], *, used: bool) -> list[int]:
        """Nobody holds these any more, given tail first: back to their order, or their slots free."""
        ready = [entry for entry in entries if entry.state == READY]
        for order, group in by_order(ready):
            (order.touch_many if used else order.enter_many)(group)
        if len(ready) == len(entries):
            return []
        return list({entry.slot: None for entry in entries if entry.state == DEAD})  # each once

    def lease(self, space: Space, entries: Sequence[Entry]) -> None:
        """Hold readable blocks of a space for clients until `unlease`."""
        unheld: list[Entry] = []
        fresh: list[Entry] = []  # held, but not leased
        for entry in entries:  # which may name a block twice
            held = entry.held
            entry.held = held + LEASE if held else LEASE  # mostly the latter, for which no number is made
            if not held:
                unheld.append(entry)
            elif held < LEASE:
                fresh.append(entry)
        for order, group in [(space.only_pool.order, unheld)] if space.only_pool else by_order(unheld):
            order.remove_many(group)
        self.leased_bytes[space.tenant] += space.slot_bytes_of(unheld) + space.slot_bytes_of(fresh)

    def unlease(self, entries: Sequence[Entry], segment_ids: Collection[int]) -> list[int]:
        """End one lease of each block, given in chain order; returns the slots that are free now.

        With the last hold they come back to their order, used. `segment_ids` are those that they lie in.
        """
        self._used(segment_ids)
        released: list[Entry] = []
        others: list[Entry] = []  # not leased any more, but held
        for entry in reversed(entries):
            held = entry.held = entry.held - LEASE
            if not held:
                released.append(entry)
            elif held < LEASE:
                assert held > 0, "unleased more often than leased"
                others.append(entry)
        if released or others:
            space = entries[0].pool.space
            self.leased_bytes[space.tenant] -= space.slot_bytes_of(released) + space.slot_bytes_of(others)
        return self._released(released, used=True)

    def pin(self, tenant: str, runs: Iterable[tuple[int, int]], blocks: int, *, more: int = 1) -> None:
        """Count a lease of so many blocks in the segments of its runs of slots; `more` -1: it has ended."""
        self.named_blocks[tenant] += more * blocks
        pinned = self.pinned[tenant]
        for segment_id in {first >> 20 for first, _ in runs}:
            pinned[segment_id] += more
            if not pinned[segment_id]:
                del pinned[segment_id]

    def forget(self, entry: Entry) -> int | None:
        """Take a block's key away; returns its slot where that is free now."""
        assert entry.state != DEAD, "forgotten twice"
        space = entry.pool.space
        del space.entries[entry.hash]
        space.used_bytes -= entry.pool.slot_bytes
        if entry.state != READY:
            space.unready -= 1
        else:
            entry.pool.order.forget(entry)
        if entry.expires_s and space.timers is not None:
            space.timers.discard(entry)
        entry.state, space.known = DEAD, None
        self._wake(entry)
        return None if entry.held else entry.slot

    # ---- use ----

    def touch(self, entries: Sequence[Entry], *, used: bool = True) -> None:
        """Note a use of blocks, given in chain order, tail first. Held ones are touched when released.

        Not `used`: they are warmed all the same, as for what new blocks hang on.
        """
        self._used({entry.slot >> 20 for entry in entries})
        for order, group in by_order([e for e in reversed(entries) if not e.held and e.state == READY]):
            (order.touch_many if used else order.enter_many)(group)

    def evict(self, entries: Iterable[Entry]) -> None:
        """Take what is not held out of the orders, to make room; `forget` each then."""
        for order, group in by_order([entry for entry in entries if not entry.held and entry.state == READY]):
            order.evict_many(group)

    def _used(self, segment_ids: Iterable[int]) -> None:
        self._tick += 1
        for segment_id in segment_ids:
            self.segment_used[segment_id] = self._tick

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
