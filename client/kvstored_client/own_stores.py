"""Stores by layers that the client copies itself (`shm`), once for both clients.

Slots are reserved when the store begins, and a thread copies each layer of the blocks into the staging ring as it
becomes ready; so the last one leaves its own copy and the commit. That goes for as many leading blocks as find room in
the ring, half of which is left to puts meanwhile; the others are put at the end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Final

from kvstored_proto.layout import Indices

from kvstored_client import putting, threads, whole
from kvstored_client.effects import CONNECT, Verb
from kvstored_client.errors import FAILURES, KVStoredClientError, failure_of
from kvstored_client.layers import AtTheEnd, Range, StoreBegun
from kvstored_client.own_loads import ended
from kvstored_client.paged import PagedKV
from kvstored_client.putting import Put
from kvstored_client.results import Outcome, PutResult
from kvstored_client.verbs import leading
from kvstored_client.writing import Batch, Reservation, reserve

LAYER_MAX_S: Final = 60.0  # a store holds room for so long without getting another layer
NO_MORE_LAYERS: Final = "no further layer was ready in time"  # as the daemon says it, too


def begin(put: Put, kv: PagedKV, ids: Indices, failed: Callable[[str], None]) -> Verb[StoreBegun]:
    """Reserve what can be copied by layers, without waiting; `failed` is told why it is given up."""
    try:
        connection = yield CONNECT
        if connection.carrier is not None or connection.staging is None:
            return AtTheEnd(putting.run(put), put.hashes.length)
        ring, sizes_bytes = connection.staging, put.source.sizes_bytes
        part = leading(connection, put.hashes)
        part = part.part(0, whole.most_blocks(sizes_bytes, ring))
        reservation = yield from reserve(
            put.core, put.namespace, part, sizes_bytes[: part.length], put.parent, 0.0, put.terms
        )
    except FAILURES:  # told at the end, should it still be so
        return AtTheEnd(putting.run(put), put.hashes.length)
    parts: list[Batch] = []
    try:
        parts = whole.room_now(reservation.reserved, sizes_bytes, reservation.ring, ring.size_bytes // 2)
        placed = {i for each in parts for i in each.indices}
        reservation.abort([i for i in reservation.reserved if i not in placed], Outcome.THROTTLED)
    except BaseException:
        _give_up(reservation, parts)
        raise
    staging = LayerStaging(put, kv, ids, reservation, parts, failed)
    try:
        staging.start()
    except FAILURES:
        return AtTheEnd(putting.run(put), put.hashes.length)
    return staging


def _give_up(reservation: Reservation, parts: list[Batch]) -> None:
    reservation.abort(reservation.reserved, Outcome.MISS)
    for part in parts:
        reservation.ring.give_back(part.region)


class LayerStaging:
    """Reserved blocks with room in staging, which a thread fills layer by layer; see `layers.StoreBegun`."""

    def __init__(
        self,
        put: Put,
        kv: PagedKV,
        ids: Indices,
        reservation: Reservation,
        parts: list[Batch],
        failed: Callable[[str], None],
    ) -> None:
        self._put, self._kv, self._ids, self._failed = put, kv, ids, failed
        self._reservation, self._parts = reservation, parts
        self._indices = [i for part in parts for i in part.indices]
        self._news, self._end = threading.Condition(), threading.Event()
        self._ready = self._copied = 0
        self._stopped = False
        self._failure: BaseException | None = None
        self._unused = weakref.finalize(self, _give_up, reservation, parts)
        self._unused.atexit = False

    def start(self) -> None:
        """Let the thread begin. Raises Unavailable, and nothing is held then, where there is none."""
        if not self._parts:
            self._end.set()
            return
        try:
            threads.start(self._run, "kvstored-layers")
        except BaseException:
            self._unused()
            raise

    # ---- the thread ----

    def _run(self) -> None:
        try:
            mapping = self._reservation.ring.mapping  # held while we copy
            offsets = [offset for part in self._parts for offset in part.offsets]
            targets = [mapping.address + offset for offset in offsets]
            while self._copied < self._kv.layers and (ready := self._awaited()):
                place = self._kv.place_of_layers(self._ids, (self._copied, ready))
                place.read(self._indices, targets)
                self._copied = ready
        except FAILURES as error:
            self._failure = failure_of(error)
        except BaseException as error:
            self._failure = error
        finally:
            try:
                if self._copied < self._kv.layers:
                    self._unused()  # nobody waits for its room to come back
            finally:
                self._end.set()

    def _awaited(self) -> int:
        """So many layers are ready, more than are copied; 0: it is given up."""
        with self._news:
            while self._ready <= self._copied and not self._stopped:
                if not self._news.wait(self._put.deadline.left_s(LAYER_MAX_S)):
                    if not self._put.deadline.passed():
                        self._failed(NO_MORE_LAYERS)
                    return 0
            return 0 if self._stopped or self._put.deadline.passed() else self._ready

    # ---- the engine ----

    def ready(self, layers: int) -> None:
        """See `StoreBegun`."""
        with self._news:
            self._ready = layers
            self._news.notify_all()

    def copied(self) -> Range:
        """See `StoreBegun`."""
        layers = self._copied
        return (len(self._indices), layers) if layers and self._indices else (0, 0)

    def stop(self) -> None:
        """Copy nothing more, and come back when nothing copies any more."""
        self._give_notice()
        self._end.wait()

    def _give_notice(self) -> None:
        with self._news:
            self._stopped = True
            self._news.notify_all()

    def finish(self, *, cancel: bool) -> Verb[PutResult]:
        """See `StoreBegun`."""
        if cancel:
            self._give_notice()
        yield from ended(self._end)
        put, reservation = self._put, self._reservation
        if self._failure is not None and not isinstance(self._failure, KVStoredClientError):
            raise self._failure
        if not cancel and self._failure is None and self._unused.alive and not put.deadline.passed():
            if not reservation.connection.alive():  # all of it again, with the next session
                return (yield from putting.run(put))
            self._unused.detach()
            return (yield from putting.run(put, (reservation, self._parts)))
        self._unused()
        put.settle(reservation, 0)
        if isinstance(self._failure, KVStoredClientError):
            put.core.failed_open(self._failure)
            return put.result(self._failure)
        return put.result()
