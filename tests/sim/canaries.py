"""Bugs to plant: for each invariant one that the simulation must find. Each returns what takes it out again.

A bug that the code has outgrown would be found by whatever error it ends in: so it is planted only where it fits.
"""

import asyncio
import inspect

import msgspec

from kvstored.catalog import catalog, leases, room
from kvstored.catalog.prefetched import PrefetchAccount
from kvstored.catalog.spaces import LEASE_UNIT, Space
from kvstored.mover import jobs, mover, promoter, read_queue, searches
from kvstored.policy.hinted import Hinted
from kvstored.policy.quota import Allotments, Quota
from kvstored.purge.holders import Holders
from kvstored.store import commits, reads, writes
from kvstored.store.epochs import Bumps
from kvstored.testing.simulated_device import SimulatedDevice
from kvstored.tiers import runs
from kvstored.tiers.dram import DramTier
from kvstored.tiers.extent import ExtentTable
from kvstored.tiers.nvme import NvmeTier
from kvstored.tiers.pool import SegmentPool
from kvstored.tiers.volume import Volume
from kvstored.tiers.wiping import ExtentWiper

CANARIES = {}


def canary(plant):
    """A function that returns (object, attribute, replacement) for each place it changes."""

    def planted():
        before = []
        for where, name, what in plant():
            was = vars(where).get(name)
            _check_fits(plant.__name__, f"{where.__name__}.{name}", was, what)
            before.append((where, name, was))
            setattr(where, name, what)

        def restore():
            for where, name, was in reversed(before):
                setattr(where, name, was)

        return restore

    CANARIES[plant.__name__] = planted
    return planted


class Misfit(Exception):
    """A planted bug replaces what is not there any more, or is called in another way."""


def _check_fits(canary_name, name, was, what):
    """Raises Misfit."""
    if was is None:
        raise Misfit(f"{canary_name}: there is no {name}")
    for shape in (inspect.iscoroutinefunction, lambda function: list(inspect.signature(function).parameters)):
        if shape(was) != shape(what):
            raise Misfit(f"{canary_name}: {name} is called in another way: {inspect.signature(was)}")


# ---- exact bytes or no hit ----


@canary
def unchecked_load():
    """What is read from NVMe is not checked against its content hash."""
    yield runs, "_check", lambda block: runs.Read.OK


@canary
def early_publish():
    """A block is readable before its bytes are in its slot."""
    original = commits.Commits._copied

    async def copied(self, session, reservation, indices, entries, copies, total_bytes):
        for entry in entries:
            if entry.state == catalog.WRITING:
                self._room._catalog.publish(entry)
                entry.state = catalog.READY
        return await original(self, session, reservation, indices, entries, copies, total_bytes)

    def publish(self, entry, content_hash):
        if entry.state == catalog.READY:
            self._dram.records.commit(entry.slot, content_hash)
            return True
        return original_publish(self, entry, content_hash)

    original_publish = room.Room.publish
    yield commits.Commits, "_copied", copied
    yield room.Room, "publish", publish


@canary
def stale_generation():
    """An extent's generation stays when it is recycled: old entries look valid."""
    original = ExtentTable.recycle

    def recycle(self, extent):
        original(self, extent)
        extent.generation -= 1

    yield ExtentTable, "recycle", recycle


@canary
def deleted_comes_back():
    """A delete forgets what is on NVMe."""

    async def delete(self, tenant, digest, hashes):
        return 0

    yield NvmeTier, "delete", delete


# ---- tenants apart ----


@canary
def shared_segments():
    """A segment that nobody uses any more serves another tenant."""

    def cut_unused(self, tenant, size, owners):
        for owner in list(self._unused):
            for segment in self._unused[owner].values():
                if segment.size_bytes >= size:
                    del self._unused[owner][segment.segment_id]
                    self._open.get((owner, segment.slot_bytes), {}).pop(segment.segment_id, None)
                    self._unused.setdefault("", {})[segment.segment_id] = segment
                    segment.tenant = ""
                    self._cut(segment, tenant, size)
                    return segment
        return None

    yield SegmentPool, "_cut_unused", cut_unused


@canary
def shared_index():
    """Whose record it is does not matter, and the namespace of a lookup neither."""
    original = catalog.Catalog.space

    def space(self, namespace):
        for found in self.spaces.values():
            if found.namespace.fields == namespace.fields:
                return found
        return original(self, namespace)

    yield catalog.Catalog, "space", space


# ---- leased slots stay ----


@canary
def leased_slot_given_back():
    """A deleted block's slot is free at once, whoever holds it."""
    original = catalog.Catalog.forget

    def forget(self, entry):
        slot = original(self, entry)
        return slot if slot is not None or not entry.leases else entry.slot

    yield catalog.Catalog, "forget", forget


@canary
def leases_do_not_hold():
    """A leased block stands in its eviction order as any other."""

    def lease(self, space, entries):
        for entry in entries:
            entry.held += LEASE_UNIT

    def unlease(self, entries, segment_ids):
        for entry in entries:
            entry.held -= LEASE_UNIT
        return []

    yield catalog.Catalog, "lease", lease
    yield catalog.Catalog, "unlease", unlease


# ---- accounts ----


@canary
def abort_keeps_reserved():
    """An abort does not give the session its budget back."""
    original = writes.Writes.give_back

    def give_back(self, session, reservation, entries):
        before = session.reserved_bytes
        original(self, session, reservation, entries)
        session.reserved_bytes = before - 2 * (before - session.reserved_bytes)

    yield writes.Writes, "give_back", give_back


@canary
def uncounted_dead_bytes():
    """What dies on NVMe is not taken off the account of its extent."""
    original = ExtentTable.settle

    def settle(self, placed, delta):
        original(
            self, placed, {number: (bytes_, blocks) for number, (bytes_, blocks) in delta.items() if bytes_ > 8192}
        )

    yield ExtentTable, "settle", settle


@canary
def slot_lost():
    """An aborted block's slot does not come back."""

    def give_back(self, session, reservation, entries):
        for entry in entries:
            if entry.state != catalog.DEAD:
                self._room.forget(entry)
        session.reserved_bytes -= sum(entry.pool.slot_bytes for entry in entries)
        self.settle(session, reservation)

    yield writes.Writes, "give_back", give_back


# ---- nothing is left ----


@canary
def leaked_lease():
    """What a group leased is not given back at its end."""
    original = leases.Sessions.close

    def close(self, session):
        original(self, session)
        return []

    yield leases.Sessions, "close", close


@canary
def leaked_pin():
    """A lookup does not unpin what it found."""
    yield searches.Searches, "unpin", lambda self, found: None


@canary
def leaked_reservation():
    """A session's reservations outlive it."""
    yield writes.Writes, "end_session", lambda self, session: None


# ---- durability ----


@canary
def unsynced_data():
    """Data is acknowledged before it is synced."""
    yield SimulatedDevice, "_fdatasync", lambda self, file: None


@canary
def unsynced_names():
    """A new file's name is not made durable."""
    yield SimulatedDevice, "_sync_directory", lambda self, path: None


@canary
def acknowledged_before_stored():
    """A store is acknowledged whatever became of it."""
    original = Volume.store

    async def stored(self, tenant, stores):
        await original(self, tenant, stores)
        return [True] * len(stores)

    yield Volume, "store", stored


@canary
def acknowledged_without_index():
    """A store is acknowledged before its index commit: that comes a little later."""
    original = Volume.store

    async def stored(self, tenant, stores):
        asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(original(self, tenant, stores)))
        return [True] * len(stores)

    yield Volume, "store", stored


# ---- limits, the loop, the end ----


@canary
def unbounded_queue():
    """The queue of reads takes whatever comes."""
    original = promoter.Promoter._slots

    def slots(self, space, sizes, job):
        limit, self._queue_blocks = self._queue_blocks, 1 << 30
        try:
            return original(self, space, sizes, job)
        finally:
            self._queue_blocks = limit

    yield promoter.Promoter, "_slots", slots


@canary
def unbounded_speculation():
    """Prefetches take the whole device."""
    yield read_queue.ReadQueue, "_may_begin", lambda self, batch: True


@canary
def uncounted_prefetch():
    """What was read ahead and evicted unused is not noticed."""
    yield PrefetchAccount, "gone", lambda self, space, entry: None


@canary
def read_twice():
    """A get reads for itself what is on its way up already, and its predecessor is forgotten."""
    original = promoter.Promoter._enter

    def enter(self, space, hashes, have, job):
        for hash_ in have:
            entry = space.entries.get(hash_)
            if entry is not None and entry.state == catalog.PROMOTING:
                self._room.forget(entry)
        return original(self, space, hashes, have, job)

    def missing(self):
        entries, found = self.space.entries, self.found
        return [
            hash_
            for hash_ in self.hashes
            if hash_ not in found and getattr(entries.get(hash_), "state", catalog.PROMOTING) == catalog.PROMOTING
        ]

    yield promoter.Promoter, "_enter", enter
    yield jobs.Search, "missing", missing


@canary
def unlimited_leases():
    """A tenant may lease all there is."""
    yield reads.Reads, "_fitting", lambda self, tenant, spaces, runs, length: length


@canary
def index_on_the_loop():
    """The index is asked on the event loop."""

    async def find(self, digest, hashes, *, prefix):
        return self.index.find(digest, hashes, prefix=prefix)

    yield Volume, "find", find


@canary
def lost_wakeup():
    """A block that became readable wakes nobody."""
    yield catalog.Catalog, "_wake", lambda self, entry: None


@canary
def cancel_without_waiting():
    """A cancelled prefetch is answered while its copies run."""

    async def cancel(self, job):
        self.abandon(job)

    yield promoter.Promoter, "cancel", cancel


@canary
def dead_mover():
    """The mover ends at the first store that fails."""
    original = mover.Mover._finish

    def finish(self, entries, admitted, done, why):
        original(self, entries, admitted, done, why)
        if admitted and not done:
            raise RuntimeError("planted")

    yield mover.Mover, "_finish", finish


@canary
def limit_forgotten():
    """A tenant's limit of DRAM is not looked at."""
    yield Allotments, "room", lambda self, tenant, used_bytes, wanted_bytes: wanted_bytes


@canary
def guarantee_forgotten():
    """Whoever is above its share loses blocks down to nothing."""
    yield Quota, "spare", lambda self, used_bytes: used_bytes


@canary
def pins_forgotten():
    """Blocks that are pinned hard go as all others."""

    def everything(self):
        yield from self.drained()

    yield Hinted, "fixed", lambda self, node: False
    yield Hinted, "__iter__", everything


# ---- purges ----


@canary
def purge_does_not_wait():
    """A purge makes zeros of slots that somebody still reads or writes."""

    async def wipe_free(self):
        for entry in list(self._waiting.values()):
            await self._wipe([entry])

    yield Holders, "_wipe_free", wipe_free


@canary
def purge_wipes_the_living():
    """A purge takes what is alive in an extent for dead."""

    async def kept(self, extent, headers, *, live_only):
        return []

    yield ExtentWiper, "_kept", kept


@canary
def purge_leaves_bytes_below():
    """A purge makes no zeros on NVMe, and says that it is complete."""

    async def zero(self, extent, ranges):
        return 0

    yield ExtentWiper, "_zero", zero


@canary
def purge_leaves_bytes_in_memory():
    """A purge gives slots back as they are."""

    async def wipe(self, entries):
        for entry in entries:
            del self._waiting[id(entry)]
        self._parts.room.unhold(entries)

    async def wipe_free(self, tenant, told, before=lambda segment_id: None):
        return 0

    yield Holders, "_wipe", wipe
    yield DramTier, "wipe_free", wipe_free


# ---- ends and epochs ----


@canary
def ended_is_served():
    """Nobody looks whether a block in DRAM has ended."""
    yield Space, "drop_ended", lambda self, hashes: None


@canary
def end_lost_below():
    """A block goes to NVMe without its end."""
    original = mover.Mover._as_store

    def as_store(self, entry):
        return msgspec.structs.replace(original(self, entry), expiry=None)

    yield mover.Mover, "_as_store", as_store


@canary
def bump_of_the_next_process():
    """A bump is written down and counts after a restart only."""
    yield Bumps, "_begin_anew", lambda self, spaces: iter(())
