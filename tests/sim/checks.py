"""The invariants of the design, as far as they can be seen from outside the store."""

import asyncio
from collections import Counter

import xxhash

from kvstored.catalog.catalog import PROMOTING, READY, REVIVING, WRITING
from kvstored.catalog.prefetched import ENDS, SOURCES
from kvstored.mover import promoter
from kvstored.tiers.base import Load
from kvstored.tiers.formats import State
from tests.sim import hints, quotas, times
from tests.sim.model import Violation
from tests.sim.plan import SIZES

AUDIT_EVERY_STEPS = 4
QUIET_S_MAX = 300
RECOUNTS_MAX = 30
SPOILING = {"read_flip", "rot", "torn_write", "misdirected"}


def step(world):
    """After each operation."""
    parts, node = world.node.parts, world.node
    below = node.below.promoter
    require(below.queued_blocks <= node.config.queue_blocks, "the queue of reads is over its limit")
    reads(below.queue)
    require(parts.staging.used_bytes <= parts.staging.limit_bytes, "staging is over its limit")
    require(below.queued_blocks >= 0 and below.inflight_bytes >= 0, "the account of reads is below zero")
    quotas.limits(world)
    hints.check(world)
    sample_leases(world)
    orphaned_leases(world)
    world.steps += 1
    if not world.steps % AUDIT_EVERY_STEPS:
        accounts(world)


def reads(queue):
    """What is read for nobody who waits is bounded, but for one batch, which may always begin."""
    require(
        queue.speculative_bytes <= max(queue.speculative_limit_bytes, promoter.BATCH_BYTES, max(SIZES)),
        f"{queue.speculative_bytes} bytes are read ahead, beyond the limit of {queue.speculative_limit_bytes}",
    )
    require(0 <= queue.speculative_bytes <= queue.inflight_bytes, "more is read ahead than is read")
    require(queue.demand_bytes >= 0 and queue.blocks >= 0, "the account of the queue is below zero")


def require(holds, what):
    if not holds:
        raise Violation(what)


def sample_leases(world):
    """One lease of each group: its bytes are as they were."""
    for group in [group for group in world.leases if not group.members]:
        del world.leases[group]  # its last member was a session that did not get to be opened
    for held in world.leases.values():
        if held:
            lease_id = next(iter(held))
            world.check_lease(held[lease_id])
            held[lease_id] = held.pop(lease_id)  # the next time another


def orphaned_leases(world):
    """What clients of a process that died were reading is as it was, until they are back or taken for gone."""
    if world.loop.time() >= world.orphans_until_s:
        world.orphans.clear()
    dram = world.node.dram
    for orphan in world.orphans:
        for blocks in orphan.leases.values():
            for _, slot, _, size, digest in blocks:
                data = bytes(dram.view(slot, size))
                require(
                    xxhash.xxh3_64_intdigest(data) == digest, f"slot {slot} changed under a client that outlived a kill"
                )


def accounts(world):
    """Every tier's bytes add up, and so does what sessions hold."""
    node, parts = world.node, world.node.parts
    try:
        node.dram.audit()
        node.nvme.audit()
    except AssertionError as error:
        raise Violation(f"an account is wrong: {error}") from error
    if not world.device.fired.keys() & SPOILING:
        counted = node.nvme.counters()
        corrupt = counted.get("load_corrupt_blocks", 0) + counted.get("scrub_corrupt_blocks", 0)
        require(
            not corrupt, f"{corrupt} blocks read from NVMe were not what their records say, and no device spoilt them"
        )
    prefetched(node)
    leased, unfinished = Counter(), set()
    for space in _spaces(parts):
        require(space.known is None or space.known.right(space.entries), "a run that is remembered has changed")
        for entry in space.entries.values():
            if entry.leases:
                leased[space.tenant] += entry.pool.slot_bytes
            if entry.state in (WRITING, PROMOTING, REVIVING):
                unfinished.add(id(entry))
            require(node.dram.owner(entry.slot) is entry, f"the slot of {entry.hash} is somebody else's")
    for tenant, bytes_ in leased.items():
        require(bytes_ <= parts.catalog.leased_bytes[tenant], f"{tenant} leases more than is counted")
        require(bytes_ <= parts.limits.held_bytes, f"{tenant} leases more than it may")
    require(parts.catalog._waiters.keys() <= unfinished, "somebody waits for a block that will not change any more")
    for session in parts.sessions:
        reserved = sum(
            entry.pool.slot_bytes
            for reservation in session.reservations.values()
            for entry in (*reservation.open.values(), *reservation.done.values())
        )
        require(reserved <= session.reserved_bytes, "a session has reserved more than is counted")
        require(session.reserved_bytes <= parts.limits.held_bytes, "a session has reserved more than it may")


def prefetched(node):
    """What was read ahead was useful, late, wasted or dropped, or it is there and nobody has asked for it."""
    spaces = [*node.parts.catalog.spaces.values(), *node.parts.catalog.retired]
    unused = Counter()
    for space in spaces:
        for entry, source in space.prefetched.items():
            unused[source] += entry.pool.slot_bytes
            require(space.entries.get(entry.hash) is entry, f"{entry.hash} is gone, and its prefetch is not over")
    for source in SOURCES:
        ended = sum(node.counters[f"prefetch_{source}_{end}_bytes"] for end in ENDS)
        begun = node.counters[f"prefetch_{source}_bytes"]
        require(begun == ended + unused[source], f"of {begun} bytes read ahead for {source}, {ended} ended")


async def nothing_held(world):
    """When every session has ended, nothing is held, pinned or under way."""
    node, parts = world.node, world.node.parts
    for _ in range(QUIET_S_MAX):
        held = _held(node, parts)
        if not held and node.dram.usage().blocks == len(parts.catalog):
            break  # else the slot of a deleted block: a late device has not let go of it
        await asyncio.sleep(1)
    require(not held, f"nobody is left, and there is still held: {held}")
    accounts(world)
    entries = [entry for space in _spaces(parts) for entry in space.entries.values()]
    usage = node.dram.usage()
    require(usage.blocks == len(entries), f"{usage.blocks} slots for {len(entries)} blocks")


def _spaces(parts):
    """With those of past epochs, until they are taken away."""
    return (*parts.catalog.spaces.values(), *parts.catalog.retired)


def _held(node, parts):
    """Everything that is held or under way, by name."""
    held = Counter(node.store.held())
    held["holds"] = sum(e.holds for space in _spaces(parts) for e in space.entries.values())
    held["leased_bytes"] += sum(parts.catalog.leased_bytes.values())
    held["queued_blocks"] = node.below.promoter.queued_blocks
    held["inflight_bytes"] = node.below.promoter.inflight_bytes
    for volume in node.nvme._volumes.values():
        for extent in volume.table._extents.values():
            held["pins"] += extent.pins
            held["writing_bytes"] += extent.writing_bytes
    return +held


async def durable(world):
    """Everything owed is there and right; the account of NVMe is what its index says.

    But for tenants whose key could not be read: what they have is a miss until it can, and stays.
    """
    node, model = world.node, world.model
    locked, by_space = node.nvme.keys.locked(), {}
    for tenant, digest, hash_ in model.owed:
        if tenant not in locked:
            by_space.setdefault((tenant, digest), []).append(hash_)
    for (tenant, digest), hashes in by_space.items():
        stored = times.stored_as(world, digest)
        records = await node.nvme.find(tenant, stored, hashes, prefix=False)
        found = [(hash_, record) for hash_, record in zip(hashes, records, strict=True) if record is not None]
        try:
            missing = [hash_ for hash_, record in zip(hashes, records, strict=True) if record is None]
            if missing:
                await _recycled(node)
            # Not owed any more where a scrub dropped, meanwhile, what the device had spoilt, or where it ended.
            now_s = node.clock.wall()
            missing = [hash_ for hash_ in missing if model.is_owed((tenant, digest, hash_), now_s)]
            require(not missing, f"durable blocks of {tenant} are lost: {missing[:3]}")
            for hash_, record in found:
                await _load(world, (tenant, digest, hash_), stored, record)
        finally:
            node.nvme.unpin([record for _, record in found])
    await _recount(world)


async def _recycled(node):
    """What is being evicted is not found any more, and gone only when its entries are."""
    for _ in range(QUIET_S_MAX):
        extents = [extent for volume in node.nvme._volumes.values() for extent in volume.table._extents.values()]
        if not any(extent.state is State.RECYCLING for extent in extents):
            return
        await asyncio.sleep(0.01)
    raise Violation("an extent is recycled for ever")


async def _load(world, key, stored, record):
    spoilt = world.is_spoilt(record)
    (ok,) = await world.node.nvme.load([Load(stored, key[2], record, world.scratch.address)])
    require(ok or spoilt, f"a durable block cannot be read: {key} at {record.location}")
    if ok:
        world.model.check(key, world.scratch.get(0, record.size_bytes))


async def _recount(world):
    held, used = await _counted(world)
    for _ in range(RECOUNTS_MAX if world.plan.times else 0):  # what has ended goes whenever it likes
        if held == used:
            break
        await asyncio.sleep(1)
        held, used = await _counted(world)
    require(held == used, f"the index holds {dict(held)}, the account says {dict(used)}")


async def _counted(world):
    node = world.node
    counted, cursor = Counter(), b""
    while True:
        page, cursor = await node.nvme.list_records(None, cursor, 100)
        for digest, _, record in page:
            counted[world.tenant_of[world.names.first(digest)]] += -(-record.size_bytes // 4096) * 4096
        if not cursor:
            break
    return +counted, +Counter({tenant: bytes_ for tenant, (bytes_, _) in node.nvme.tenant_usage().items()})


def ready_blocks(world):
    """What can be read from DRAM, and will be if the process ends here: keys, when they end (0: they do not), and
    under which digest they are stored.

    Ends by their records: that a use has moved a sliding end is noted there only when the end comes near.
    """
    records = world.node.dram.records
    blocks = {}
    for space in world.node.parts.catalog.spaces.values():
        for entry in space.entries.values():
            if entry.state == READY:
                expiry = records.expiry(entry.slot)
                end_s = expiry.expires_s if expiry is not None else 0.0
                blocks[space.tenant, space.namespace.digest, entry.hash] = (end_s, space.digest)
    return {key: value for key, value in blocks.items() if not world.model.is_bumped(key)}


def kept(world, before):
    """What could be read from DRAM when the process died, and has not ended, is there again, verified or not yet.

    But for what was stored before a device that was off brought the epoch of its namespace: that is past by then.
    """
    now_s = world.node.clock.wall()
    before = {
        key
        for key, (end_s, stored) in before.items()
        if not 0 < end_s <= now_s and (stored == times.stored_as(world, key[1]) or not world.device.fired)
    }
    there = {
        (space.tenant, space.namespace.digest, entry.hash)
        for space in world.node.parts.catalog.spaces.values()
        for entry in space.entries.values()
    }
    require(
        before <= there,
        f"{len(before - there)} of {len(before)} blocks in kept memory are lost: {list(before - there)[:3]}",
    )
    world.counts["adopted"] += len(before)
