"""Commit: copy blocks into their slots, hash the destination, make them readable.

The bytes come from the session's staging ring, which its client can change at any time: so the
hash is taken of what was stored, piece by piece while it is in cache. A copy that runs is
never undone from outside; its own completion decides what becomes of the slots.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from kvstored_proto.progress import ALIGN_BYTES, PROGRESS_BYTES, Taker

from kvstored.catalog.catalog import DEAD, Entry, Space
from kvstored.catalog.leases import Reservation, Session
from kvstored.device import memory
from kvstored.device.scheduling import apart
from kvstored.errors import InvalidArgument
from kvstored.explain.misses import Misses
from kvstored.keys import BLOCKS_PER_CALL_MAX
from kvstored.lifetime import Lifetime
from kvstored.store.outcomes import HIT, MISS, NOT_DURABLE
from kvstored.store.parts import Parts
from kvstored.store.streams import Copy, Stream, Streams
from kvstored.store.writes import Reserved, Writes
from kvstored.tiers.staging import Staging

INLINE_COPY_BYTES: Final = 256 << 10  # less than this is copied at once: a thread would cost more
MEASURED_COPY_BYTES: Final = 1 << 20  # smaller copies tell of threads, not of memory
THREAD_COPY_BYTES: Final = 2 << 20  # at least so much per thread
# Who hands over so much at once has copied it before and waits, so one CPU more is free than with a put that goes on.
WHOLE_COPY_BYTES: Final = 16 << 20

T = TypeVar("T")


async def in_copiers(
    parts: Parts, work: Callable[[Sequence[T]], list[bytes]], blocks: Sequence[T], total_bytes: int
) -> list[bytes]:
    """Copy or hash blocks in as many of the store's threads as their bytes are worth; one result a block."""
    executors = [parts.copiers] * parts.copy_threads
    if parts.spare_copier is not None and total_bytes >= WHOLE_COPY_BYTES:
        executors.append(parts.spare_copier)
    shares = max(1, min(len(executors), total_bytes // THREAD_COPY_BYTES))
    step = -(-len(blocks) // shares)
    loop = asyncio.get_running_loop()
    pieces = [blocks[start : start + step] for start in range(0, len(blocks), step)]
    if len(pieces) == 1:
        return await loop.run_in_executor(executors[0], work, blocks)
    jobs = [
        loop.run_in_executor(executor, _apart, work, piece, i, len(pieces))
        for i, (executor, piece) in enumerate(zip(executors, pieces, strict=False))
    ]
    return [content_hash for job in jobs for content_hash in await job]


def _progress(staging: Staging, offset: int) -> Taker:
    """Where a client tells how far it is. Raises InvalidArgument."""
    if offset % ALIGN_BYTES:
        raise InvalidArgument(f"progress_offset is {offset}: a multiple of {ALIGN_BYTES} is needed")
    return Taker(staging.address_of(offset, PROGRESS_BYTES))


def _apart(work: Callable[[Sequence[T]], list[bytes]], piece: Sequence[T], index: int, count: int) -> list[bytes]:
    with apart(index, count):
        return work(piece)


class Commits:
    """The copying half of a put."""

    def __init__(self, parts: Parts, writes: Writes) -> None:
        self._parts = parts
        self._writes = writes
        self._room = parts.room
        self._dram = parts.dram
        self._counters = parts.counters
        self._misses = Misses(parts)
        self._streams = Streams(parts)
        # Set by the store, where it wants to know: blocks are readable that were not.
        self.on_put: Callable[[Space, Sequence[Entry]], None] | None = None

    def commit(
        self,
        session: Session,
        reservation_id: int,
        indices: Sequence[int],
        offsets: Sequence[int],
        progress_offset: int | None = None,
    ) -> bytes | Awaitable[bytes]:
        """Copy blocks from staging into their slots and make them readable: HIT, or MISS where one was deleted.

        Of a durable reservation, when they are on NVMe too, or NOT_DURABLE; they are readable before.
        `progress_offset`: as far as they are filled, which is told there (see `streams`); the others are MISS.
        """
        reservation = session.reservation(reservation_id)
        if len(indices) != len(offsets) or not 0 < len(indices) <= BLOCKS_PER_CALL_MAX:
            raise InvalidArgument("commit needs one staging offset per index, and at least one")
        if session.staging is None:
            raise InvalidArgument("this session has no staging: open it with staging_bytes, or put inline")
        entries = self._writes.take(reservation, indices)
        try:
            sources = [
                session.staging.address_of(offset, entry.size_bytes)
                for offset, entry in zip(offsets, entries, strict=True)
            ]
            progress = None if progress_offset is None else _progress(session.staging, progress_offset)
        except InvalidArgument:
            reservation.open.update(zip(indices, entries, strict=True))
            raise
        address = self._dram.address
        copies = [(address(e.slot), source, e.size_bytes) for e, source in zip(entries, sources, strict=True)]
        if progress is not None:
            reservation.copying += 1
            session.staging.hold()
            return asyncio.shield(self._streamed(session, reservation, indices, entries, copies, progress))
        return self._copy(session, reservation, indices, entries, copies)

    async def _streamed(
        self,
        session: Session,
        reservation: Reservation,
        indices: Sequence[int],
        entries: Sequence[Entry],
        copies: Sequence[Copy],
        progress: Taker,
    ) -> bytes:
        outcomes, position = bytearray([MISS]) * len(entries), 0

        def copied(hashes: Sequence[bytes], seconds: float) -> None:
            nonlocal position
            piece = slice(position, position + len(hashes))
            position = piece.stop  # whatever fails here: what follows are the next blocks
            size_bytes = sum([size for _, _, size in copies[piece]])
            if size_bytes >= MEASURED_COPY_BYTES:
                self._parts.copies.note(size_bytes, seconds)
            outcomes[piece] = self._publish(session, reservation, indices[piece], entries[piece], hashes)

        ended = False
        try:
            stream = Stream(self._streams, progress, copies, lambda: session.ended, copied)
            await self._streams.tasks.keep(stream.run())
            ended = True
        finally:
            if session.staging is not None:
                session.staging.unhold()
            reservation.copying -= not ended
            left = [entry for index, entry in zip(indices, entries, strict=True) if index not in reservation.done]
            self._writes.give_back(session, reservation, left)
        if reservation.durable:
            return await self._persisted(session, reservation, entries, outcomes)
        return self._finish(session, reservation, outcomes)

    def _copy(
        self,
        session: Session,
        reservation: Reservation,
        indices: Sequence[int],
        entries: Sequence[Entry],
        copies: Sequence[Copy],
    ) -> bytes | Awaitable[bytes]:
        total = sum(entry.size_bytes for entry in entries)
        reservation.copying += 1
        if total <= INLINE_COPY_BYTES:
            outcomes = self._publish(session, reservation, indices, entries, memory.copy_and_hash_many(copies))
            if reservation.durable:
                return asyncio.shield(self._persisted(session, reservation, entries, outcomes))
            return self._finish(session, reservation, outcomes)
        staging = session.staging
        if staging is not None:
            staging.hold()
        # A task of its own: a caller that is cancelled must not undo a copy that runs.
        return asyncio.shield(self._copied(session, reservation, indices, entries, copies, total))

    async def _copy_timed(self, copies: Sequence[Copy], total_bytes: int) -> list[bytes]:
        """Copy; what estimates of loads go by learns from it."""
        if total_bytes < MEASURED_COPY_BYTES:
            return await in_copiers(self._parts, memory.copy_and_hash_many, copies, total_bytes)
        clock, times = self._parts.clock, self._parts.copies
        times.began(clock.monotonic())
        try:
            return await in_copiers(self._parts, memory.copy_and_hash_many, copies, total_bytes)
        finally:
            times.ended(total_bytes, clock.monotonic())

    async def _copied(
        self,
        session: Session,
        reservation: Reservation,
        indices: Sequence[int],
        entries: Sequence[Entry],
        copies: Sequence[Copy],
        total_bytes: int,
    ) -> bytes:
        hashes = await self._copy_timed(copies, total_bytes)
        if session.staging is not None:
            session.staging.unhold()
        outcomes = self._publish(session, reservation, indices, entries, hashes)
        if reservation.durable:
            return await self._persisted(session, reservation, entries, outcomes)
        return self._finish(session, reservation, outcomes)

    async def _persisted(
        self, session: Session, reservation: Reservation, entries: Sequence[Entry], outcomes: bytearray
    ) -> bytes:
        """Wait until what was put is on NVMe; the reservation lasts as long, and its chain is touched after it."""
        put = [index for index, outcome in enumerate(outcomes) if outcome == HIT]
        try:
            durable = await self._writes.durability.persist([entries[index] for index in put])
            for index, ok in zip(put, durable, strict=True):
                if not ok:
                    outcomes[index] = MISS if entries[index].state == DEAD else NOT_DURABLE
        finally:
            self._finish(session, reservation, outcomes)
        return bytes(outcomes)

    def _publish(
        self,
        session: Session,
        reservation: Reservation,
        indices: Sequence[int],
        entries: Sequence[Entry],
        content_hashes: Sequence[bytes],
    ) -> bytearray:
        outcomes = bytearray()
        for index, entry, content_hash in zip(indices, entries, content_hashes, strict=True):
            outcomes.append(HIT if self._room.publish(entry, content_hash) else MISS)
            reservation.done[index] = entry
        put = outcomes.count(HIT)
        if self.on_put is not None and put == len(entries):
            self.on_put(reservation.space, entries)
        self._counters["put_blocks"] += put
        self._counters["put_bytes"] += sum(entry.size_bytes for entry in entries)
        self._parts.stats[session.caller.tenant].blocks_put += put
        self._misses.stored(reservation.space, put)
        return outcomes

    def _finish(self, session: Session, reservation: Reservation, outcomes: bytearray) -> bytes:
        reservation.copying -= 1
        self._writes.settle(session, reservation)
        return bytes(outcomes)

    async def streamed(self) -> None:
        """When no streamed commit is under way: soon, where all sessions have ended."""
        await self._streams.tasks.drained()

    # ---- by others ----

    async def fill(
        self,
        session: Session,
        reservation: Reservation,
        indices: Sequence[int],
        entries: Sequence[Entry],
        copying: Awaitable[list[bytes] | None],
    ) -> bytes:
        """Make blocks readable that somebody else copies into their slots, which `take` gave; one outcome each.

        `copying` ends when nothing of the copy runs any more: with the content hashes, or None where it failed. Not to
        be cancelled.
        """
        reservation.copying += 1
        content_hashes = None
        try:
            content_hashes = await copying
        finally:
            if content_hashes is None:
                reservation.copying -= 1
                self._writes.give_back(session, reservation, entries)
        if content_hashes is None:
            return bytes([MISS]) * len(entries)
        outcomes = self._publish(session, reservation, indices, entries, content_hashes)
        if reservation.durable:
            return await self._persisted(session, reservation, entries, outcomes)
        return self._finish(session, reservation, outcomes)

    # ---- inline ----

    async def put_inline(
        self,
        session: Session,
        space: Space,
        hash_: bytes,
        parent: bytes,
        data: bytearray,
        wait_s: float,
        lifetime: Lifetime | None = None,
    ) -> int:
        """Store one block whose bytes came in messages; returns its outcome. Raises SessionEnded."""
        session.check_open()
        reserving = self._writes.reserve(session, space, [hash_], [len(data)], parent, wait_s, lifetime=lifetime)
        reserved = reserving if isinstance(reserving, Reserved) else await reserving
        if not reserved.reservation_id:
            return reserved.outcomes[0]
        reservation = session.reservation(reserved.reservation_id)
        entries = self._writes.take(reservation, [0])
        source = (ctypes.c_char * len(data)).from_buffer(data)
        copies = [(self._dram.address(entries[0].slot), ctypes.addressof(source), len(data))]
        copying = self._copy(session, reservation, [0], entries, copies)
        outcomes = copying if isinstance(copying, bytes) else await copying
        del source
        return outcomes[0]
