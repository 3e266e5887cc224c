"""Blocks written straight into staging: reserve, fill the views, commit; or leave, which aborts."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Final

from kvstored_client.core import Core
from kvstored_client.effects import Verb
from kvstored_client.errors import FAILURES, KVStoredClientError, failure_of
from kvstored_client.keys import Packed
from kvstored_client.namespace import Namespace
from kvstored_client.results import Outcome, PutResult
from kvstored_client.terms import Terms
from kvstored_client.writing import Batch, Reservation, batches, commit_all, place, reserve

# Nothing is copied here between commits, so they are large, and handed over at once: the daemon spreads each over its
# threads, and between two of them these change places (with 32 MiB, four in flight, 256 MiB took a tenth longer).
BATCH_BYTES: Final = 64 << 20
COMMITS_IN_FLIGHT: Final = 16

# What a reservation holds, and its places in the ring; None: the daemon did not answer.
Reserved = tuple[Reservation | None, list[Batch]]


class Staged:
    """Reserved blocks and where their bytes go.

    `views[i]` is a writable memoryview of block i, or None where nothing is to be written: it is
    stored already, another session is writing it, or there is no room; `outcomes[i]` says which.
    Fill every view before `commit`. Views are invalid after it; a numpy array or tensor made from
    one must not be written to any more either, since its memory goes to the next put.
    """

    def __init__(self, reserved: Reserved, count: int) -> None:
        reservation, parts = reserved
        self.outcomes = list(reservation.final) if reservation else [Outcome.MISS] * count
        self.views: list[memoryview | None] = [None] * count
        self._reservation = reservation
        self._parts = parts
        self._result: PutResult | None = None
        self._abort = weakref.finalize(self, _abort, reservation, parts)
        self._abort.atexit = False
        self._failure: KVStoredClientError | None = None
        if reservation is not None and parts:
            try:
                self._lay_out(reservation)
            except FAILURES as error:  # no memory, or the session has ended
                self._failure = failure_of(error)
                self.abort()
                self.outcomes = [Outcome.MISS if o is Outcome.RESERVED else o for o in self.outcomes]

    def _lay_out(self, reservation: Reservation) -> None:
        mapping = reservation.ring.mapping
        for part in self._parts:
            for i, offset in zip(part.indices, part.offsets, strict=True):
                self.views[i] = mapping.view(offset, reservation.sizes_bytes[i])

    def __len__(self) -> int:
        return len(self.outcomes)

    def abort(self) -> None:
        """Give everything back unwritten. Nothing happens after a commit, or a second time."""
        self._release_views()
        self._abort()

    def take_for_commit(self) -> tuple[Reservation, list[Batch]] | None:
        """For `commit`: what there is to commit, once."""
        self._release_views()
        if self._abort.detach() is None or self._reservation is None:
            return None
        return self._reservation, self._parts

    def finished(self, result: PutResult) -> PutResult:
        """For `commit`: keep its result."""
        self._result = result
        return result

    @property
    def result(self) -> PutResult:
        """The commit's result; before it, or after an abort: nothing stored."""
        if self._result is not None:
            return self._result
        final = [Outcome.MISS if o is Outcome.RESERVED else o for o in self.outcomes]
        return PutResult.of(final, 0, error=self._failure)

    def _release_views(self) -> None:
        for view in self.views:
            if view is not None:
                try:
                    view.release()
                except BufferError:  # in use by something that the caller made from it
                    pass
        self.views = [None] * len(self.outcomes)


def _abort(reservation: Reservation | None, parts: Sequence[Batch]) -> None:
    if reservation is not None:
        reservation.abort(reservation.reserved, Outcome.MISS)
        for part in parts:
            reservation.ring.give_back(part.region)


def reserve_staged(
    core: Core,
    namespace: Namespace,
    hashes: Packed,
    block_bytes: int,
    parent: bytes,
    wait_s: float,
    terms: Terms,
) -> Verb[Reserved]:
    """Reserve, and find room in the ring. Blocks for which it has none are given back as NO_ROOM."""
    sizes_bytes = [block_bytes] * hashes.length
    reservation = yield from reserve(core, namespace, hashes, sizes_bytes, parent, wait_s, terms)
    parts: list[Batch] = []
    placed = False
    try:
        reserved = reservation.reserved
        for indices in batches(reserved, sizes_bytes, reservation.ring, BATCH_BYTES) if reserved else ():
            part = place(indices, sizes_bytes, reservation.ring)
            if part is None:
                reservation.abort([i for i in reserved if i >= indices[0]], Outcome.NO_ROOM)
                break
            parts.append(part)
        placed = True
    finally:
        if not placed:
            _abort(reservation, parts)
    if Outcome.THROTTLED in reservation.final:
        core.stats.throttled += 1
    return reservation, parts


def commit_staged(core: Core, staged: Staged) -> Verb[PutResult]:
    """Hand the filled blocks to the daemon; readable when this answers."""
    taken = staged.take_for_commit()
    if taken is None:
        return staged.result
    reservation, parts = taken
    waiting = list(parts)
    failure: KVStoredClientError | None = None
    try:
        yield from commit_all(core, reservation, waiting, COMMITS_IN_FLIGHT)
    except FAILURES as error:
        failure = core.failed_open(error)
    finally:
        reservation.settle()
        for part in waiting:
            reservation.ring.give_back(part.region)
        core.stats.blocks_stored += reservation.stored
        core.stats.bytes_stored += reservation.stored_bytes
    final, stored = reservation.final, reservation.stored
    return staged.finished(PutResult.of(final, stored, durable=reservation.durable, error=failure))
