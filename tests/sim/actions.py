"""What clients do: each action is a call on the store, as a transport would make it, and what must come of it.

An action changes state at once and returns a coroutine for the rest, or None.
"""

import asyncio
import ctypes
import inspect
import itertools

import xxhash
from kvstored_proto import namespace as wire
from kvstored_proto.page import Poster
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.catalog.leases import Caller
from kvstored.errors import DeviceError, InvalidArgument, KVStoredError, LimitExceeded, NotFound
from kvstored.purge.purge import Purge
from kvstored.purge.receipts import COMPLETE, Receipt, Selection
from kvstored.store import audit
from kvstored.store.lookups import Wish
from kvstored.store.outcomes import HIT, MISS, NOT_DURABLE, RESERVED
from tests.sim import residue, times
from tests.sim.model import Violation

REGION_BYTES = 32 << 10
REGIONS = 2
RECENT_CHAINS = 6
WAITS_S = (0.0, 0.0, 0.05, 1.0)


class Client:
    """One session: its namespaces, its staging, and what it holds."""

    def __init__(self, session, sizes):
        self.session = session
        self.tenant = session.caller.tenant
        self.sizes = sizes
        self.spaces = []
        self.regions = [i * REGION_BYTES for i in range(REGIONS)] if session.staging else []
        self.prefetches = []
        self.poster = Poster(session.page.memory) if session.page else None

    def end(self, world):
        """As the transport does when the connection ends."""
        world.clients.remove(self)
        if self.poster is not None:
            self.poster._words.release()
        world.node.store.end_session(self.session)
        if not self.session.group.members:
            world.leases.pop(self.session.group, None)

    def orphan(self, world):
        """What is left of it when the daemon dies: it knows its leases, and goes on reading."""
        leases = world.leases.get(self.session.group)
        return Orphan(self.session, self.tenant, dict(leases)) if leases and self.session.place else None


class Orphan:
    """A client whose daemon has died."""

    def __init__(self, session, tenant, leases):
        self.client_id = session.client_id
        self.tenant = tenant
        self.leases = leases


async def settled(answer):
    """The store answers at once where it can."""
    return await answer if inspect.isawaitable(answer) else answer


def guarded(action):
    """Errors that a client may get are results; all others are violations."""

    async def call(world, client):
        try:
            return await action(world, client)
        except (NotFound, LimitExceeded, DeviceError) as error:
            return type(error).__name__
        except InvalidArgument as error:
            if client is not None and client.session.ended:
                return type(error).__name__
            raise

    call.__name__ = action.__name__
    return call


def some_chain(world, client, *, putting=False):
    """A space of the client, consecutive hashes of a chain in it, the parent of the first, and their size."""
    rng, plan = world.rng, world.plan
    number, chain, start = rng.randrange(len(client.spaces)), rng.randrange(plan.chains), 0
    put_before = world.recent.setdefault(client.tenant, [])
    if putting:
        put_before.append((number, chain))
        del put_before[:-RECENT_CHAINS]
    elif put_before and rng.random() < 0.6:
        number, chain = rng.choice(put_before)
        number = min(number, len(client.spaces) - 1)
    if rng.random() < 0.3:
        start = rng.randrange(plan.chain_blocks)
    count = rng.randrange(1, plan.chain_blocks - start + 1)
    hashes = [hash_of(chain, i) for i in range(start, start + count)]
    parent = hash_of(chain, start - 1) if start else b""
    return client.spaces[number], hashes, parent, client.sizes[number]


def asked(session, hashes):
    """As the session socket has them of a request."""
    return session.hashes_asked(b"".join(hashes), len(hashes[0]))


def hash_of(chain, index):
    return b"chain-%02d-block-%03d" % (chain, index)


def keys_of(space, hashes):
    return [(space.tenant, space.namespace.digest, hash_) for hash_ in hashes]


# ---- sessions ----


@guarded
async def open_session(world, _client):
    rng, store, plan = world.rng, world.node.store, world.plan
    tenant = rng.choice(plan.tenants)
    peers = [c for c in world.clients if c.tenant == tenant and c.session.group.group_id]
    orphans = [orphan for orphan in world.orphans if orphan.tenant == tenant and rng.random() < 0.8]
    orphan = orphans[0] if orphans else None  # a client whose daemon has died is back
    join = rng.choice(peers).session.group.group_id if peers and rng.random() < 0.5 else b""
    session = await store.open_session(
        Caller(tenant, "tenant", "session"),
        staging_bytes=REGIONS * REGION_BYTES,
        create_group=not join and rng.random() < 0.5,
        join_group=join,
        page=rng.random() < 0.5,
        client_id=orphan.client_id if orphan else world.new_client_id(),
    )
    client = Client(session, plan.sizes[tenant])
    world.clients.append(client)
    if orphan is not None:
        resume(world, client, orphan)
    for number in range(len(client.sizes)):
        if session.ended:  # it is refused then
            break
        spec = pb.NamespaceSpec(model=f"model-{number}")
        world.tenant_of[wire.digest(tenant, spec)] = tenant
        _, space, _ = await store.open_namespace(session, spec)
        if space.tenant != tenant:
            raise Violation(f"{tenant} was given the space of {space.tenant}")
        world.names.add(space.namespace)
        if not session.ended:
            client.spaces.append(space)
    return "opened"


def resume(world, client, orphan):
    """Some of what it was reading is its own again."""
    if orphan not in world.orphans:  # another came first
        return
    world.orphans.remove(orphan)
    wanted = [lease_id for lease_id in orphan.leases if world.rng.random() < 0.8]
    resumed = world.node.store.quarantine.resume(client.session, wanted)
    for other in world.orphans:  # of the same group
        for lease_id in resumed:
            other.leases.pop(lease_id, None)
    world.counts["resumed"] += len(resumed)
    group = client.session.group
    for lease_id in resumed:
        entries, blocks = group.leases[lease_id].entries, orphan.leases[lease_id]
        again = [
            (entry, slot, world.node.dram.address(slot), size, digest)
            for entry, (_, slot, _, size, digest) in zip(entries, blocks, strict=True)
        ]
        world.check_lease(again)
        world.leases.setdefault(group, {})[lease_id] = again


def kill_session(world, client):
    if world.rng.random() < 0.5:
        for task, (_, _, whose) in list(world.calls.items()):
            if whose is client:
                task.cancel()
    client.end(world)


def cancel_call(world, _client):
    if world.calls:
        world.rng.choice(list(world.calls)).cancel()


# ---- puts ----


@guarded
async def put(world, client):
    if not client.spaces or not client.regions:
        return "busy"
    region = client.regions.pop()
    answer = await _put(world, client, region, durable=world.rng.random() < 0.2)
    client.regions.append(region)  # not where it was cancelled: a copy may still run
    return answer


async def _put(world, client, region, *, durable):
    rng, store, session = world.rng, world.node.store, client.session
    space, hashes, parent, size = some_chain(world, client, putting=True)
    lifetime, asked_s = times.lifetime(world, hashes), world.node.clock.wall()
    reserving = store.writes.reserve(
        *(session, space, hashes, [size] * len(hashes), parent, rng.choice(WAITS_S)), durable=durable, lifetime=lifetime
    )
    ends = (asked_s + lifetime.ttl_s, lifetime.ttl_s if lifetime.sliding else 0.0) if lifetime is not None else ()
    reserved = await settled(reserving)
    if not reserved.reservation_id:
        return bytes(reserved.outcomes)
    todo = [i for i, outcome in enumerate(reserved.outcomes) if outcome == RESERVED]
    if rng.random() < 0.1:
        store.writes.abort(session, reserved.reservation_id, [todo.pop()])
    answers = b""
    while todo and rng.random() < 0.97:  # else the rest is forgotten, until its session ends
        count = rng.randrange(1, max(1, REGION_BYTES // size) + 1)
        batch, todo = todo[:count], todo[count:]
        blocks = [(i, hashes[i]) for i in batch]
        answers += await _commit(world, client, reserved, space, blocks, region, size, durable, ends)
    return bytes(reserved.outcomes) + b":" + answers


async def _commit(world, client, reserved, space, blocks, region, size, durable, ends):
    model, session, began = world.model, client.session, world.model.now()
    versions, offsets = [], []
    for place, (_, hash_) in enumerate(blocks):
        (key,) = keys_of(space, [hash_])
        version, data = model.payload(key, size)
        offset = region + place * size
        ctypes.memmove(session.staging.address_of(offset, size), data, size)
        model.begins(key, version, *ends)
        versions.append((key, version))
        offsets.append(offset)
    committing = world.node.store.commits.commit(session, reserved.reservation_id, [i for i, _ in blocks], offsets)
    answers = await settled(committing)
    for (key, version), answer in zip(versions, answers, strict=True):
        if answer not in (HIT, MISS, NOT_DURABLE) or (answer == NOT_DURABLE and not durable):
            raise Violation(f"a commit was answered {answer}")
        if answer == HIT and durable:
            model.must_be_owed(key, began)
        if not durable or answer != MISS:  # deleted while it went down, it was readable meanwhile
            model.answered(key, version, hit=answer != MISS)
    return answers


# ---- gets ----


@guarded
async def get(world, client):
    if not client.spaces:
        return None
    rng, store, session = world.rng, world.node.store, client.session
    space, hashes, _, _ = some_chain(world, client)
    spaces = list(client.spaces) if rng.random() < 0.2 else [space]
    try:
        held = await settled(store.reads.get(session, spaces, asked(session, hashes), rng.choice(WAITS_S)))
        for lease, of_space in zip(held.leases, spaces, strict=bool(held.leases)):
            _take(world, client, lease, keys_of(of_space, hashes))
    finally:  # also where it was cancelled when all was done
        for of_space in spaces:
            world.model.used(keys_of(of_space, hashes), world.node.clock.wall())
    if held.leases:
        for segment_id, _, _ in store.expose(session, held.leases):
            owner = world.seen_by.setdefault(segment_id, client.tenant)
            if owner != client.tenant:
                raise Violation(f"the memory of segment {segment_id} is mapped by {owner} and by {client.tenant}")
    return held.blocks, held.next


def _take(world, client, lease, keys):
    """Look at every block of a lease, and remember what it looks like."""
    dram, blocks = world.node.dram, []
    for entry, slot, key in zip(lease.entries, lease.slots, keys, strict=False):
        data = bytes(dram.view(slot, entry.size_bytes))
        world.model.check(key, data)
        world.model.check_end(key, data, world.node.clock.wall())
        segment = dram._segments[slot >> 20]
        if segment.tenant != client.tenant:
            raise Violation(f"{client.tenant} was given a segment of {segment.tenant}")
        blocks.append((entry, slot, dram.address(slot), entry.size_bytes, xxhash.xxh3_64_intdigest(data)))
    world.leases.setdefault(client.session.group, {})[lease.lease_id] = blocks


def release(world, client):
    held = world.leases.get(client.session.group)
    if not held:
        return
    count = world.rng.randrange(1, 4)
    chosen = list(itertools.islice(held, count))
    for lease_id in chosen:
        world.check_lease(held.pop(lease_id))
    if client.poster is None or world.rng.random() < 0.5 or not client.poster.post(chosen):
        world.node.store.reads.release(client.session, chosen)


@guarded
async def lookup(world, client):
    if not client.spaces:
        return None
    space, hashes, _, _ = some_chain(world, client)
    spaces = list(client.spaces) if world.rng.random() < 0.2 else [space]
    began, began_s = world.model.now(), world.node.clock.wall()
    run = await _look(world, client, spaces, hashes)
    for of_space in spaces:
        for key in keys_of(of_space, hashes[: run.ready_blocks]):
            world.model.may_be_there(key, began, began_s)
    return run.prefix_blocks, run.ready_blocks


async def _look(world, client, spaces, hashes):
    """In some worlds what is looked up begins to come up, and some of that is cancelled."""
    reads, dice = world.node.store.reads, world.prefetch_dice
    if not world.plan.prefetches or dice.random() < 0.4:
        return await settled(reads.lookup(spaces, asked(client.session, hashes)))
    wish = Wish(prefetch=True, deadline_s=dice.choice((0.0, 0.0, 0.003, 1.0)))
    looked = await reads.lookups.look(client.session, spaces, hashes, wish)
    world.counts["lookup_prefetched"] += looked.queued_blocks
    if looked.prefetch_id and dice.random() < 0.2:
        await asyncio.sleep(0.001 * dice.random())
        job = await world.node.store.prefetches.cancel(client.session, looked.prefetch_id)
        if job.running:
            raise Violation("a cancel was answered while a copy runs")
    return looked.run


@guarded
async def contains(world, client):
    if not client.spaces:
        return None
    space, hashes, _, _ = some_chain(world, client)
    began, began_s = world.model.now(), world.node.clock.wall()
    outcomes, _ = await world.node.store.reads.contains(space, hashes)
    for key, outcome in zip(keys_of(space, hashes), outcomes, strict=True):
        if outcome == HIT:
            world.model.may_be_there(key, began, began_s)
    return outcomes


def touch(world, client):
    if client.spaces:
        space, hashes, _, _ = some_chain(world, client)
        world.node.store.reads.touch(space, hashes)
        world.model.used(keys_of(space, hashes), world.node.clock.wall())


# ---- prefetches ----


@guarded
async def prefetch(world, client):
    if not client.spaces:
        return None
    rng = world.rng
    space, hashes, _, _ = some_chain(world, client)
    spaces = list(client.spaces) if rng.random() < 0.2 else [space]
    started = await world.node.store.prefetches.start(
        client.session, spaces, hashes, rng.randrange(3), rng.choice((0.0, 0.01, 1.0))
    )
    if started.prefetch_id:
        client.prefetches.append(started.prefetch_id)
        if rng.random() < 0.4:  # at once, while it runs
            await asyncio.sleep(0.001 * rng.random())
            return await cancel_prefetch(world, client)
    return started.outcome, started.resident_blocks, started.queued_blocks


@guarded
async def poll(world, client):
    if not client.prefetches:
        return None
    rng = world.rng
    job = await world.node.store.prefetches.poll(client.session, rng.choice(client.prefetches), rng.choice(WAITS_S))
    return job.ready_blocks, job.failed_blocks


@guarded
async def cancel_prefetch(world, client):
    if not client.prefetches:
        return None
    chosen = client.prefetches.pop(-world.rng.randrange(2) % len(client.prefetches))
    job = await world.node.store.prefetches.cancel(client.session, chosen)
    if job.running:
        raise Violation("a cancel was answered while a copy runs")
    return job.ready_blocks, job.failed_blocks


# ---- deletes and the rest ----


@guarded
async def delete(world, client):
    if not client.spaces:
        return None
    space, hashes, _, _ = some_chain(world, client)
    hashes = hashes[: world.rng.randrange(1, 4)]
    forbidden = world.model.delete_begins(keys_of(space, hashes))
    # Where a path is off it raises, and what was deleted may come back: the model has it still.
    count = await world.node.store.writes.delete(client.session, space, hashes)
    world.model.deleted(forbidden)
    return count


@guarded
async def purge(world, client):
    """All of a tenant, or one model of it; clients that hold it too long are parted with."""
    rng, store = world.purge_dice, world.node.store
    space = rng.choice(client.spaces) if client.spaces and rng.random() < 0.5 else None
    digest = b"" if space is None else space.namespace.digest
    deadline_s = rng.choice((0.0, 1.0, 5.0))
    if store.quarantine.leases:
        return None  # who reads on without a daemon is not asked to check its connection here
    store.part_with = lambda session, _, cause: world.part_with(session)
    receipt = Receipt("sim", Selection(client.tenant, digest), "sim", 0.0, deadline_s)
    forbidden = world.model.purge_begins(client.tenant)
    tags = world.model.bytes_before(client.tenant, digest)
    try:
        async with world.purging:
            work = Purge(store, receipt)
            work.note_tenants()
            await work.run()
    finally:
        world.model.purge_ends(client.tenant)
    if receipt.state == COMPLETE:
        world.model.deleted({key: got for key, got in forbidden.items() if digest in (b"", key[1])})
        residue.require_none(world, client.tenant, tags)
        world.counts["purged"] += len(tags)
    return receipt.state, receipt.dram_blocks, receipt.nvme_blocks


@guarded
async def bump(world, client):
    """All of a model out of reach at once."""
    return await times.bump(world, client)


@guarded
async def flush(world, _client):
    return await world.node.below.mover.flush(5.0)


@guarded
async def verify(world, _client):
    found = await audit.verify(world.node.parts)
    if found.corrupt and not world.device.fired:
        raise Violation(f"{found.corrupt} blocks differ from their hashes, and no fault fell")
    return found.dram_blocks, found.nvme_blocks


WEIGHTS = (
    (put, 30),
    (get, 26),
    (release, 14),
    (open_session, 6),
    (kill_session, 3),
    (cancel_call, 4),
    (lookup, 4),
    (contains, 3),
    (touch, 1),
    (prefetch, 8),
    (poll, 3),
    (cancel_prefetch, 2),
    (delete, 4),
    (flush, 2),
    (verify, 0.3),
)
ACTIONS = [
    (upto, action) for (action, _), upto in zip(WEIGHTS, itertools.accumulate(w for _, w in WEIGHTS), strict=True)
]
assert all(issubclass(error, KVStoredError) for error in (NotFound, LimitExceeded, DeviceError, InvalidArgument))
