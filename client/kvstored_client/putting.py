"""Putting blocks from the caller's buffers, once for both clients (see `effects`).

Most are streamed (see `streaming`). What is durable, or little, or goes to a daemon that does not know that, is put in
batches of about 4 MiB: while the daemon copies and hashes one, the next is copied into staging.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvstored_client import buffers as memory
from kvstored_client import streaming, whole
from kvstored_client.connection import Connection
from kvstored_client.core import Core
from kvstored_client.deadline import NEVER, Deadline
from kvstored_client.effects import CONNECT, Sleep, Verb, Work
from kvstored_client.errors import FAILURES, KVStoredClientError
from kvstored_client.keys import Packed
from kvstored_client.namespace import Namespace
from kvstored_client.results import Outcome, PutResult
from kvstored_client.staged import COMMITS_IN_FLIGHT as STAGED_COMMITS_IN_FLIGHT
from kvstored_client.staging import StagingRing, aligned
from kvstored_client.streaming import Stream
from kvstored_client.terms import Terms
from kvstored_client.verbs import leading
from kvstored_client.writing import (
    COMMITS_IN_FLIGHT,
    DURABLE_COMMITS_IN_FLIGHT,
    Batch,
    Reservation,
    batches,
    collect,
    commit_all,
    place,
    reserve,
    start_commit,
)

_DURABLE_PAUSE_S: Final = 0.05
_PAUSE_MIN_S: Final = 0.001
_PAUSE_MAX_S: Final = 0.05


@dataclass(slots=True)
class Put:
    """Blocks that are to be stored, and what became of each."""

    core: Core
    namespace: Namespace
    hashes: Packed
    source: memory.Place
    parent: bytes
    wait_s: float
    terms: Terms
    deadline: Deadline = NEVER
    final: list[Outcome] = field(init=False)
    stored: int = 0
    throttled: bool = False  # no copies on a guess any more

    def __post_init__(self) -> None:
        self.final = [Outcome.MISS] * self.hashes.length

    def before(self, start: int) -> bytes:
        """The parent of block `start`."""
        return self.hashes.one(start - 1) if start else self.parent

    def settle(self, reservation: Reservation, start: int) -> None:
        """No more becomes of these blocks, the first of which is `start`."""
        reservation.settle()
        self.final[start : start + len(reservation.final)] = reservation.final
        self.stored += reservation.stored
        self.core.stats.blocks_stored += reservation.stored
        self.core.stats.bytes_stored += reservation.stored_bytes

    def result(self, error: KVStoredClientError | None = None) -> PutResult:
        """As it is now."""
        durable = self.terms.want_nvme(self.namespace.terms)
        return PutResult.of(self.final, self.stored, durable=durable, error=error)


def run(put: Put, staged: tuple[Reservation, list[Batch]] | None = None) -> Verb[PutResult]:
    """Store blocks. What was stored before a failure counts; the rest is refused.

    `staged`: a reservation of the leading blocks, and batches of it that lie in staging already.
    """
    failure: KVStoredClientError | None = None
    try:
        start = 0 if staged is None else (yield from _commit_staged(put, *staged))
        yield from _put_parts(put, start)
    except FAILURES as error:
        failure = put.core.failed_open(error)
    return put.result(failure)


def _commit_staged(put: Put, reservation: Reservation, parts: list[Batch]) -> Verb[int]:
    """The first block that is still to be put, afterwards."""
    try:
        yield from commit_all(put.core, reservation, parts, STAGED_COMMITS_IN_FLIGHT)
    finally:
        whole.give_back(reservation.ring, parts)
        put.settle(reservation, 0)
    again = first_to_retry(put.core, reservation.final)
    return len(reservation.final) if again is None else again


def _put_parts(put: Put, start: int) -> Verb[None]:
    """One reservation after the other; throttled blocks again, while `wait_s` lasts."""
    core, hashes, deadline_s = put.core, put.hashes, time.monotonic() + put.wait_s
    while start < hashes.length and not put.deadline.passed():
        connection: Connection = yield CONNECT
        part = leading(connection, hashes.part(start, hashes.length))
        if connection.carrier is not None:
            again = yield from _put_inline(put, connection, part, start)
            start = start + part.length if again is None else start + again
            if again is not None:
                if time.monotonic() + _PAUSE_MAX_S > deadline_s:
                    return
                yield Sleep(_PAUSE_MAX_S)
            continue
        if put.deadline.limited and connection.staging is not None:
            part = part.part(0, whole.most_blocks(put.source.sizes_bytes[start:], connection.staging))
        left_s = put.deadline.left_s(max(0.0, deadline_s - time.monotonic()))
        reservation = yield from _put_part(put, part, left_s, start)
        again = first_to_retry(core, reservation.final)
        if again is None:
            start += part.length
            continue
        put.throttled = True
        pause_s = max(_DURABLE_PAUSE_S if reservation.durable else _PAUSE_MIN_S, reservation.retry_after_s)
        if time.monotonic() + pause_s > deadline_s:
            return
        yield Sleep(pause_s)
        start += again


def _put_inline(put: Put, connection: Connection, part: Packed, start: int) -> Verb[int | None]:
    """One stream of blocks inside of messages; the first block that may be stored if it is put again."""
    from kvstored_client import inline

    final = [Outcome.MISS] * part.length
    place = put.source.part(start, start + part.length)
    stored = yield from inline.put(put, connection, part, place, put.before(start), final)
    put.stored += stored
    put.final[start : start + part.length] = final
    return first_to_retry(put.core, final)


def _put_part(put: Put, part: Packed, wait_s: float, start: int) -> Verb[Reservation]:
    """One reservation; what became of it is in `put`, however it ends."""
    core, source = put.core, put.source.part(start, start + part.length)
    streamed = not put.deadline.limited and not put.terms.want_nvme(put.namespace.terms)
    stream: Stream | None = None

    def ahead(connection: Connection) -> Verb[None]:
        nonlocal stream
        stream = Stream.of(connection, source) if streamed else None
        if stream is not None and not put.throttled:
            yield from stream.fill_ahead()

    try:
        reservation = yield from reserve(
            *(core, put.namespace, part, source.sizes_bytes, put.before(start), wait_s, put.terms), meanwhile=ahead
        )
        try:
            if put.deadline.limited:
                yield from whole.fill(core, reservation, source, put.deadline)
            elif stream is not None:
                yield from streaming.put(core, reservation, stream)
            else:
                yield from _fill(core, reservation, source)
        finally:
            put.settle(reservation, start)
        return reservation
    finally:
        if stream is not None:
            stream.leave()


def first_to_retry(core: Core, final: Sequence[Outcome]) -> int | None:
    """The first block that may be stored if it is put again; counts the throttled call."""
    throttled = Outcome.THROTTLED in final
    core.stats.throttled += throttled
    if not throttled and Outcome.NOT_DURABLE not in final:  # nearly always
        return None
    return next((i for i, each in enumerate(final) if each in (Outcome.THROTTLED, Outcome.NOT_DURABLE)), None)


def _fill(core: Core, reservation: Reservation, source: memory.Place) -> Verb[None]:
    """Copy into staging and commit, batch by batch."""
    reserved = reservation.reserved
    if not reserved:
        return
    ring = reservation.ring
    in_flight = DURABLE_COMMITS_IN_FLIGHT if reservation.durable else COMMITS_IN_FLIGHT
    for indices in batches(reserved, reservation.sizes_bytes, ring):
        batch = yield from _room(core, reservation, indices)
        if batch is None:
            reservation.abort(reservation.reserved, Outcome.THROTTLED)
            break
        yield from _copied(reservation, batch, source)
        start_commit(reservation, batch)
        yield from collect(core, reservation, in_flight - 1)
    yield from collect(core, reservation, 0)


def _copied(reservation: Reservation, batch: Batch, source: memory.Place) -> Verb[None]:
    copied = False
    try:
        work = partial(_copy_in, reservation.ring, batch, source)
        yield Work(work, sum(reservation.sizes_bytes[i] for i in batch.indices))
        copied = True
    finally:
        if not copied:
            reservation.ring.give_back(batch.region)


def _room(core: Core, reservation: Reservation, indices: list[int]) -> Verb[Batch | None]:
    """Room in the ring, which other threads' puts may fill for a moment; None where it does not come."""
    give_up_s = time.monotonic() + core.timeout_s()
    pause_s = _PAUSE_MIN_S
    while True:
        batch = place(indices, reservation.sizes_bytes, reservation.ring)
        if batch is not None:
            return batch
        if reservation.in_flight:
            yield from collect(core, reservation, len(reservation.in_flight) - 1)
            continue
        too_large = sum(aligned(reservation.sizes_bytes[i]) for i in indices) > reservation.ring.size_bytes
        if too_large or time.monotonic() >= give_up_s:
            return None
        yield Sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)


def _copy_in(ring: StagingRing, batch: Batch, source: memory.Place) -> None:
    mapping = ring.mapping
    source.read(batch.indices, [mapping.address + offset for offset in batch.offsets])
