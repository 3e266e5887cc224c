"""Whole prefixes between DRAM and an engine's memory on a GPU: registered memory, load and store.

A block that a device reads or writes is held by the transfer itself, not by its session: a session
may end at any moment, and the copy goes on until the device worker says that it is over, or is dead.
Only then are slots let go of, and only what was copied whole is committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from kvstored.catalog.catalog import Entry, Space
from kvstored.catalog.leases import Session
from kvstored.device.worker_messages import TELLS_BLOCKS, TELLS_LAYERS
from kvstored.lifetime import Lifetime
from kvstored.store.answers import runs_of
from kvstored.store.commits import Commits
from kvstored.store.gpu_loads import Loaded, Loads
from kvstored.store.hashes_behind import HashesBehind
from kvstored.store.outcomes import HIT, NOT_DURABLE
from kvstored.store.parts import Parts
from kvstored.store.reads import Reads
from kvstored.store.registrations import Registrations, Rows
from kvstored.store.tasks import Tasks
from kvstored.store.transfer_marks import LayersTold, Terms, Under, UnderWay
from kvstored.store.writes import Reserved, Writes
from kvstored.tiers.gpu import Gpus, How, Registration, Runs


class Stored(msgspec.Struct):
    """What came of a store: an outcome a block, which were written, and the error where a copy failed."""

    outcomes: bytes
    written: bytes
    size_bytes: int
    retry_after_ms: int = 0
    error: str = ""


class Transfers:
    """The part of the store that GPUs use."""

    def __init__(self, parts: Parts, reads: Reads, writes: Writes, commits: Commits, gpus: Gpus) -> None:
        self._parts = parts
        self._reads = reads
        self._writes = writes
        self._commits = commits
        self.gpus = gpus
        self.registrations = Registrations(gpus, parts.sessions)
        self._under_way = UnderWay()
        self._tasks = Tasks()
        self._loads = Loads(parts, reads, gpus, self._tasks)

    # ---- load ----

    async def load(
        self,
        session: Session,
        space: Space,
        hashes: Sequence[bytes],
        number: int,
        ids: bytes,
        wait_s: float,
        terms: Terms = Terms(),  # noqa: B008 - frozen
    ) -> Loaded:
        """Copy the leading blocks to the engine's; what is below comes up while earlier ones are copied."""
        made, rows = self.registrations.of(session, number, ids, len(hashes))
        made.check_layers(terms.first_layer, terms.layers)
        mark = self._under_way.begin(session, terms, number)
        loading = self._loads.run(session, space, hashes, made, rows, wait_s, mark)
        answer: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        self._tasks.keep(self._answered(loading, session, mark, answer))
        return await answer

    async def _answered(
        self, loading: Awaitable[Loaded], session: Session, mark: Under, answer: asyncio.Future[Loaded]
    ) -> None:
        """Run a load to its end, whoever waits for its answer; what it held last is given back after that."""
        try:
            loaded = await loading
        except Exception as error:
            if answer.done():  # who asked has left
                raise
            answer.set_exception(error)
            return
        finally:
            self._under_way.end(session, mark)
        if not answer.done():
            answer.set_result(loaded)
            await asyncio.sleep(0)  # who waits has its turn
        self._loads.give_back(session, loaded.held)

    # ---- store ----

    async def store(
        self,
        session: Session,
        space: Space,
        hashes: Sequence[bytes],
        number: int,
        ids: bytes,
        parent: bytes,
        wait_s: float,
        *,
        durable: bool = False,
        lifetime: Lifetime | None = None,
        terms: Terms = Terms(),  # noqa: B008 - frozen
    ) -> Stored:
        """Store blocks from the engine's memory: those that are not stored yet, as far as there is room."""
        made, rows = self.registrations.of(session, number, ids, len(hashes))
        sizes = [made.block_bytes * rows.each] * len(hashes)
        mark = self._under_way.begin(session, terms, number)
        try:
            reserving = self._writes.reserve(
                session, space, hashes, sizes, parent, wait_s, durable=durable, lifetime=lifetime
            )
        except BaseException:
            self._under_way.end(session, mark)
            raise
        return await self._tasks.to_its_end(self._store(session, reserving, made, rows, mark))

    async def _store(
        self, session: Session, reserving: Reserved | Awaitable[Reserved], made: Registration, rows: Rows, mark: Under
    ) -> Stored:
        try:
            reserved = reserving if isinstance(reserving, Reserved) else await reserving
            count = len(reserved.outcomes)
            size_bytes = count * made.block_bytes * rows.each
            stored = Stored(b"", bytes(count), size_bytes, reserved.retry_after_ms)
            if not reserved.reservation_id or session.ended:
                stored.outcomes = bytes(reserved.outcomes)
                return stored
            reservation = session.reservation(reserved.reservation_id)
            indices = sorted(reservation.open)
            entries = self._writes.take(reservation, indices)

            copying = self._copied(session, stored, made, rows.of(indices), entries, mark)
            outcomes = await self._commits.fill(session, reservation, indices, entries, copying)
            written = bytearray(count)
            for index, outcome in zip(indices, outcomes, strict=True):
                reserved.outcomes[index] = outcome
                written[index] = outcome in (HIT, NOT_DURABLE)
            stored.written = bytes(written)
        finally:
            self._under_way.end(session, mark)
        stored.outcomes = bytes(reserved.outcomes)
        return stored

    async def _copied(
        self,
        session: Session,
        stored: Stored,
        made: Registration,
        ids: bytes,
        entries: Sequence[Entry],
        mark: Under,
    ) -> list[bytes] | None:
        """Content hashes of what was copied to the slots; None where it may not be what was meant."""
        if mark.stop.why:
            stored.error = mark.stop.why
            return None
        behind = HashesBehind(self._parts, entries)
        runs = runs_of([entry.slot for entry in entries])
        if mark.terms.by_layers:
            told = LayersTold(session, mark.terms)
            told.all(len(entries))
            copying = self._tasks.keep(self._copied_by_layers(made, ids, runs, mark, told.group()))
        else:
            how = How(to_device=False, stop=mark.stop)
            if behind.worthwhile:
                how = How(False, [], TELLS_BLOCKS, behind.copied, mark.stop)
            copying = self._tasks.keep(self.gpus.transfer(made, ids, runs, how))
        try:
            await asyncio.sleep(0)  # the worker has been told by then, and copies meanwhile
            behind.prepare()
        finally:
            error = await copying
        # A client that gave up may have changed its blocks meanwhile.
        stored.error = mark.stop.why or error
        if stored.error or session.ended:
            await behind.drained()
            return None
        return await behind.all()

    async def _copied_by_layers(
        self, made: Registration, ids: bytes, runs: Runs, mark: Under, copied: Callable[[int], None]
    ) -> str:
        """Copy the layers of all blocks as they become ready; the error."""
        done, layers = 0, len(made.cuts) - 1
        while done < layers:
            ready = min(layers, await mark.layers_beyond(done))
            if mark.stop.why:
                return mark.stop.why
            how = How(False, made.cuts[done : ready + 1], TELLS_LAYERS, _after(done, copied), mark.stop)
            error = await self.gpus.transfer(made, ids, runs, how)
            if error:
                return error
            done = ready
        return ""

    # ---- while they run ----

    def end_session(self, session: Session) -> None:
        """Let go of all that it registered, as soon as nothing copies from or to it."""
        self._under_way.end_session(session)
        self.registrations.end_session(session)

    async def unregister(self, session: Session, number: int) -> None:
        """See `Registrations.unregister`; transfers of the memory are given up."""
        self._under_way.unregister(session, number)
        await self.registrations.unregister(session, number)

    def layers_ready(self, session: Session, transfer_id: int, layers: int) -> bool:
        """See `UnderWay.layers_ready`."""
        return self._under_way.layers_ready(session, transfer_id, layers)

    async def cancel(self, session: Session, transfer_id: int) -> bool:
        """See `UnderWay.cancel`."""
        return await self._under_way.cancel(session, transfer_id)

    # ---- tasks ----

    async def drained(self) -> None:
        """When nothing of it runs any more."""
        await self._tasks.drained()
        await self.registrations.tasks.drained()


def _after(done: int, copied: Callable[[int], None]) -> Callable[[int], None]:
    """Tell of layers that come after others."""
    return lambda more: copied(done + more)
