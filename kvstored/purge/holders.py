"""Who stands in the way of a purge: slots that are used, sessions that hold them, staging with bytes in it.

A block that is purged has lost its key at once; its bytes are made zeros when the purge is the last that holds the
slot. Clients have until the deadline; then their sessions are ended, socket first, so that a client that has just
read may know that it must not trust what it read. A device that is still at a slot is waited for.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kvstored.catalog.catalog import DEAD, READY, Entry
from kvstored.catalog.leases import Group, Lease, Session
from kvstored.purge.receipts import LINES_MAX, Receipt
from kvstored.store.release_times import Cause
from kvstored.store.store import Store

LOOK_S: Final = 0.01
ZERO_BYTES: Final = 4 << 20
PIECE_BLOCKS: Final = 512
STAGING_LEFT: Final = "waiting for the staging of sessions that have ended"
DEVICE_WAIT_S: Final = 30.0  # beyond the deadline, for threads that are still at a slot


class Holders:
    """The slots of purged blocks, each held once by the purge, until its bytes are zeros."""

    def __init__(self, store: Store, receipt: Receipt) -> None:
        self._store = store
        self._parts = store.parts
        self._receipt = receipt
        self._waiting: dict[int, Entry] = {}  # by identity of the entry
        self.deadline_s = math.inf  # monotonic; may come nearer while it is waited for

    def __contains__(self, entry: Entry) -> bool:
        return id(entry) in self._waiting

    def hold(self, entries: Sequence[Entry]) -> None:
        """Keep slots from being given to anybody else; never waits."""
        self._parts.catalog.hold(entries)
        self._waiting.update((id(entry), entry) for entry in entries)

    def let_go(self) -> None:
        """Give all slots back as they are: the purge was stopped, or cannot wait any longer."""
        entries = list(self._waiting.values())
        self._waiting.clear()
        for start in range(0, len(entries), PIECE_BLOCKS):
            self._parts.room.unhold(entries[start : start + PIECE_BLOCKS])

    def leases(self, blocks: Mapping[int, Entry] | None = None) -> int:
        """How many leases hold some of it at the moment, or of other blocks (by identity)."""
        found = self._waiting if blocks is None else blocks
        return sum(_names(lease, found) for lease in self._all_leases())

    def _all_leases(self) -> Iterable[Lease]:
        groups = {id(session.group): session.group for session in self._parts.sessions}.values()
        return [lease for group in groups for lease in group.leases.values()]

    def _holds(self, lease: Lease) -> bool:
        return _names(lease, self._waiting)

    # ---- until all is zeros ----

    async def wiped(self) -> None:
        """Wait for every slot and make zeros of it; at the deadline sessions are ended."""
        all_, clock = len(self._waiting), self._parts.clock
        while self._waiting:
            self._receipt.at("waiting for who uses it", all_ - len(self._waiting), all_)
            await self._wipe_free()
            if not self._waiting:
                break
            self._store.releases.take_all()
            now = clock.monotonic()
            if now >= self.deadline_s:
                await self._end_sessions()
            if now >= self.deadline_s + DEVICE_WAIT_S:
                self._receipt.remain(f"{len(self._waiting)} blocks in DRAM: a thread or a device is still using them")
                self.let_go()
                return
            await asyncio.sleep(LOOK_S)

    async def _wipe_free(self) -> None:
        looked: deque[Entry] = deque(self._waiting.values())
        while looked:
            piece = [looked.popleft() for _ in range(min(PIECE_BLOCKS, len(looked)))]
            self._drop([entry for entry in piece if entry.state == READY])  # what was put since lies over all of it
            free = [entry for entry in piece if entry.state == DEAD and entry.holds == 1]
            for batch in _batches(free):
                await self._wipe(batch)
            await asyncio.sleep(0)

    async def _wipe(self, entries: list[Entry]) -> None:
        await self._parts.dram.zero([entry.slot for entry in entries])
        self._receipt.dram_zeroed_bytes += sum(entry.pool.slot_bytes for entry in entries)
        self._drop(entries)

    def _drop(self, entries: list[Entry]) -> None:
        for entry in entries:
            del self._waiting[id(entry)]
        self._parts.room.unhold(entries)

    async def _end_sessions(self) -> None:
        """Part with everybody who holds some of it: all of a group, because any of them may read what one leased."""
        groups: dict[int, Group] = {}
        for session in list(self._parts.sessions):
            if id(session.group) not in groups and (self._group_holds(session.group) or self._writes(session)):
                groups[id(session.group)] = session.group
            await asyncio.sleep(0)
        for group in groups.values():
            self._receipt.leases_ended += sum(map(self._holds, group.leases.values()))
            for session in list(group.members):
                self.part_with(session)
        self._receipt.leases_ended += self._store.quarantine.part_with(self._holds)

    def _group_holds(self, group: Group) -> bool:
        return any(map(self._holds, group.leases.values()))

    def _writes(self, session: Session) -> bool:
        """Whether it reserved some of it and has not committed it yet."""
        reserved = session.reservations.values()
        return any(id(e) in self._waiting for r in reserved for e in (*r.open.values(), *r.done.values()))

    def part_with(self, session: Session) -> None:
        """End a session and put it on the receipt."""
        if session.ended:
            return
        caller, receipt = session.caller, self._receipt
        receipt.sessions_ended_count += 1
        if len(receipt.sessions_ended) < LINES_MAX:
            receipt.sessions_ended.append(f"{session.name} {caller.tenant} {caller.client} pid {caller.pid}")
        self._store.part_with(session, "it held what is purged", Cause.PURGE)

    # ---- staging ----

    async def wipe_staging(self, sessions: Iterable[Session]) -> None:
        """Make zeros of the staging of sessions, between two puts; who is putting at the deadline is ended.

        A client commits only what it wrote there after the answer to its reservation, or before it where the answer
        says that the ring was not made zeros meanwhile. What else it writes are its own bytes in its own memory, which
        goes with its session.
        """
        for session in sessions:
            while session.reservations and not session.ended:
                if self._parts.clock.monotonic() >= self.deadline_s:
                    self.part_with(session)
                else:
                    await asyncio.sleep(LOOK_S)
            staging = session.staging
            if session.ended or staging is None:
                continue
            session.wiping = True
            staging.hold()
            try:
                await self._parts.dram.calls.to_its_end(asyncio.to_thread(staging.zero))
            finally:
                staging.unhold()
                session.wipes += 1
                session.wiping = False
            self._receipt.staging_zeroed_bytes += staging.size_bytes

    async def staging_gone(self, tenants: Sequence[str]) -> None:
        """Wait for the staging of sessions that have ended: a copy may run from it, and a thread gives it back.

        A tenant none of whose is left is not looked at again: clients come and go, and all have none at once by chance.
        """
        end_s = self._parts.clock.monotonic() + DEVICE_WAIT_S
        while tenants := [tenant for tenant in tenants if self._leaving_bytes(tenant)]:
            self._receipt.at(STAGING_LEFT)
            if self._parts.clock.monotonic() >= end_s:
                left_bytes = sum(map(self._leaving_bytes, tenants))
                self._receipt.remain(f"{left_bytes} bytes of staging: a copy from it has not ended")
                return
            await asyncio.sleep(LOOK_S)

    def _leaving_bytes(self, tenant: str) -> int:
        sessions = [session for session in self._parts.sessions if session.caller.tenant == tenant]
        return self._parts.staging.used_bytes_of[tenant] - sum(session.staging_bytes for session in sessions)


def _names(lease: Lease, blocks: Mapping[int, Entry]) -> bool:
    """Whether some of the blocks (by identity) are the lease's."""
    return any(id(entry) in blocks for entry in lease.entries)


def _batches(entries: Sequence[Entry]) -> Iterable[list[Entry]]:
    batch: list[Entry] = []
    size_bytes = 0
    for entry in entries:
        batch.append(entry)
        size_bytes += entry.pool.slot_bytes
        if size_bytes >= ZERO_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch
