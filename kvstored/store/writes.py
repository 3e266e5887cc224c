"""Writing: reserve, abort and delete; `commits` does the copying between.

Two-phase: a reservation takes slots, a commit fills them. Readers see a block only after its
commit. What is not committed goes with an abort or with the session.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from kvstored.catalog.catalog import DEAD, READY, WRITING, Entry, Space
from kvstored.catalog.history import Reason
from kvstored.catalog.leases import Reservation, Session
from kvstored.errors import InvalidArgument, LimitExceeded
from kvstored.keys import BLOCKS_PER_CALL_MAX, slot_bytes
from kvstored.lifetime import Expiry, Lifetime
from kvstored.store.chains import Chain
from kvstored.store.durability import Durability
from kvstored.store.outcomes import HIT, MISS, NO_ROOM, NOT_DURABLE, PENDING, RESERVED, THROTTLED
from kvstored.store.parts import Parts
from kvstored.store.removal import Removals, Why
from kvstored.store.tenant_limits import TenantLimits

RETRY_AFTER_MS: Final = 5
RETRY_AFTER_MS_MAX: Final = 3_600_000  # a debt at a low rate may take years: to ask sooner is answered at once
DRAIN_RETRY_AFTER_MS: Final = 500
BY_A_CLIENT: Final = Why(Reason.DELETED, "by a client")
REFUSED_SOON: Final = "throttled while room was made, and not put again"
REFUSED_NOW: Final = "no room, and nothing that could be evicted for it"
REFUSED_EVER: Final = "larger than a slot can be, or than its tenant's limit"
PIECE_BLOCKS: Final = 512  # planned in one go; between two pieces the loop does other things


class Reserved(msgspec.Struct):
    """Outcome per block, and the reservation that covers those RESERVED (0: none)."""

    reservation_id: int
    outcomes: bytearray
    retry_after_ms: int = 0


class Writes:
    """The writing half of the store."""

    def __init__(self, parts: Parts, limits: TenantLimits) -> None:
        self._parts = parts
        self._catalog = parts.catalog
        self._room = parts.room
        self._dram = parts.dram
        self._below = parts.below
        self._limits = parts.limits
        self._of_tenant = limits
        self._allotments = parts.room.allotments
        self._counters = parts.counters
        self._asked = parts.note_asked
        self.durability = Durability(parts)
        self.removals = Removals(parts)
        self.draining = False
        # Set by the store: when blocks end that are put with such a lifetime.
        self.expiry_of: Callable[[Space, Lifetime | None], Expiry | None] = lambda space, lifetime: None

    # ---- reserve ----

    def reserve(
        self,
        session: Session,
        space: Space,
        hashes: Sequence[bytes],
        sizes: Sequence[int],
        parent: bytes,
        wait_s: float,
        *,
        durable: bool = False,
        lifetime: Lifetime | None = None,
    ) -> Reserved | Awaitable[Reserved]:
        """Slots for the blocks of a chain that are not stored yet, as many as there is room for.

        A `durable` one calls a hit only what is on NVMe, and brings there first what is in DRAM alone. Blocks that
        are stored already keep the `lifetime` that they have.
        """
        expiry = self.expiry_of(space, lifetime) if lifetime is not None or space.max_age_s else None
        chain = Chain(session, space, hashes, sizes, parent, durable, expiry)
        chain.check()
        session.check_may_write()
        if durable:
            self.durability.check()
        if session.wiping:
            return self._refused(len(hashes), THROTTLED)
        if self.draining:
            self._counters["drained_puts"] += 1
            self._parts.history.note(space, hashes, Reason.PUT_REFUSED, "the daemon was draining")
            return Reserved(0, bytearray([THROTTLED]) * len(hashes), DRAIN_RETRY_AFTER_MS)
        if len(session.reservations) >= self._limits.reservations_per_session:
            raise LimitExceeded(f"{self._limits.reservations_per_session} reservations are open: commit or abort some")
        if self._of_tenant.rates and (wait := self._of_tenant.put_wait_s(space.tenant)):
            return self._over_rate(chain, wait)
        if self._below is None and len(hashes) <= PIECE_BLOCKS:
            reserved = Reserved(0, bytearray())
            self._plan(chain, reserved, set())
            return reserved
        return self._reserve_later(chain, min(wait_s, self._limits.put_wait_max_s))

    def _over_rate(self, chain: Chain, wait: float) -> Reserved:
        self._counters["puts_over_rate"] += 1
        self._parts.stats[chain.space.tenant].puts_over_rate += 1
        rule = "its tenant puts faster than it may"
        self._parts.history.note(chain.space, chain.hashes, Reason.QUOTA, rule, refused=True)
        return Reserved(
            0, bytearray([THROTTLED]) * len(chain.hashes), max(1, min(math.ceil(wait * 1000), RETRY_AFTER_MS_MAX))
        )

    def _refused(self, count: int, outcome: int) -> Reserved:
        return Reserved(0, bytearray([outcome]) * count, RETRY_AFTER_MS if outcome == THROTTLED else 0)

    async def _reserve_later(self, chain: Chain, wait_s: float) -> Reserved:
        end_s = self._parts.clock.monotonic() + wait_s
        while True:
            reserved = Reserved(0, bytearray())
            below = set[bytes]()
            while len(reserved.outcomes) < len(chain.hashes):
                piece = chain.hashes[len(reserved.outcomes) :][:PIECE_BLOCKS]
                digest = chain.space.digest
                stored = await self._stored_below(chain.space, piece)
                if chain.space.digest != digest:
                    stored = set()  # of an epoch that has passed meanwhile
                if chain.session.ended:
                    return self._refused(len(chain.hashes), MISS)
                if chain.session.wiping and not reserved.reservation_id:
                    return self._refused(len(chain.hashes), THROTTLED)
                # Others of the tenant may have put meanwhile.
                if not reserved.outcomes and (wait := self._of_tenant.put_wait_s(chain.space.tenant)):
                    return self._over_rate(chain, wait)
                self._plan(chain, reserved, stored)
                below |= stored
                await asyncio.sleep(0)
            left_s = end_s - self._parts.clock.monotonic()
            waits = False
            if self._below is not None and (short := reserved.outcomes.count(THROTTLED)):
                self._below.mover.demand(chain.space.tenant, slot_bytes(chain.sizes[-1]), short)
                waits = not reserved.reservation_id and left_s > 0
            if self._below is None or not waits:
                if chain.durable:  # not before: two that wait would wake each other by what they bring below
                    await self._persist_hits(chain, reserved, below)
                return reserved
            # Nothing was given, so nothing is held while waiting.
            await self._below.mover.room_freed(left_s)

    async def _persist_hits(self, chain: Chain, reserved: Reserved, stored: set[bytes]) -> None:
        outcomes = enumerate(reserved.outcomes)
        hits = [i for i, outcome in outcomes if outcome == HIT and chain.hashes[i] not in stored]
        durable = await self.durability.persist_hashes(chain.space, [chain.hashes[index] for index in hits])
        for index, ok in zip(hits, durable, strict=True):
            if not ok:
                reserved.outcomes[index] = NOT_DURABLE

    async def _stored_below(self, space: Space, hashes: Sequence[bytes]) -> set[bytes]:
        unknown = [hash_ for hash_ in hashes if hash_ not in space.entries]
        if self._below is None or not unknown:
            return set()
        return set(await self._below.records(space, unknown))

    def _plan(self, chain: Chain, reserved: Reserved, stored: set[bytes]) -> None:
        """Decide on the next piece of a chain; where room ends, on all that follows too."""
        entries, outcomes = chain.space.entries, reserved.outcomes
        if reserved.reservation_id:  # a client that guessed its id may have ended it between two pieces
            chain.session.reservation(reserved.reservation_id)
        start, end = len(outcomes), min(len(chain.hashes), len(outcomes) + PIECE_BLOCKS)
        present: list[Entry] = []
        chain.space.drop_ended(chain.hashes[start:end])
        for hash_ in chain.hashes[start:end]:
            entry = entries.get(hash_)
            if entry is None:
                outcomes.append(HIT if hash_ in stored else RESERVED)
            else:
                outcomes.append(HIT if entry.state == READY else PENDING)
                present.append(entry)
        wanted = [index for index in range(start, end) if outcomes[index] == RESERVED]
        self._catalog.hold(present)  # what is called a hit must not be evicted to make room for what follows it
        slots = self._slots(chain, wanted)
        self._room.unhold(present)
        if slots:
            self._enter(chain, reserved, wanted[: len(slots)], slots)
        if len(slots) < len(wanted):
            self._cut(chain, reserved, wanted[len(slots)])

    def _slots(self, chain: Chain, wanted: Sequence[int]) -> list[int]:
        budget_bytes = self._holdable_bytes(chain.session)
        slots: list[int] = []
        for size, group in itertools.groupby([chain.sizes[index] for index in wanted], slot_bytes):
            count = max(0, min(len(list(group)), budget_bytes // size))
            taken = self._room.take(chain.space.tenant, size, count)
            budget_bytes -= size * len(taken)
            slots += taken
            if len(taken) < count or not count:
                break
        if self._of_tenant.rates:
            self._of_tenant.put(chain.space.tenant, sum(slot_bytes(chain.sizes[i]) for i in wanted[: len(slots)]))
        return slots

    def _holdable_bytes(self, session: Session) -> int:
        """What the session may reserve now: its own limit, and what leaves the guarantees of others possible."""
        own, tenant = self._limits.held_bytes - session.reserved_bytes, session.caller.tenant
        if not self._allotments.guarded:
            return own
        within_bytes = self._allotments.guaranteed(tenant) - self._dram.used_bytes_of(tenant)
        return min(own, max(within_bytes, self._of_tenant.holdable_bytes(tenant)))

    def _cut(self, chain: Chain, reserved: Reserved, first: int) -> None:
        """From the first block without room on nothing is reserved: a block is useless without its parent."""
        demotable = self._below is not None and self._below.mover.takes_blocks(chain.space.tenant)
        fits = self._room.could_ever_fit(chain.space.tenant, chain.sizes[first])
        soon = demotable or self._parts.revival.active or self._dram.usage().retired_bytes
        soon = soon or (self._allotments.guarded and self._promised(chain, slot_bytes(chain.sizes[first])))
        outcome = THROTTLED if fits and soon else NO_ROOM
        outcomes = reserved.outcomes
        for index in range(first, len(outcomes)):
            if outcomes[index] == RESERVED:
                outcomes[index] = outcome
        outcomes += bytearray([outcome]) * (len(chain.hashes) - len(outcomes))
        reserved.retry_after_ms = RETRY_AFTER_MS if outcome == THROTTLED else 0
        self._counters["throttled_puts" if outcome == THROTTLED else "refused_puts"] += 1
        self._parts.stats[chain.space.tenant].puts_throttled += outcome == THROTTLED
        rule = REFUSED_SOON if outcome == THROTTLED else REFUSED_NOW if fits else REFUSED_EVER
        self._parts.history.note(chain.space, chain.hashes[first:], Reason.PUT_REFUSED, rule)

    def _promised(self, chain: Chain, size: int) -> bool:
        """Whether room comes: within the tenant's guarantee, or when it holds less in place."""
        tenant = chain.space.tenant
        within = self._allotments.entitled(tenant, self._dram.used_bytes_of(tenant), size)
        return within or self._holdable_bytes(chain.session) < size

    def _enter(self, chain: Chain, reserved: Reserved, wanted: Sequence[int], slots: Sequence[int]) -> None:
        session, space = chain.session, chain.space
        if not reserved.reservation_id:
            reserved.reservation_id = self._parts.sessions.new_id(session.caller.tenant)
            reservation = Reservation(reserved.reservation_id, space, chain.parent, {}, {}, chain.durable)
            session.reservations[reserved.reservation_id] = reservation
        opened, hashes, sizes = session.reservation(reserved.reservation_id).open, chain.hashes, chain.sizes
        for index, slot in zip(wanted, slots, strict=True):
            entry = self._room.enter(
                space, hashes[index], chain.above(index), slot, sizes[index], WRITING, chain.expiry
            )
            opened[index] = entry
            session.reserved_bytes += entry.pool.slot_bytes
        if self._asked is not None:
            self._asked(space, [hashes[index] for index in wanted])

    # ---- abort and the end ----

    def take(self, reservation: Reservation, indices: Sequence[int]) -> list[Entry]:
        """Blocks that are to be committed or aborted now, and by nobody else. Raises InvalidArgument."""
        if len(set(indices)) != len(indices) or any(index not in reservation.open for index in indices):
            raise InvalidArgument("an index is not reserved, or was committed or aborted before")
        return [reservation.open.pop(index) for index in indices]

    def abort(self, session: Session, reservation_id: int, indices: Sequence[int]) -> None:
        """Give back reserved blocks that are not committed; no indices: all of them."""
        reservation = session.reservation(reservation_id)
        entries = self.take(reservation, indices or list(reservation.open))
        self.give_back(session, reservation, entries)

    def give_back(self, session: Session, reservation: Reservation, entries: Sequence[Entry]) -> None:
        """Blocks that were taken and will not be committed; nothing writes to their slots."""
        for entry in entries:
            if entry.state != DEAD:
                self._room.forget(entry)
        self._room.unhold(list(entries))
        session.reserved_bytes -= sum(entry.pool.slot_bytes for entry in entries)
        self.settle(session, reservation)

    def settle(self, session: Session, reservation: Reservation) -> None:
        """When all is committed: the chain enters the eviction order, tail first, its ancestors after it."""
        if not reservation.finished or session.reservations.pop(reservation.reservation_id, None) is None:
            return
        indices = sorted(reservation.done)
        done = [reservation.done[index] for index in indices]
        session.reserved_bytes -= sum(entry.pool.slot_bytes for entry in done)
        self._room.unhold(done)
        if done and indices[-1] - indices[0] >= len(indices):  # what was there already stands between them
            self._touch_above(reservation.space, done[-1].parent)
        self._touch_above(reservation.space, done[0].parent if done else reservation.parent)
        if session.on_settled is not None and not session.reservations:
            session.on_settled()
        if self._below is not None:
            self._below.mover.kick()

    def _touch_above(self, space: Space, parent: bytes) -> None:
        ancestors = space.ancestors(parent, BLOCKS_PER_CALL_MAX)
        self._catalog.touch(ancestors, used=False)

    def end_session(self, session: Session) -> None:
        """Abort what a session had reserved; copies that run finish first, and what they copied is kept."""
        for reservation in list(session.reservations.values()):
            entries = list(reservation.open.values())
            reservation.open.clear()
            self.give_back(session, reservation, entries)

    # ---- delete ----

    async def delete(self, session: Session, space: Space, hashes: Sequence[bytes]) -> int:
        """Remove blocks from every tier; those in use disappear now and their bytes when the last user is done.

        Raises DeviceError, with all the rest done, where a device may still have some of them.
        """
        session.check_may_write()
        removed = await self.removals.remove(space, hashes, BY_A_CLIENT)
        self._counters["deleted_blocks"] += removed.blocks
        return removed.blocks
