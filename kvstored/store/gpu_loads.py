"""Loads: blocks of a chain to an engine's memory on a GPU, in pieces, while the next ones come up from NVMe."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Sequence
from typing import Final

import msgspec

from kvstored.catalog.catalog import Entry, Space
from kvstored.catalog.leases import Session
from kvstored.device.worker_messages import TELLS_LAYERS
from kvstored.store.answers import Held
from kvstored.store.outcomes import HIT, MISS
from kvstored.store.parts import Parts
from kvstored.store.reads import Reads
from kvstored.store.registrations import Rows
from kvstored.store.tasks import Tasks
from kvstored.store.transfer_marks import LayersTold, Under
from kvstored.tiers.gpu import Gpus, How, Registration

PIECE_BLOCKS: Final = 512  # at most: while some are copied, the next come up from NVMe
PIECE_BYTES: Final = 64 << 20
PIECES_IN_FLIGHT: Final = 2


class Loaded(msgspec.Struct):
    """What came of a load: leading blocks, what ended them, and the error where a copy failed.

    `held` is what it still holds of the last copy, for `Loads.give_back`: who waits is told before, since that takes
    as long as all else after the copy.
    """

    blocks: int = 0
    next: int = HIT
    error: str = ""
    held: list[Held] = []


class _Load:
    """One load, while it runs."""

    def __init__(self, session: Session, made: Registration, rows: Rows, mark: Under) -> None:
        self.session, self.made, self.rows, self.mark = session, made, rows, mark
        self.loaded = Loaded()
        self.copies: deque[tuple[int, asyncio.Future[str]]] = deque()
        self.ready: list[Held] = []  # held, and not being copied yet
        self.begun = 0  # blocks whose copies have begun
        self.running = 0  # copies that have not ended
        self.all_begun = False
        terms = mark.terms
        self.told = LayersTold(session, terms) if terms.layers_word else None
        self.cuts: list[int] = []
        if terms.layers or terms.first_layer or self.told is not None:
            end = terms.first_layer + terms.layers if terms.layers else len(made.cuts) - 1
            self.cuts = made.cuts[terms.first_layer : end + 1]

    @property
    def over(self) -> bool:
        """Whether more blocks are of no use."""
        return bool(self.loaded.error or self.mark.stop.why or self.session.ended)


class Loads:
    """A block that is copied is held by its load, not by its session, which may end at any moment."""

    def __init__(self, parts: Parts, reads: Reads, gpus: Gpus, tasks: Tasks) -> None:
        self._parts = parts
        self._reads = reads
        self._gpus = gpus
        self._tasks = tasks

    async def run(
        self,
        session: Session,
        space: Space,
        hashes: Sequence[bytes],
        made: Registration,
        rows: Rows,
        wait_s: float,
        mark: Under,
    ) -> Loaded:
        """All of it. When it ends nothing of it runs any more, and the result's `held` is to be given back."""
        load = _Load(session, made, rows, mark)
        clock = self._parts.clock
        end_s = clock.monotonic() + wait_s
        step = max(1, min(PIECE_BLOCKS, PIECE_BYTES // (made.block_bytes * rows.each)))
        try:
            for start in range(0, len(hashes), step):
                piece = hashes[start : start + step]
                got = self._reads.get(session, [space], piece, max(0.0, end_s - clock.monotonic()))
                if not isinstance(got, Held):
                    self._copy_ready(load)
                    got = await _unless_stopped(got, mark)
                load.loaded.next = got.next
                if not got.blocks:
                    break
                self._parts.catalog.hold(got.leases[0].entries)
                load.ready.append(got)
                if load.told is None:
                    self._copy_ready(load)
                    await asyncio.sleep(0)  # the worker is told of it before the next is looked up
                    while len(load.copies) >= PIECES_IN_FLIGHT and not load.loaded.error:
                        await self._landed(load)
                if got.next != HIT or load.over:
                    break
            self._copy_ready(load)
            if load.told is not None:
                load.told.all(load.begun)
            load.all_begun = True
        finally:
            self.give_back(session, load.ready)
            while load.copies:
                await self._landed(load)
        if mark.stop.why and not load.loaded.error and load.loaded.blocks < len(hashes):
            load.loaded.error, load.loaded.next = mark.stop.why, MISS
        return load.loaded

    def _copy_ready(self, load: _Load) -> None:
        """Begin to copy what is held: all of it together, so that each layer comes for all of these blocks at once."""
        group, load.ready = load.ready, []
        if not group:
            return
        count = sum(held.blocks for held in group)
        part = load.rows.part(load.begun, load.begun + count)
        load.begun += count
        how = How(to_device=True, cuts=load.cuts, stop=load.mark.stop)
        if load.told is not None:
            how = How(True, load.cuts, TELLS_LAYERS, load.told.group(), load.mark.stop)
        load.running += 1
        load.copies.append((count, self._tasks.keep(self._copy(load, group, part, how))))

    async def _copy(self, load: _Load, group: list[Held], rows: Rows, how: How) -> str:
        try:
            entries = [entry for held in group for entry in held.leases[0].entries]
            size_bytes = load.made.block_bytes * rows.each
            if {entry.size_bytes for entry in entries} != {size_bytes}:
                return f"a stored block is not of {size_bytes} bytes, as the memory's layout has it"
            if load.mark.stop.why:
                return load.mark.stop.why
            runs = [run for held in group for run in held.leases[0].runs]
            error = await self._gpus.transfer(load.made, rows.ids, runs, how)
            return (load.mark.stop.why or error) if error else ""
        finally:
            load.running -= 1
            if load.all_begun and not load.running:
                load.loaded.held = group
            else:
                self.give_back(load.session, group)

    async def _landed(self, load: _Load) -> None:
        count, copying = load.copies.popleft()
        error: object = ""
        try:
            error = await copying
        except Exception as failure:
            error = failure
        if error and not load.loaded.error:
            load.loaded.error, load.loaded.next = str(error), MISS
        elif not load.loaded.error:
            load.loaded.blocks += count

    def give_back(self, session: Session, group: Sequence[Held]) -> None:
        """End the holds of blocks that are copied."""
        for held in group:
            entries: list[Entry] = held.leases[0].entries
            self._reads.release(session, [lease.lease_id for lease in held.leases])
            self._parts.room.unhold(entries, used=True)


async def _unless_stopped(got: Awaitable[Held], mark: Under) -> Held:
    """Wait for a get; it is given up where the transfer is."""
    getting = asyncio.ensure_future(got)
    forget = mark.stop.then(getting.cancel)
    try:
        return await getting
    except asyncio.CancelledError:
        if not mark.stop.why:
            raise
        return Held(0, MISS, [])
    finally:
        forget()
