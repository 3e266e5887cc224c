"""Taking blocks away for other reasons than room: deleted, expired, of a past epoch, purged.

One rule for all of them: a key is gone at once, and for good when the call returns; the slot of a block
that is leased or on its way between the tiers comes back when its last user is done. Who calls names
the reason, which `explain` tells later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

import msgspec

from kvstored.catalog.catalog import WRITING, Catalog, Entry, Space
from kvstored.catalog.history import History, Reason
from kvstored.errors import DeviceError
from kvstored.keys import slot_bytes
from kvstored.store.parts import Below, Parts
from kvstored.tiers.base import Health, Record

PIECE_BLOCKS: Final = 512  # in one go; between two pieces the loop does other things
Chosen = Callable[[Entry | Record], bool]


def _all(_block: Entry | Record) -> bool:
    return True


class Why(msgspec.Struct, frozen=True):
    """The reason and the rule that are noted of every block; see `History.note`."""

    reason: Reason
    rule: str


class Removed(msgspec.Struct):
    """What a removal took away. `blocks` counts each block once, whatever tiers it was in; bytes are those of slots."""

    blocks: int = 0
    dram_blocks: int = 0
    dram_bytes: int = 0
    nvme_blocks: int = 0
    nvme_bytes: int = 0
    leased_blocks: int = 0  # of those in DRAM: their bytes go with their last lease

    def add(self, other: Removed) -> None:
        """Count what another removal took away too."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Removals:
    """Takes blocks away, from every tier."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._room = parts.room

    # ---- in DRAM alone ----

    def forget(self, entries: Sequence[Entry], why: Why) -> Removed:
        """Take keys away at once, each entry that is not gone yet; what is on NVMe stays there.

        Never waits, so no more than a piece should be given in one go.
        """
        removed = Removed(blocks=len(entries), dram_blocks=len(entries))
        by_space: dict[Space, list[bytes]] = {}
        for entry in entries:
            removed.dram_bytes += entry.pool.slot_bytes
            removed.leased_blocks += entry.leases > 0
            by_space.setdefault(entry.pool.space, []).append(entry.hash)
            self._room.forget(entry)
        for space, hashes in by_space.items():
            self._parts.history.note(self.known_as(space), hashes, why.reason, why.rule)
        return removed

    def known_as(self, space: Space) -> Space:
        """The space that readers have: of a past epoch, its successor."""
        return self._parts.catalog.spaces.get(space.namespace.digest, space)

    # ---- from every tier, for good ----

    async def remove(self, space: Space, hashes: Sequence[bytes], why: Why, *, writing: bool = False) -> Removed:
        """Take blocks away from every tier so that they stay away, also from an index that is made anew.

        What is being written at this moment comes after it and stays, unless `writing`: its commit answers MISS then.
        Raises DeviceError, with all the rest done, where a device may still have some of them.
        """
        hashes = list(dict.fromkeys(hashes))
        entries = [entry for hash_ in hashes if (entry := space.entries.get(hash_)) is not None]
        entries = [entry for entry in entries if writing or entry.state != WRITING]
        found = {entry.hash for entry in entries}
        removed = self.forget(entries, why)
        below = self._parts.below
        if below is None:
            return removed
        doubt: DeviceError | None = None
        if not await below.mover.past(entries):
            doubt = DeviceError("a device has not ended writing it: it may be found until then: delete again")
        records = await below.records(space, hashes)
        removed.nvme_blocks = len(records)
        removed.nvme_bytes = sum(slot_bytes(record.size_bytes) for record in records.values())
        # Those that were not found too: a path that is off has to hear of them.
        try:
            await below.tier.delete(space.tenant, space.digest, hashes)
        except DeviceError as error:
            doubt = error
        self._gone_below(below, space, hashes)
        self._parts.history.note(self.known_as(space), records.keys() - found, why.reason, why.rule)
        removed.blocks = len(records.keys() | found)
        if doubt is not None:
            raise doubt
        return removed

    def _gone_below(self, below: Below, space: Space, hashes: Sequence[bytes]) -> None:
        below.promoter.deleted(space, hashes)
        # Brought up again by somebody between the two steps.
        for hash_ in hashes:
            back = space.entries.get(hash_)
            if back is not None and back.tied:
                self._room.forget(back)
        below.mover.kick()

    # ---- whole spaces, in pieces ----

    async def remove_all(
        self,
        space: Space,
        why: Why,
        *,
        chosen: Chosen = _all,
        writing: bool = True,
        lasting: bool = True,
        on_piece: Callable[[Removed], None] = lambda removed: None,
    ) -> Removed:
        """Take away everything of a space, or what is `chosen` of it, in pieces; `on_piece` hears of each.

        Not `lasting`: only for what no key reaches any more. It costs less, and an index that is made anew may
        have it again. What is put meanwhile may stay. Raises DeviceError where a device failed, and some is left.
        """
        total = Removed()
        for hashes in _pieces(list(space.entries)):
            entries = [entry for hash_ in hashes if (entry := space.entries.get(hash_)) is not None]
            entries = [entry for entry in entries if chosen(entry) and (writing or entry.state != WRITING)]
            if lasting:
                piece = await self.remove(space, [entry.hash for entry in entries], why, writing=writing)
            else:
                piece = self.forget(entries, why)
            self._counted(total, piece, on_piece)
            await asyncio.sleep(0)
        if self._parts.below is not None:
            await self._remove_below(self._parts.below, space, why, chosen, lasting, total, on_piece)
        return total

    def _counted(self, total: Removed, piece: Removed, on_piece: Callable[[Removed], None]) -> None:
        if piece.blocks:
            total.add(piece)
            on_piece(piece)

    async def _remove_below(
        self,
        below: Below,
        space: Space,
        why: Why,
        chosen: Chosen,
        lasting: bool,
        total: Removed,
        on_piece: Callable[[Removed], None],
    ) -> None:
        cursor = b""
        while True:
            page, cursor = await below.tier.list_records(space.digest, cursor, PIECE_BLOCKS)
            records = [(hash_, record) for _, hash_, record in page if chosen(record)]
            if lasting:
                piece = await self.remove(space, [hash_ for hash_, _ in records], why, writing=False)
            else:
                piece = await self._forget_below(below, space, records, why)
            self._counted(total, piece, on_piece)
            if not cursor:
                break
        if any(path.health is Health.OFF for path in below.tier.paths()):
            raise DeviceError("a path is off: what lies there is still to be taken away")

    async def _forget_below(
        self, below: Below, space: Space, records: Sequence[tuple[bytes, Record]], why: Why
    ) -> Removed:
        removed = Removed()
        if records:
            removed.nvme_blocks, removed.nvme_bytes = await below.tier.forget(space.digest, records)
            removed.blocks = removed.nvme_blocks
            self._parts.history.note(self.known_as(space), [hash_ for hash_, _ in records], why.reason, why.rule)
        return removed


def _pieces(hashes: Sequence[bytes]) -> Iterator[list[bytes]]:
    left = iter(hashes)
    while piece := list(islice(left, PIECE_BLOCKS)):
        yield piece


def gone_below(
    catalog: Catalog, history: History, digest: bytes, hashes: list[bytes], reason: Reason, rule: str
) -> None:
    """Blocks left NVMe: those that are in DRAM are there only from now on."""
    space = catalog.stored.get(digest)
    if space is None:
        return
    for hash_ in hashes:
        entry = space.entries.get(hash_)
        if entry is not None:
            entry.below = False
    history.note(space, hashes, reason, rule)
