"""What puts consist of, once for both clients (see `effects`): reserve, room in staging, commit.

A region of the ring is free again when the reply to its commit has come, and not before, however
long ago its caller gave up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored_client.connection import Connection
from kvstored_client.core import Core
from kvstored_client.effects import CONNECT, Verb, finish
from kvstored_client.errors import Unavailable
from kvstored_client.hinting import of_put
from kvstored_client.keys import Packed
from kvstored_client.namespace import Namespace
from kvstored_client.results import Outcome, outcomes
from kvstored_client.staging import Region, StagingRing, aligned
from kvstored_client.terms import Terms
from kvstored_client.tickets import Ticket
from kvstored_client.verbs import check_knows_durability, check_knows_ttl, check_seeded, milliseconds, namespace_ids

# Two of them in flight stay in cache until the daemon has taken them. Twice the size cost less CPU time (44 instead of
# 50 ms of both sides for 256 MiB), but the put took a tenth longer where memory is fast.
BATCH_BYTES: Final = 4 << 20
LONG_COPY_BYTES: Final = 2 << 20  # the daemon copies and hashes longer than a thread looks for a reply without sleeping
COMMITS_IN_FLIGHT: Final = 2
DURABLE_COMMITS_IN_FLIGHT: Final = 16  # they wait for NVMe, and those that wait together share one write there
DURABLE_TIMEOUT_S: Final = 10.0  # on top of the usual: what a slow drive may take
DURABILITIES: Final = {None: pb.DURABILITY_UNSPECIFIED, "memory": pb.DURABILITY_MEMORY, "nvme": pb.DURABILITY_NVME}


@dataclass(slots=True)
class Batch:
    """Consecutive reserved blocks that lie in one region of the ring."""

    indices: list[int]  # in the reserve call
    region: Region
    offsets: list[int]  # in the ring


@dataclass(slots=True)
class Reservation:
    """Slots that are held for this session's blocks, and what has become of each."""

    connection: Connection
    reservation_id: int
    sizes_bytes: Sequence[int]
    final: list[Outcome]
    retry_after_s: float = 0.0
    durable: bool = False
    staging_wipes: int = 0  # how often the ring had been made zeros when this was answered
    stored: int = 0
    stored_bytes: int = 0
    in_flight: deque[tuple[Ticket, Batch]] = field(default_factory=deque)

    @property
    def ring(self) -> StagingRing:
        """The session's staging. Raises Unavailable where the daemon granted none."""
        if self.connection.staging is None:
            raise Unavailable("the daemon granted no staging memory: nothing can be put")
        return self.connection.staging

    @property
    def reserved(self) -> list[int]:
        """Indices of the blocks that still want their bytes."""
        return [i for i, each in enumerate(self.final) if each is Outcome.RESERVED]

    def learn(self, indices: Sequence[int], packed: bytes) -> None:
        """What became of these blocks, in order, as the answer to their commit says."""
        found = outcomes(packed[: len(indices)])
        first, end = (indices[0], indices[-1] + 1) if indices else (0, 0)
        # As mostly, and sooner than one by one.
        if len(found) == len(indices) == end - first == found.count(Outcome.HIT):
            self.final[first:end] = found
            self.stored += len(found)
            self.stored_bytes += sum(self.sizes_bytes[first:end])
            return
        for i, each in zip(indices, found, strict=False):
            self.final[i] = each
            if each is Outcome.HIT:
                self.stored += 1
                self.stored_bytes += self.sizes_bytes[i]

    def settle(self) -> None:
        """Whatever is unfinished ends here: replies nobody waits for, slots nobody fills."""
        for ticket, _ in self.in_flight:
            self.connection.abandon(ticket)
        self.in_flight.clear()
        self.abort(self.reserved, Outcome.MISS)

    def abort(self, indices: list[int], become: Outcome) -> None:
        """Give these slots back."""
        if not indices:
            return
        for i in indices:
            self.final[i] = become
        self.connection.post(pb.OPERATION_ABORT, pb.AbortRequest(reservation_id=self.reservation_id, indices=indices))


def reserve(
    core: Core,
    namespace: Namespace,
    hashes: Packed,
    sizes_bytes: Sequence[int],
    parent: bytes,
    wait_s: float,
    terms: Terms,
    meanwhile: Callable[[Connection], Verb[None]] | None = None,
) -> Verb[Reservation]:
    """Ask for slots, for no more blocks than one call carries; `meanwhile` is done before the answer is looked at.

    Raises Refused where durability cannot be had.
    """
    check_seeded(hashes)
    connection = yield CONNECT
    durable = terms.want_nvme(namespace.terms)
    if durable:
        check_knows_durability(connection)
    if terms.ttl_s:
        check_knows_ttl(connection)
    (namespace_id,) = yield from namespace_ids(core, connection, [namespace])
    equal = min(sizes_bytes) == max(sizes_bytes)
    request = pb.ReserveRequest(
        namespace_id=namespace_id,
        hashes=hashes.data,
        hash_bytes=hashes.hash_bytes,
        parent=parent,
        block_bytes=sizes_bytes[0] if equal else 0,
        sizes_bytes=() if equal else sizes_bytes,
        wait_ms=milliseconds(wait_s),
        durability=DURABILITIES[terms.durability],
        ttl_ms=terms.ttl_ms,
        sliding_ttl=terms.sliding,
        hints=of_put(terms.hint),
    )
    late = partial(_abort_late, connection)
    limit_s = core.timeout_s(wait_s) + (DURABLE_TIMEOUT_S if durable else 0.0)
    ticket = connection.start(pb.OPERATION_RESERVE, request, late)
    try:
        if meanwhile is not None:
            yield from meanwhile(connection)
        reply = yield from finish(connection, ticket, pb.ReserveReply, limit_s)
    except BaseException:  # closed here, too
        connection.abandon(ticket)
        raise
    if len(reply.outcomes) != hashes.length:
        _abort_late(connection, reply.SerializeToString())
        raise Unavailable(f"{len(reply.outcomes)} outcomes for {hashes.length} blocks")
    connection.staging_wipes = reply.staging_wipes
    final, retry_after_s = outcomes(reply.outcomes), reply.retry_after_ms / 1000.0
    wipes = reply.staging_wipes
    return Reservation(connection, reply.reservation_id, sizes_bytes, final, retry_after_s, durable, wipes)


def _abort_late(connection: Connection, body: bytes) -> None:
    reservation_id = pb.ReserveReply.FromString(body).reservation_id
    if reservation_id:
        connection.post(pb.OPERATION_ABORT, pb.AbortRequest(reservation_id=reservation_id))


def batches(
    indices: Iterable[int], sizes_bytes: Sequence[int], ring: StagingRing, batch_bytes: int = BATCH_BYTES
) -> Iterator[list[int]]:
    """Cut into lists of about `batch_bytes`, and of no more than a quarter of a small ring: several are in flight."""
    limit = min(batch_bytes, ring.size_bytes // 4)
    batch: list[int] = []
    filled = 0
    for i in indices:
        size = aligned(sizes_bytes[i])
        if batch and filled + size > limit:
            yield batch
            batch, filled = [], 0
        batch.append(i)
        filled += size
    if batch:
        yield batch


def place(indices: list[int], sizes_bytes: Sequence[int], ring: StagingRing, spare_bytes: int = 0) -> Batch | None:
    """Room in the ring for these blocks, or None when there is none now; `spare_bytes` as of `StagingRing.take`."""
    strides = [aligned(sizes_bytes[i]) for i in indices]
    region = ring.take(sum(strides), spare_bytes)
    if region is None:
        return None
    offsets, offset = [], region.offset
    for stride in strides:
        offsets.append(offset)
        offset += stride
    return Batch(indices, region, offsets)


def start_commit(reservation: Reservation, batch: Batch) -> None:
    """Hand a filled batch to the daemon."""
    request = pb.CommitRequest(
        reservation_id=reservation.reservation_id, indices=batch.indices, staging_offsets=batch.offsets
    )
    settled = partial(reservation.ring.give_back, batch.region)
    ticket = reservation.connection.start(pb.OPERATION_COMMIT, request, settled=settled)
    ticket.long = batch.region.size_bytes > LONG_COPY_BYTES
    reservation.in_flight.append((ticket, batch))
    for i in batch.indices:
        reservation.final[i] = Outcome.MISS  # until the reply says otherwise


def collect(core: Core, reservation: Reservation, at_most: int) -> Verb[None]:
    """Wait until no more than `at_most` commits are in flight."""
    limit_s = core.timeout_s() + (DURABLE_TIMEOUT_S if reservation.durable else 0.0)
    while len(reservation.in_flight) > at_most:
        ticket, batch = reservation.in_flight.popleft()
        reply = yield from finish(reservation.connection, ticket, pb.CommitReply, limit_s)
        reservation.learn(batch.indices, reply.outcomes)


def commit_all(core: Core, reservation: Reservation, parts: list[Batch], at_once: int) -> Verb[None]:
    """Commit filled batches, `at_once` in flight. Those that are left in `parts` when this fails are the caller's."""
    while parts:
        start_commit(reservation, parts[0])
        del parts[0]  # from here on its region comes back with the reply
        yield from collect(core, reservation, at_once - 1)
    yield from collect(core, reservation, 0)
