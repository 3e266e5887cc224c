"""Memory of engines that sessions have registered, and block ids in it."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Final

import msgspec

from kvstored.catalog.leases import Session, Sessions
from kvstored.device.worker_messages import Region
from kvstored.errors import InvalidArgument, LimitExceeded, NotFound
from kvstored.store.copied_by_engines import CopiedByEngines, explained
from kvstored.store.offers import DESCRIPTORS_MAX, Descriptors, Offers
from kvstored.store.tasks import Tasks
from kvstored.tiers.gpu import Gpus, Registration

REGISTRATIONS_MAX: Final = 64  # of one session
FRAGMENTS_MAX: Final = 1 << 16
REGIONS_MAX: Final = 4096
LAYERS_MAX: Final = 4096
SPAN_BYTES_MAX: Final = 1 << 48
ID_BYTES: Final = 4


class Rows(msgspec.Struct, frozen=True):
    """An engine's block ids, packed as 32-bit numbers: `each` for every stored block."""

    ids: bytes
    each: int

    def part(self, start: int, end: int) -> Rows:
        """Those of stored blocks `start` to `end`."""
        width = self.each * ID_BYTES
        return Rows(self.ids[start * width : end * width], self.each)

    def of(self, indices: Sequence[int]) -> bytes:
        """Those of these stored blocks."""
        width = self.each * ID_BYTES
        return b"".join([self.ids[i * width : (i + 1) * width] for i in indices])


class Opened(msgspec.Struct, frozen=True):
    """A session's number for an engine's memory, or 0, why it cannot be opened, and when that may be otherwise."""

    number: int
    reason: str = ""
    retry_after_s: float = 0.0  # 0: not known


class Registrations:
    """Who registered what."""

    def __init__(self, gpus: Gpus, sessions: Sessions) -> None:
        self.gpus = gpus
        self._sessions = sessions
        self.by_engines = CopiedByEngines()
        self.offers = Offers()
        self._descriptors: dict[Registration, Descriptors] = {}
        self.tasks = Tasks()
        self._registered: dict[Session, dict[int, Registration]] = {}

    async def register(
        self,
        session: Session,
        uuid: bytes,
        regions: list[Region],
        fragments: list[tuple[int, int, int, int]],
        blocks: int,
        layers: Sequence[int] = (),
        chunk_bytes: Sequence[int] = (),
        memory: int = 0,
    ) -> Opened:
        """Open an engine's memory. Raises InvalidArgument, LimitExceeded.

        `layers`: how many of the fragments each layer has, in their order; empty: they are one layer.
        `chunk_bytes`: sizes of the chunks whose descriptors were offered under the client's number `memory`.
        """
        descriptors = self.offers.take(session, memory)
        try:
            cuts = self._check(session, regions, fragments, layers, chunk_bytes)
        except BaseException:
            descriptors.close()
            raise
        opening = self._register(session, uuid, regions, fragments, blocks, cuts, list(chunk_bytes), descriptors)
        return await self.tasks.to_its_end(opening)

    def _check(
        self,
        session: Session,
        regions: list[Region],
        fragments: list[tuple[int, int, int, int]],
        layers: Sequence[int],
        chunk_bytes: Sequence[int],
    ) -> list[int]:
        """Where layers begin and end in the fragments. Raises InvalidArgument, LimitExceeded."""
        if len(self._registered.get(session, ())) >= REGISTRATIONS_MAX:
            raise LimitExceeded(f"{REGISTRATIONS_MAX} memories are registered in this session: unregister some")
        if len(fragments) > FRAGMENTS_MAX or len(regions) > REGIONS_MAX:
            raise InvalidArgument(
                f"{len(fragments)} fragments of {len(regions)} regions: {FRAGMENTS_MAX} of {REGIONS_MAX} are allowed"
            )
        cuts = [0, *itertools.accumulate(layers or [len(fragments)])]
        if cuts[-1] != len(fragments) or len(cuts) > LAYERS_MAX + 1 or (layers and min(layers) < 1):
            raise InvalidArgument(f"{len(cuts) - 1} layers of {cuts[-1]} fragments: there are {len(fragments)}")
        if len(chunk_bytes) > DESCRIPTORS_MAX or max(chunk_bytes, default=0) > SPAN_BYTES_MAX:
            raise InvalidArgument(f"{len(chunk_bytes)} chunks: {DESCRIPTORS_MAX} are allowed, none over 256 TiB")
        return cuts

    async def _register(
        self,
        session: Session,
        uuid: bytes,
        regions: list[Region],
        fragments: list[tuple[int, int, int, int]],
        blocks: int,
        cuts: list[int],
        chunk_bytes: list[int],
        descriptors: Descriptors,
    ) -> Opened:
        if chunk_bytes and len(descriptors.fds) != len(chunk_bytes):
            held = len(descriptors.fds)
            descriptors.close()
            return Opened(0, f"{held} descriptors came for {len(chunk_bytes)} chunks: the daemon has no room for more")
        made, error = await self.gpus.register(uuid, regions, fragments, blocks, chunk_bytes, descriptors.fds)
        if made is None:
            descriptors.close()
            return Opened(0, explained(error, session.caller), self.gpus.devices.retry_after_s(uuid))
        self._descriptors[made] = descriptors
        if session.ended:
            await self._let_go(made)
            return Opened(0, "the session ended")
        number = self._sessions.new_id(session.caller.tenant)
        mine = self._registered.setdefault(session, {})
        made.cuts = cuts
        made.owner = next((each.owner for each in mine.values()), made.number)
        mine[number] = made
        return Opened(number)

    async def unregister(self, session: Session, number: int) -> None:
        """When this returns nothing here uses or holds the memory. Raises NotFound."""
        made = self._registered.get(session, {}).pop(number, None)
        if made is None:
            raise NotFound(f"registration {number} is not open in this session")
        await self.tasks.to_its_end(self._let_go(made))

    async def _let_go(self, made: Registration) -> None:
        made.ended = True  # no worker is told of it again
        self._descriptors.pop(made).close()
        await self.gpus.unregister(made)

    def end_session(self, session: Session) -> None:
        """Let go of all that a session registered, as soon as nothing copies from or to it."""
        self.by_engines.end_session(session)
        self.offers.end_session(session)
        for made in self._registered.pop(session, {}).values():
            made.ended = True
            self.tasks.keep(self._let_go(made))

    def of(self, session: Session, number: int, ids: bytes, keys: int) -> tuple[Registration, Rows]:
        """The registration and the block ids of a call. Raises NotFound, InvalidArgument."""
        made = self._registered.get(session, {}).get(number)
        if made is None:
            raise NotFound(f"registration {number} is not open in this session")
        count, rest = divmod(len(ids), ID_BYTES)
        if rest or not count or not keys or count % keys:
            raise InvalidArgument(f"{len(ids)} bytes of block ids for {keys} hashes: each needs as many")
        largest = max(array("I", ids))
        if largest >= made.blocks:
            raise InvalidArgument(f"block id {largest}: the memory has {made.blocks} blocks")
        return made, Rows(ids, count // keys)
