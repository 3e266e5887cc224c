"""Puts whose blocks the daemon takes while the next ones are copied (see `kvstored_proto.progress`).

They go through a few places in the staging ring, again and again, which stay in the CPU's cache: so a put takes hardly
longer than a copy. The first places are filled while the daemon finds slots, as if it had none of the blocks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Self

from kvstored_proto import progress
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored_client import buffers as memory
from kvstored_client.connection import Connection
from kvstored_client.core import Core
from kvstored_client.effects import Verb, Work, finish
from kvstored_client.results import Outcome
from kvstored_client.staging import ALIGN_BYTES, Region, StagingRing, aligned
from kvstored_client.writing import Reservation

STREAM_FROM_BYTES = 4 << 20  # less is put at once: nothing of it would overlap
WINDOW_BYTES: Final = 8 << 20  # of places: they stay in the cache that all CPUs share
# The daemon is told of a block when some more are filled after it, 2 MiB mostly. To read what is in the own cache of
# the CPU that fills is slow, for both: without this, most puts of 256 MiB took 25 ms instead of 18 (a copy takes 12).
LAG_PART: Final = 4  # a quarter of the places
GROUP_BYTES: Final = 512 << 10  # small blocks are filled so many at a time
RING_PART: Final = 4  # a put takes no more than a quarter of the ring: several are in flight
PLACES_MIN: Final = 4  # one being filled, one being taken, and between them what the daemon is not told of yet
WORK_BYTES: Final = 32 << 20  # between two looks at whether the caller still wants it
LOOK_S: Final = 0.02  # while the daemon takes nothing: whether it is still there
LAST_WORD_S: Final = 0.25  # for the answer of a daemon that takes nothing any more


class Stream:
    """Places in the ring, and the blocks that go through them in order."""

    def __init__(
        self,
        connection: Connection,
        ring: StagingRing,
        region: Region,
        stride: int,
        source: memory.Place,
    ) -> None:
        """`region`: a page in which both sides say how far they are, then places, `stride` bytes each.

        Raises Unavailable where the ring cannot be mapped.
        """
        self._connection, self._ring, self._source = connection, ring, source
        self._mapping = ring.mapping  # stays mapped as long as this is used
        self._regions = [region]  # until it is given back, which several threads may be about to do
        self._sent = self._answered = self._left = False
        self._wipes = connection.staging_wipes  # as far as is known here
        self.progress_offset = region.offset
        self._places = range(region.offset + ALIGN_BYTES, region.offset + region.size_bytes, stride)
        self._lag = len(self._places) // LAG_PART
        self._group = max(1, min(GROUP_BYTES // stride, self._lag))
        self._filler = progress.Filler(self._mapping.address + region.offset)
        self._blocks: Sequence[int] = range(len(source.sizes_bytes))
        self.filled = 0

    @classmethod
    def of(cls, connection: Connection, source: memory.Place) -> Self | None:
        """For these blocks; None where they are too few, or too large, or there is no room in the ring now."""
        ring, sizes_bytes = connection.staging, source.sizes_bytes
        if ring is None or progress.FEATURE not in connection.opened.features or sum(sizes_bytes) <= STREAM_FROM_BYTES:
            return None
        stride = aligned(max(sizes_bytes))
        most_bytes = ring.size_bytes // RING_PART
        places = max(PLACES_MIN, min(WINDOW_BYTES, most_bytes) // stride)
        if places * stride > most_bytes:
            return None
        region = ring.take(ALIGN_BYTES + places * stride)
        if region is None:
            return None
        try:
            return cls(connection, ring, region, stride, source)
        except BaseException:
            ring.give_back(region)
            raise

    def fill_ahead(self) -> Verb[None]:
        """Fill all places on a guess."""
        until = min(len(self._places), len(self._blocks))
        yield Work(partial(self._fill, until, 0.0), self._bytes(0, until))

    def begin(self, blocks: Sequence[int], wipes: int) -> None:
        """These are wanted; what was filled counts where it is of the first of them, and the ring was not wiped since.

        `wipes`: how often it was, as the answer to the reservation says.
        """
        if wipes != self._wipes or list(self._blocks[: self.filled]) != list(blocks[: self.filled]):
            self._filler.reset()
            self.filled = 0
        self._blocks = blocks
        self._tell()

    @property
    def offsets(self) -> list[int]:
        """Where in the ring each block will lie."""
        places = list(self._places)
        times = -(-len(self._blocks) // len(places))
        return (places * times)[: len(self._blocks)]

    def fill(self, patience_s: float) -> Verb[bool]:
        """Fill all blocks, each once its place is free. False: the daemon took none for too long."""
        while self.filled < len(self._blocks):
            until = self.filled + max(self._group, WORK_BYTES // self._places.step)
            until = min(until, len(self._blocks))
            if not (yield Work(partial(self._fill, until, patience_s), self._bytes(self.filled, until))):
                return False
        return True

    def _bytes(self, first: int, end: int) -> int:
        return self._places.step * (end - first)

    def _fill(self, until: int, patience_s: float) -> bool:
        places = self._places
        while self.filled < until:
            round_end = (self.filled // len(places) + 1) * len(places)  # the places of a group follow one another
            end = min(until, self.filled + self._group, round_end)
            if not self._room(end - len(places), patience_s):
                return False
            targets = [self._mapping.address + places[i % len(places)] for i in range(self.filled, end)]
            self._source.read(self._blocks[self.filled : end], targets)
            self.filled = end
            self._tell()
        return True

    def _tell(self) -> None:
        self._filler.fill(self.filled if self.filled == len(self._blocks) else max(0, self.filled - self._lag))

    def _room(self, needed: int, patience_s: float) -> bool:
        """Wait until so many blocks are taken. False: not one was for so long, or the daemon is gone."""
        taken, give_up_s = self._filler.taken(), 0.0
        while taken < needed:
            now_s = time.monotonic()
            give_up_s = give_up_s or now_s + patience_s
            if self._answered or now_s >= give_up_s or not self._connection.alive():
                return False
            self._filler.wait(taken, min(LOOK_S, give_up_s - now_s))
            before, taken = taken, self._filler.taken()
            if taken != before:
                give_up_s = 0.0
        return True

    def end(self) -> None:
        """Nothing more is to be taken."""
        if self._connection.error is None:  # a forked child has no ring
            self._filler.end()

    def sent(self) -> Callable[[], None]:
        """The places are the daemon's too from now on, until the result is called: it has answered."""
        self._sent = True
        return self._settled

    def _settled(self) -> None:
        self._answered = True
        if self._left:
            self._give_back()

    def leave(self) -> None:
        """Nothing of it is used here any more: the places go back once the daemon has answered, or now."""
        if self._sent and not self._answered:
            self.end()
        self._left = True
        if self._answered or not self._sent:
            self._give_back()

    def _give_back(self) -> None:
        with contextlib.suppress(IndexError):  # another thread was faster
            self._ring.give_back(self._regions.pop())


def put(core: Core, reservation: Reservation, stream: Stream) -> Verb[None]:
    """Fill the reserved blocks, and wait until they are readable. `stream.leave` must follow."""
    reserved, connection = reservation.reserved, reservation.connection
    if not reserved:
        return
    stream.begin(reserved, reservation.staging_wipes)
    request = pb.CommitRequest(
        reservation_id=reservation.reservation_id,
        indices=reserved,
        staging_offsets=stream.offsets,
        streamed=True,
        progress_offset=stream.progress_offset,
    )
    settled = stream.sent()
    try:
        ticket = connection.start(pb.OPERATION_COMMIT, request, settled=settled)
    except BaseException:
        if connection.error is None:  # it was not sent, and nobody will answer
            settled()
        raise
    for i in reserved:
        reservation.final[i] = Outcome.MISS  # until the reply says otherwise
    try:
        filled = yield from stream.fill(core.timeout_s())
        if not filled:
            stream.end()
        limit_s = core.timeout_s() if filled else LAST_WORD_S
        reply = yield from finish(connection, ticket, pb.CommitReply, limit_s)
    except BaseException:  # closed here, too
        connection.abandon(ticket)
        raise
    reservation.learn(reserved, reply.outcomes)
