"""Leases of an earlier process: their slots are held until nobody can be reading them.

A lease ends here when its client came back and does not name it, or when every process of its
group is gone. A client that comes back (`resume`) gets those that it still uses as its own, under
the same ids. It names itself, not a session: of its last one it may have had no reply. The blocks
themselves are anybody's to read, as soon as they are verified.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Final

from kvstored.catalog.catalog import DEAD, Entry, Pool, Space
from kvstored.catalog.leases import Group, Lease, Session
from kvstored.device.processes import start_ticks
from kvstored.keys import Namespace
from kvstored.store.endings import LeaseEnds
from kvstored.store.lease_notes import LeaseNotes
from kvstored.store.parts import Parts
from kvstored.store.release_times import Cause, ReleaseTimes
from kvstored.tiers.lease_ledger import NotedLease, NotedSession

LOOK_EVERY_S: Final = 1.0
# For a process that cannot be seen from here (another pid namespace): it had time enough to come back.
UNSEEN_S: Final = 600.0


class Held:
    """The sessions of one group, as an earlier process knew them, and the leases that they may still use."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.group = Group("", b"")
        self.group_id = b""
        self.members: dict[bytes, tuple[int, NotedSession]] = {}  # by session id; with its place in the ledger


class Quarantine:
    """All that is held for clients that have not come back yet."""

    def __init__(self, parts: Parts, notes: LeaseNotes, ends: LeaseEnds, times: ReleaseTimes) -> None:
        self._parts = parts
        self._notes = notes
        self._ends = ends
        self._times = times
        self._groups: dict[bytes, Held] = {}
        self._by_client: dict[bytes, list[tuple[Held, NotedSession]]] = {}
        self._began_s = 0.0

    @property
    def leases(self) -> int:
        """How many are held."""
        return sum(len(held.group.leases) for held in self._groups.values())

    def dead_blocks(self) -> int:
        """How many slots are held whose block is gone: used, but not to be listed."""
        leases = [lease for held in self._groups.values() for lease in held.group.leases.values()]
        return len({entry.slot for lease in leases for entry in lease.entries if entry.state == DEAD})

    # ---- entering ----

    def enter(self) -> None:
        """Hold what the lease ledger names. The adopted blocks are in the catalogue."""
        adoption = self._parts.dram.adoption
        self._began_s = self._parts.clock.monotonic()
        for place, session in adoption.sessions:
            held = self._groups.setdefault(session.group_key, Held(session.group_key))
            held.group.tenant, held.group_id = session.tenant, session.group_id
            held.members[session.session_id] = (place, session)
            if session.client_id:
                self._by_client.setdefault(session.client_id, []).append((held, session))
        for noted in adoption.leases:
            self._hold(noted)
        self._free_the_rest()
        adoption.sessions, adoption.leases = [], []

    def _hold(self, noted: NotedLease) -> None:
        held = self._groups.get(noted.group_key)
        slots = [slot for slot in noted.slots() if self._parts.dram.is_taken(slot)]
        if held is None or not slots:  # its sessions have ended
            self._notes.void(noted.place)
            return
        space = self._parts.catalog.stored.get(noted.digest)
        if space is None or space.tenant != held.group.tenant:
            space = Space(Namespace(held.group.tenant, noted.digest, b"", {}))
        entries = [self._entry(space, slot) for slot in slots]
        size_bytes = sum(entry.pool.slot_bytes for entry in entries)
        # One that lost slots cannot be used any more, but what is left of it is still read.
        lease_id = noted.lease_id if slots == noted.slots() else -noted.lease_id
        lease = Lease(lease_id, space, entries, array("Q", slots), noted.runs, size_bytes, noted.place)
        self._parts.catalog.lease(space, entries)
        self._parts.catalog.pin(space.tenant, lease.runs, len(entries))
        held.group.leases[lease_id] = lease
        held.group.leased_bytes += size_bytes

    def _entry(self, space: Space, slot: int) -> Entry:
        """The block in a slot; for a slot whose block is gone, one that is dead and only holds it."""
        dram = self._parts.dram
        owner = dram.owner(slot)
        if isinstance(owner, Entry):
            return owner
        size = dram.class_of(slot)
        pool = Pool(space, size, self._parts.catalog.order(space.tenant, size))
        entry = Entry(hash=b"", parent=b"", pool=pool, slot=slot, size_bytes=size, state=DEAD)
        dram.bind(slot, entry)
        return entry

    def _free_the_rest(self) -> None:
        """Slots that only a lease kept, and that none holds after all."""
        dram = self._parts.dram
        for noted in dram.adoption.leases:
            for slot in noted.slots():
                if dram.is_taken(slot) and dram.owner(slot) is None:
                    dram.free(slot)

    # ---- clients that come back ----

    def knows_group(self, tenant: str, group_id: bytes) -> bool:
        """Whether a group of an earlier process had this id."""
        return any(held.group_id == group_id and held.group.tenant == tenant for held in self._groups.values())

    def resume(self, session: Session, lease_ids: Sequence[int]) -> list[int]:
        """A client is back, with a new session: the leases that it still uses are that one's; returns their ids.

        What it does not name ends, when no other session of its old group is left to use it.
        """
        caller = session.caller
        known = self._by_client.get(session.client_id, []) if session.client_id else []
        mine = [(held, noted) for held, noted in known if (noted.tenant, noted.uid) == (caller.tenant, caller.uid)]
        groups = list(dict.fromkeys(held for held, _ in mine))
        resumed = [lease_id for lease_id in lease_ids if any(self._move(held, lease_id, session) for held in groups)]
        for held, noted in mine:
            self._leave(held, noted)
        return resumed

    def _move(self, held: Held, lease_id: int, session: Session) -> bool:
        lease, old_place = held.group.leases.get(lease_id), 0
        if lease is None or lease_id <= 0:
            return False
        old_place, lease.place = lease.place, 0
        if not session.place or not self._notes.leased(session, [lease]):
            lease.place = old_place
            return False
        self._notes.void(old_place)
        del held.group.leases[lease_id]
        held.group.leased_bytes -= lease.size_bytes
        session.group.leases[lease_id] = lease
        session.group.leased_bytes += lease.size_bytes
        return True

    def _leave(self, held: Held, noted: NotedSession) -> None:
        """One of a group's sessions is done with what it had; after the last one all ends."""
        place, _ = held.members.pop(noted.session_id)
        self._notes.void(place)
        if noted.client_id:
            left = [each for each in self._by_client.pop(noted.client_id) if each[1] is not noted]
            if left:
                self._by_client[noted.client_id] = left
        if held.members:
            return
        del self._groups[held.key]
        leases = list(held.group.leases.values())
        held.group.leases.clear()
        self._ends.add(held.group, leases, self._times.begin(Cause.RESTART).ended)

    def part_with(self, holds: Callable[[Lease], bool]) -> int:
        """End what is held for the groups that have such a lease: none of theirs can be resumed. Returns the leases."""
        ended = 0
        for held in list(self._groups.values()):
            if any(map(holds, held.group.leases.values())):
                ended += len(held.group.leases)
                for _, noted in list(held.members.values()):
                    self._leave(held, noted)
        return ended

    # ---- clients that do not ----

    async def run(self) -> None:
        """Look whether the processes are still there, until nothing is held any more; the daemon serves."""
        self._began_s = self._parts.clock.monotonic()  # nobody could come back while the tiers were being opened
        while self._groups:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """End what processes held that are gone."""
        members = [(held, noted) for held in self._groups.values() for _, noted in held.members.values()]
        unseen_too = self._parts.clock.monotonic() - self._began_s >= UNSEEN_S
        gone = await asyncio.to_thread(_gone, [noted for _, noted in members], unseen_too)
        for held, noted in members:
            if noted.session_id in gone and noted.session_id in held.members:
                self._leave(held, noted)


def _gone(sessions: Sequence[NotedSession], unseen_too: bool) -> set[bytes]:
    return {
        noted.session_id
        for noted in sessions
        if (start_ticks(noted.pid) != noted.started if noted.started else unseen_too)
    }
