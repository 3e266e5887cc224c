"""The invariants of the design, as far as they can be seen from outside the store."""

import asyncio
from collections import Counter

import xxhash

from kvstored.catalog import PROMOTING, READY, REVIVING, WRITING
from kvstored.tiers.base import Load
from tests.sim.model import Violation

AUDIT_EVERY_STEPS = 4
QUIET_S_MAX = 300
SPOILING = {"read_flip", "rot", "torn_write", "misdirected"}


def step(world):
    """After each operation."""
    parts, node = world.node.parts, world.node
    promoter = node.below.promoter
    require(promoter.queued_blocks <= node.config.queue_blocks, "the queue of reads is over its limit")
    require(parts.staging.used_bytes <= parts.staging.limit_bytes, "staging is over its limit")
    require(promoter.queued_blocks >= 0 and promoter.inflight_bytes >= 0, "the account of reads is below zero")
    sample_leases(world)
    orphaned_leases(world)
    world.steps += 1
    if not world.steps % AUDIT_EVERY_STEPS:
        accounts(world)


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
    leased, unfinished = Counter(), set()
    for space in parts.catalog.spaces.values():
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
    entries = [entry for space in parts.catalog.spaces.values() for entry in space.entries.values()]
    usage = node.dram.usage()
    require(usage.blocks == len(entries), f"{usage.blocks} slots for {len(entries)} blocks")


def _held(node, parts):
    """Everything that is held or under way, by name."""
    held = Counter(node.store.held())
    held["holds"] = sum(e.holds for space in parts.catalog.spaces.values() for e in space.entries.values())
    held["leased_bytes"] += sum(parts.catalog.leased_bytes.values())
    held["queued_blocks"] = node.below.promoter.queued_blocks
    held["inflight_bytes"] = node.below.promoter.inflight_bytes
    for volume in node.nvme._volumes.values():
        for extent in volume.table._extents.values():
            held["pins"] += extent.pins
            held["writing_bytes"] += extent.writing_bytes
    return +held


async def durable(world):
    """Everything owed is there and right; the account of NVMe is what its index says."""
    node, model = world.node, world.model
    by_space = {}
    for tenant, digest, hash_ in model.owed:
        by_space.setdefault((tenant, digest), []).append(hash_)
    for (tenant, digest), hashes in by_space.items():
        records = await node.nvme.find(tenant, digest, hashes, prefix=False)
        found = [(hash_, record) for hash_, record in zip(hashes, records, strict=True) if record is not None]
        try:
            missing = [hash_ for hash_, record in zip(hashes, records, strict=True) if record is None]
            # Not owed any more where a scrub dropped, meanwhile, what the device had spoilt.
            missing = [hash_ for hash_ in missing if (tenant, digest, hash_) in model.owed]
            require(not missing, f"durable blocks of {tenant} are lost: {missing[:3]}")
            for hash_, record in found:
                await _load(world, (tenant, digest, hash_), record)
        finally:
            node.nvme.unpin([record for _, record in found])
    await _recount(world)


async def _load(world, key, record):
    spoilt = world.is_spoilt(record)
    (ok,) = await world.node.nvme.load([Load(key[1], key[2], record, world.scratch.address)])
    require(ok or spoilt, f"a durable block cannot be read: {key} at {record.location}")
    if ok:
        world.model.check(key, world.scratch.get(0, record.size_bytes))


async def _recount(world):
    node = world.node
    counted, cursor = Counter(), b""
    while True:
        page, cursor = await node.nvme.list_records(None, cursor, 100)
        for digest, _, record in page:
            counted[world.tenant_of[digest]] += -(-record.size_bytes // 4096) * 4096
        if not cursor:
            break
    used = Counter({tenant: bytes_ for tenant, (bytes_, _) in node.nvme.tenant_usage().items()})
    require(+counted == +used, f"the index holds {dict(counted)}, the account says {dict(used)}")


def ready_blocks(node):
    """Keys of what can be read from DRAM."""
    return {
        (space.tenant, space.digest, entry.hash)
        for space in node.parts.catalog.spaces.values()
        for entry in space.entries.values()
        if entry.state == READY
    }


def kept(world, before):
    """What could be read from DRAM when the process died is there again, or will be when it is verified."""
    there = {
        (space.tenant, space.digest, entry.hash)
        for space in world.node.parts.catalog.spaces.values()
        for entry in space.entries.values()
    }
    require(
        before <= there,
        f"{len(before - there)} of {len(before)} blocks in kept memory are lost: {list(before - there)[:3]}",
    )
    world.counts["adopted"] += len(before)
