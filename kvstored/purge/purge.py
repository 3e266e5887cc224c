"""One purge: what it takes away, in which order, and how every byte of it becomes zeros.

1. Keys go: from here on nobody finds or leases what is purged. Its slots stay held by the purge.
2. The rest of it below goes, with tombstones: an index that is made anew has none of it.
3. Slots are made zeros as their last user lets go; at the deadline sessions are ended (`holders`).
4. Free slots are made zeros: what was evicted or deleted earlier lies there still. One that was given to a new block
   before that is waited for as in 3, until the block lies over it or is gone.
5. Staging of the tenants' sessions, then dead and free parts of their extents. Of a whole tenant the data keys are
   destroyed before the latter, and what never held other than its encrypted bytes is left as it is.

What is put while a purge runs may stay or go. One that a later daemon goes on with takes nothing that was
put since it had taken all keys, unless its tenant was removed. Names outlast it: hashes of blocks stand in footers,
tombstones and index pages.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, cast

from kvstored.catalog.catalog import DEAD, PROMOTING, WRITING, Entry, Space
from kvstored.catalog.history import Reason
from kvstored.errors import DeviceError
from kvstored.purge.holders import Holders
from kvstored.purge.keys import destroy_keys
from kvstored.purge.receipts import COMPLETE, INCOMPLETE, RUNNING, Receipt
from kvstored.store.removal import PIECE_BLOCKS, Removed, Why
from kvstored.store.store import Store
from kvstored.tiers.base import Record

RETIRED_WAIT_S: Final = 15.0  # longer than clients have to let go of a segment
LOOK_S: Final = 0.05
WHY: Final = Why(Reason.PURGED, "it was purged")


async def _nothing() -> None:
    pass


class Purge:
    """One purge, from its first step to its last."""

    def __init__(self, store: Store, receipt: Receipt, checkpoint: Callable[[], Awaitable[None]] = _nothing) -> None:
        """`checkpoint` puts on file how far it has come."""
        self._store = store
        self._parts = store.parts
        self._receipt = receipt
        self._selection = receipt.selection
        self._settled_s = receipt.settled_s  # by an earlier daemon
        self._checkpoint = checkpoint
        self._holders = Holders(store, receipt)

    # ---- what is selected ----

    def _spaces(self) -> list[Space]:
        catalog = self._parts.catalog
        return [s for s in (*catalog.spaces.values(), *catalog.retired) if self._selection.takes(s.namespace)]

    def _settled(self, spaces: Iterable[Space]) -> list[Space]:
        return [space for space in spaces if space.tenant in self._receipt.tenants]

    def _spaces_below(self) -> list[Space]:
        """With those of past epochs that are on NVMe alone, to be taken back one day: their bytes go as well."""
        spaces, epochs = {space.digest: space for space in self._spaces()}, self._parts.epochs.now
        for space in list(spaces.values()):
            # Also of epochs whose room is back, as far as is known: a late step, or an index made anew, has left some.
            first = {space.namespace.digest} if epochs.floor else set()
            for digest in sorted(first | epochs.stale_digests(space.namespace)):
                spaces.setdefault(digest, Space(space.namespace, digest))
        return list(spaces.values())

    def _tenants(self) -> list[str]:
        named = [self._selection.tenant] if self._selection.tenant and not self._selection.digest else []
        return list(dict.fromkeys([*self._receipt.tenants, *named, *(space.tenant for space in self._spaces())]))

    def note_tenants(self) -> None:
        """Whom it concerns goes on file with it, and is settled from here on."""
        self._receipt.tenants = self._tenants()

    def meets(self, other: Purge) -> bool:
        """Whether both concern the same tenant."""
        return not set(self._receipt.tenants).isdisjoint(other._receipt.tenants)

    def hurry(self, within_s: float) -> None:
        """Another purge waits for this one: who holds some of it has no longer than that from here on."""
        self._holders.deadline_s = min(self._holders.deadline_s, self._parts.clock.monotonic() + within_s)

    def _chosen(self, block: Entry | Record) -> bool:
        before_s = self._selection.before_s
        if before_s and self._stored_s(block) >= before_s:
            return False
        return not self._resumed or self._is_older(block)

    @property
    def _resumed(self) -> bool:
        """Whether an earlier daemon began it, and its tenant may have put something since."""
        return self._receipt.resumed > 0 and not self._parts.tenants.is_leaving(self._selection.tenant)

    def _is_older(self, block: Entry | Record) -> bool:
        """Whether a block was there when the keys were taken, as far as is known; what cannot be right counts as such.

        Before all were, whatever an earlier daemon left was.
        """
        if isinstance(block, Entry) and self._parts.dram.is_adopted(block.slot):
            return not self._settled_s
        since_s = self._settled_s or self._parts.dram.since_s
        return not since_s <= self._stored_s(block) <= self._parts.clock.wall()

    def _stored_s(self, block: Entry | Record) -> float:
        """When a block was stored. What an earlier process left in DRAM was before this one began, at the latest."""
        return block.created_s if isinstance(block, Record) else self._parts.dram.stored_s(block.slot)

    def _occupants(self, tenant: str, *, again: bool = False) -> Iterable[list[Entry]]:
        """What stands in the tenant's slots and is selected, dead or alive, in pieces."""
        for segment in self._parts.dram.segments(tenant):
            owners = self._parts.dram.occupants(segment.segment_id)
            for start in range(0, len(owners), PIECE_BLOCKS):
                entries = [cast(Entry, owner) for owner in owners[start : start + PIECE_BLOCKS]]
                yield [entry for entry in entries if self._takes(entry, again)]

    def _takes(self, entry: Entry, again: bool) -> bool:
        namespace, dram = entry.pool.space.namespace, self._parts.dram
        if entry in self._holders or not (dram.is_taken(entry.slot) and dram.owner(entry.slot) is entry):
            return False  # or it has gone since its segment was looked at, and its slot may be another's
        if entry.state == DEAD and not namespace.encoding:  # from before a restart, and nothing tells what it was
            return self._selection.tenant in ("", namespace.tenant)
        if again:  # what came up meanwhile is younger here than below, and went for its age there
            return self._selection.takes(namespace) and (entry.state == DEAD or (entry.tied and self._chosen(entry)))
        return self._selection.takes(namespace) and self._chosen(entry)

    # ---- a dry run ----

    async def count(self) -> None:
        """What would go, on the receipt."""
        receipt, below = self._receipt, self._parts.below
        counted: dict[int, Entry] = {}  # by identity: nothing is held for it, so a block may move and be met twice
        for tenant in self._tenants():
            for entries in self._occupants(tenant):
                counted.update((id(entry), entry) for entry in entries)
                await asyncio.sleep(0)
        receipt.dram_blocks = len(counted)
        receipt.dram_bytes = sum(entry.pool.slot_bytes for entry in counted.values())
        receipt.leases = self._holders.leases(counted)
        for space in self._spaces_below() if below is not None else ():
            assert below is not None
            cursor, more = b"", True
            while more:
                page, cursor = await below.tier.list_records(space.digest, cursor, PIECE_BLOCKS)
                sizes = [record.size_bytes for _, _, record in page if self._chosen(record)]
                receipt.nvme_blocks += len(sizes)
                receipt.nvme_bytes += sum(sizes)
                more = bool(cursor)

    # ---- for good ----

    async def run(self) -> None:
        """All steps; what could not be done is on the receipt."""
        receipt, started_s = self._receipt, self._parts.clock.monotonic()
        receipt.state = RUNNING
        receipt.remains.clear()
        tenants = receipt.tenants
        self._holders.deadline_s = min(self._holders.deadline_s, started_s + receipt.deadline_s)
        try:
            await self._take_keys(tenants)
            receipt.leases = max(receipt.leases, self._holders.leases())
            await self._take_below()
            await self._take_keys(tenants, again=True)
            await self._settle()  # before others are waited for, who may take long
            await self._holders.wiped()
            if not await self._settle():
                receipt.remain("blocks on their way to NVMe: the device does not answer")
            await self._wipe_memory(tenants)
            sessions = [session for session in self._parts.sessions if session.caller.tenant in tenants]
            await self._holders.wipe_staging(sessions)
            await self._holders.staging_gone(tenants)
            await self._wipe_below(tenants, await destroy_keys(self._parts, receipt, resumed=self._resumed))
            await self._retired_gone(tenants)
        finally:
            self._holders.let_go()
            receipt.duration_s += self._parts.clock.monotonic() - started_s
        receipt.state = INCOMPLETE if receipt.remains else COMPLETE
        receipt.at("")

    async def _take_keys(self, tenants: Sequence[str], *, again: bool = False) -> None:
        """Keys of what is in DRAM go, slots stay; `again`: of what came up meanwhile, and of what is held only."""
        receipt = self._receipt
        for tenant in tenants:
            for entries in self._occupants(tenant, again=again):
                self._holders.hold(entries)
                self._parts.revival.hurry(entries)  # what an earlier process left is held until it is looked at
                receipt.dram_blocks += len(entries)
                receipt.dram_bytes += sum(entry.pool.slot_bytes for entry in entries)
                self._store.writes.removals.forget([entry for entry in entries if entry.state != DEAD], WHY)
                receipt.at("taking keys", receipt.dram_blocks)
                await asyncio.sleep(0)

    async def _take_below(self) -> None:
        receipt, spaces = self._receipt, self._settled(self._spaces_below())

        def on_piece(removed: Removed) -> None:
            receipt.nvme_blocks += removed.nvme_blocks
            receipt.nvme_bytes += removed.nvme_bytes

        for done, space in enumerate(spaces):
            receipt.at("taking away what is on NVMe", done, len(spaces))
            try:
                await self._store.writes.removals.remove_all(space, WHY, chosen=self._chosen, on_piece=on_piece)
            except DeviceError as error:
                receipt.remain(f"namespace {space.digest.hex()} on NVMe: {error}")
        if self._selection.whole_tenant and self._parts.below is not None:
            await self._take_nameless(self._selection.tenant)

    async def _take_nameless(self, tenant: str) -> None:
        """Records of the tenant whose namespace nobody knows any more; the tier takes away what is the tenant's."""
        below, receipt = self._parts.below, self._receipt
        assert below is not None, "asked only with one"
        cursor, more = b"", True
        while more:
            page, cursor = await below.tier.list_records(None, cursor, PIECE_BLOCKS)
            nameless: defaultdict[bytes, list[bytes]] = defaultdict(list)
            for digest, hash_, record in page:
                if self._chosen(record) and digest not in self._parts.catalog.stored:
                    nameless[digest].append(hash_)
            for digest, hashes in nameless.items():
                try:
                    receipt.nvme_blocks += await below.tier.delete(tenant, digest, hashes)
                except DeviceError as error:
                    receipt.remain(f"{len(hashes)} blocks of an unknown namespace on NVMe: {error}")
            more = bool(cursor)

    async def _settle(self) -> bool:
        """Steps down delete what they wrote of it, their slots being free already; after them its bytes are dead.

        Then nothing that was stored before comes back, whatever becomes of this daemon: that is on file from here on.
        """
        below, receipt = self._parts.below, self._receipt
        if below is not None and not await below.mover.steps_ended():
            return False
        if not receipt.settled_s:
            receipt.settled_s = self._parts.clock.wall()
            await self._checkpoint()
        return True

    async def _wipe_below(self, tenants: Sequence[str], erased: set[str]) -> None:
        receipt = self._receipt
        if self._parts.below is None or not tenants:
            return
        before = receipt.nvme_zeroed_bytes

        def told(done: int, steps: int, size_bytes: int) -> None:
            receipt.at("making zeros on NVMe", done, steps)
            receipt.nvme_zeroed_bytes = before + size_bytes

        wiped = await self._parts.below.tier.wipe(tenants, told, erased=erased)
        receipt.nvme_zeroed_bytes = before + wiped.size_bytes
        for line in wiped.left:
            receipt.remain(line)

    async def _wipe_memory(self, tenants: Sequence[str]) -> None:
        receipt, dram = self._receipt, self._parts.dram

        def told(size_bytes: int) -> None:
            receipt.dram_zeroed_bytes += size_bytes

        for done, tenant in enumerate(tenants):
            receipt.at("making zeros in free memory", done, len(tenants))
            await dram.wipe_free(tenant, told, self._hold_unwritten)
        await self._holders.wiped()

    def _hold_unwritten(self, segment_id: int) -> None:
        """What was given a slot with old bytes and has not put others over them yet: until it has, or is wiped."""
        entries = [cast(Entry, owner) for owner in self._parts.dram.occupants(segment_id)]
        unwritten = [e for e in entries if e.state in (WRITING, PROMOTING) or (e.state == DEAD and not e.leases)]
        self._holders.hold([entry for entry in unwritten if entry not in self._holders])

    async def _retired_gone(self, tenants: Sequence[str]) -> None:
        """Memory that changes hands is made zeros or given back when clients have let go of it."""
        receipt, dram = self._receipt, self._parts.dram
        for tenant in tenants:
            end_s = self._parts.clock.monotonic() + RETIRED_WAIT_S
            while dram.retired(tenant) and self._parts.clock.monotonic() < end_s:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
            if retired := dram.retired(tenant):
                receipt.remain(f"{len(retired)} segments that clients have not let go of")
