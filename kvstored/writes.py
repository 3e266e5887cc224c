"""Writing: reserve, abort and delete; `commits` does the copying between.

Two-phase: a reservation takes slots, a commit fills them. Readers see a block only after its
commit. What is not committed goes with an abort or with the session.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Sequence
from typing import Final

import msgspec

from kvstored.catalog import DEAD, READY, WRITING, Entry, Space
from kvstored.durability import Durability
from kvstored.errors import DeviceError, InvalidArgument, LimitExceeded
from kvstored.history import Gone
from kvstored.keys import BLOCK_BYTES_MAX, BLOCKS_PER_CALL_MAX, slot_bytes
from kvstored.leases import Reservation, Session
from kvstored.outcomes import HIT, MISS, NO_ROOM, NOT_DURABLE, PENDING, RESERVED, THROTTLED
from kvstored.parts import Parts

RETRY_AFTER_MS: Final = 5
DRAIN_RETRY_AFTER_MS: Final = 500
PIECE_BLOCKS: Final = 512  # planned in one go; between two pieces the loop does other things


class Reserved(msgspec.Struct):
    """Outcome per block, and the reservation that covers those RESERVED (0: none)."""

    reservation_id: int
    outcomes: bytearray
    retry_after_ms: int = 0


class Chain(msgspec.Struct, frozen=True):
    """What one reserve call is about: consecutive blocks, and the hash of the one before the first."""

    session: Session
    space: Space
    hashes: Sequence[bytes]
    sizes: Sequence[int]
    parent: bytes
    durable: bool = False

    def check(self) -> None:
        """Raises InvalidArgument where it makes no sense."""
        if len(self.sizes) != len(self.hashes):
            raise InvalidArgument(
                f"{len(self.sizes)} sizes for {len(self.hashes)} hashes: give one size a block, or block_bytes"
            )
        if not min(self.sizes) > 0 or max(self.sizes) > BLOCK_BYTES_MAX:
            raise InvalidArgument(f"a block has 1 to {BLOCK_BYTES_MAX} bytes")
        if self.parent and len(self.parent) != len(self.hashes[0]):
            raise InvalidArgument(f"parent has {len(self.parent)} bytes, the hashes {len(self.hashes[0])}")
        if len(set(self.hashes)) != len(self.hashes):
            raise InvalidArgument("a hash stands twice in one chain")

    def above(self, index: int) -> bytes:
        """The parent of a block."""
        return self.hashes[index - 1] if index else self.parent


class Writes:
    """The writing half of the store."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._catalog = parts.catalog
        self._room = parts.room
        self._dram = parts.dram
        self._below = parts.below
        self._limits = parts.limits
        self._counters = parts.counters
        self.durability = Durability(parts)
        self.draining = False

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
    ) -> Reserved | Awaitable[Reserved]:
        """Slots for the blocks of a chain that are not stored yet, as many as there is room for.

        A `durable` one calls a hit only what is on NVMe, and brings there first what is in DRAM alone.
        """
        chain = Chain(session, space, hashes, sizes, parent, durable)
        chain.check()
        session.check_may_write()
        if durable:
            self.durability.check()
        if self.draining:
            self._counters["drained_puts"] += 1
            return Reserved(0, bytearray([THROTTLED]) * len(hashes), DRAIN_RETRY_AFTER_MS)
        if len(session.reservations) >= self._limits.reservations_per_session:
            raise LimitExceeded(f"{self._limits.reservations_per_session} reservations are open: commit or abort some")
        if self._below is None and len(hashes) <= PIECE_BLOCKS:
            reserved = Reserved(0, bytearray())
            self._plan(chain, reserved, set())
            return reserved
        return self._reserve_later(chain, min(wait_s, self._limits.put_wait_max_s))

    def _refused(self, count: int, outcome: int) -> Reserved:
        return Reserved(0, bytearray([outcome]) * count, RETRY_AFTER_MS if outcome == THROTTLED else 0)

    async def _reserve_later(self, chain: Chain, wait_s: float) -> Reserved:
        end_s = self._parts.clock.monotonic() + wait_s
        while True:
            reserved = Reserved(0, bytearray())
            while len(reserved.outcomes) < len(chain.hashes):
                piece = chain.hashes[len(reserved.outcomes) :][:PIECE_BLOCKS]
                stored = await self._stored_below(chain.space, piece)
                if chain.session.ended:
                    return self._refused(len(chain.hashes), MISS)
                self._plan(chain, reserved, stored)
                if chain.durable:
                    await self._persist_hits(chain, reserved, piece, stored)
                await asyncio.sleep(0)
            left_s = end_s - self._parts.clock.monotonic()
            if self._below is None or THROTTLED not in reserved.outcomes:
                return reserved
            short = reserved.outcomes.count(THROTTLED)
            self._below.mover.demand(chain.space.tenant, slot_bytes(chain.sizes[-1]), short)
            if reserved.reservation_id or left_s <= 0:
                return reserved
            # Nothing was given, so nothing is held while waiting.
            await self._below.mover.room_freed(left_s)

    async def _persist_hits(self, chain: Chain, reserved: Reserved, piece: Sequence[bytes], stored: set[bytes]) -> None:
        start = len(reserved.outcomes) - len(piece)
        hits = [
            start + place
            for place, hash_ in enumerate(piece)
            if reserved.outcomes[start + place] == HIT and hash_ not in stored
        ]
        durable = await self.durability.persist_hashes(chain.space, [chain.hashes[index] for index in hits])
        for index, ok in zip(hits, durable, strict=True):
            if not ok:
                reserved.outcomes[index] = NOT_DURABLE

    async def _stored_below(self, space: Space, hashes: Sequence[bytes]) -> set[bytes]:
        if self._below is None:
            return set()
        unknown = [hash_ for hash_ in hashes if hash_ not in space.entries]
        return await self._on_nvme(space, unknown) if unknown else set()

    async def _on_nvme(self, space: Space, hashes: Sequence[bytes]) -> set[bytes]:
        if self._below is None:
            return set()
        records = await self._below.tier.find(space.tenant, space.digest, hashes, prefix=False)
        self._below.tier.unpin([record for record in records if record is not None])
        return {hash_ for hash_, record in zip(hashes, records, strict=True) if record is not None}

    def _plan(self, chain: Chain, reserved: Reserved, stored: set[bytes]) -> None:
        """Decide on the next piece of a chain; where room ends, on all that follows too."""
        entries, outcomes = chain.space.entries, reserved.outcomes
        if reserved.reservation_id:  # a client that guessed its id may have ended it between two pieces
            chain.session.reservation(reserved.reservation_id)
        start, end = len(outcomes), min(len(chain.hashes), len(outcomes) + PIECE_BLOCKS)
        present: list[Entry] = []
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
        budget_bytes = self._limits.held_bytes - chain.session.reserved_bytes
        slots: list[int] = []
        for size, group in itertools.groupby([chain.sizes[index] for index in wanted], slot_bytes):
            count = min(len(list(group)), budget_bytes // size)
            taken = self._room.take(chain.space.tenant, size, count)
            budget_bytes -= size * len(taken)
            slots += taken
            if len(taken) < count or not count:
                break
        return slots

    def _cut(self, chain: Chain, reserved: Reserved, first: int) -> None:
        """From the first block without room on nothing is reserved: a block is useless without its parent."""
        demotable = self._below is not None and self._below.mover.takes_blocks()
        fits = self._room.could_ever_fit(chain.space.tenant, chain.sizes[first])
        soon = demotable or self._parts.revival.active or self._dram.usage().retired_bytes
        outcome = THROTTLED if fits and soon else NO_ROOM
        outcomes = reserved.outcomes
        for index in range(first, len(outcomes)):
            if outcomes[index] == RESERVED:
                outcomes[index] = outcome
        outcomes += bytearray([outcome]) * (len(chain.hashes) - len(outcomes))
        reserved.retry_after_ms = RETRY_AFTER_MS if outcome == THROTTLED else 0
        self._counters["throttled_puts" if outcome == THROTTLED else "refused_puts"] += 1

    def _enter(self, chain: Chain, reserved: Reserved, wanted: Sequence[int], slots: Sequence[int]) -> None:
        session, space = chain.session, chain.space
        if not reserved.reservation_id:
            reserved.reservation_id = self._parts.sessions.new_id()
            reservation = Reservation(reserved.reservation_id, space, chain.parent, {}, {}, chain.durable)
            session.reservations[reserved.reservation_id] = reservation
        opened, hashes, sizes = session.reservation(reserved.reservation_id).open, chain.hashes, chain.sizes
        for index, slot in zip(wanted, slots, strict=True):
            entry = self._room.enter(space, hashes[index], chain.above(index), slot, sizes[index], WRITING)
            opened[index] = entry
            session.reserved_bytes += entry.pool.slot_bytes

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
        self._undo(session, reservation, entries)

    def _undo(self, session: Session, reservation: Reservation, entries: Sequence[Entry]) -> None:
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
        if self._below is not None:
            self._below.mover.kick()

    def _touch_above(self, space: Space, parent: bytes) -> None:
        ancestors = self._catalog.ancestors(space, parent, BLOCKS_PER_CALL_MAX)
        self._catalog.touch(ancestors, used=False)

    def end_session(self, session: Session) -> None:
        """Abort what a session had reserved; copies that run finish first, and what they copied is kept."""
        for reservation in list(session.reservations.values()):
            entries = list(reservation.open.values())
            reservation.open.clear()
            self._undo(session, reservation, entries)

    # ---- delete ----

    async def delete(self, session: Session, space: Space, hashes: Sequence[bytes]) -> int:
        """Remove blocks from every tier; those in use disappear now and their bytes when the last user is done.

        Raises DeviceError, with all the rest done, where a device may still have some of them.
        """
        session.check_may_write()
        gone = Gone("deleted", "by a client", self._parts.clock.wall())
        # What is being written is not there yet: its put comes after this delete.
        entries = [space.entries[hash_] for hash_ in dict.fromkeys(hashes) if hash_ in space.entries]
        entries = [entry for entry in entries if entry.state != WRITING]
        found = {entry.hash for entry in entries}
        for entry in entries:
            self._room.forget(entry)
        below: set[bytes] = set()
        doubt: DeviceError | None = None
        if self._below is not None:
            await self._below.mover.past(entries)
            below = await self._on_nvme(space, hashes)
            # Those that were not found too: a path that is off has to hear of them.
            try:
                await self._below.tier.delete(space.tenant, space.digest, list(dict.fromkeys(hashes)))
            except DeviceError as error:
                doubt = error
            self._below.promoter.deleted(space, hashes)
            # Brought up again by somebody between the two steps.
            for hash_ in hashes:
                back = space.entries.get(hash_)
                if back is not None and back.below:
                    self._room.forget(back)
            self._below.mover.kick()
        self._parts.history.note(space.digest, found | below, gone)
        self._counters["deleted_blocks"] += len(found | below)
        if doubt is not None:
            raise doubt
        return len(found | below)
