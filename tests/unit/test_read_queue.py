"""Which read is next, and how much may be under way."""

import inspect
from pathlib import Path

import pytest
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.catalog.catalog import Space
from kvstored.catalog.leases import Caller
from kvstored.keys import Namespace
from kvstored.mover.jobs import DEMAND, LOOKUP, Batch, Job
from kvstored.mover.read_queue import HEAP_MIN, ReadQueue
from kvstored.store.parts import Limits
from kvstored.testing.node import chain
from kvstored.testing.simulated_device import NO_FAULTS, SimulatedDevice
from kvstored.testing.simulated_node import NodeConfig, SimulatedNode
from kvstored.testing.virtual import Delays, VirtualLoop, abandon
from kvstored.tiers.dram import DramConfig
from kvstored.tiers.nvme_config import EXTENT_BYTES_MIN, NvmeConfig

SPACE = Space(Namespace("alice", bytes(16), b"", {}))
MANY = 1 << 30


def batch(priority, size_bytes=10, deadline_s=0.0, job=None):
    return Batch(SPACE, job or Job(priority, deadline_s), [object()], [], priority, deadline_s, size_bytes)


def taken(queue):
    """What may begin now, in order; all of it begins."""
    begun = []
    while (one := queue.next()) is not None:
        queue.begin(one)
        begun.append(one)
    return begun


async def test_the_most_urgent_goes_first_and_of_equals_the_one_that_came_first():
    queue = ReadQueue(MANY, MANY)
    batches = [batch(priority) for priority in (0, DEMAND, LOOKUP, DEMAND, 5, 0)]
    for each in batches:
        queue.add(each)
    assert [batches.index(each) for each in taken(queue)] == [1, 3, 2, 4, 0, 5]
    assert (queue.blocks, queue.inflight_bytes, queue.speculative_bytes) == (0, 60, 40)


async def test_speculative_reads_leave_the_device_to_whoever_waits():
    queue = ReadQueue(100, 25)
    for _ in range(5):
        queue.add(batch(LOOKUP))
    begun = taken(queue)
    assert len(begun) == 2, "a third would be over 25 bytes"
    wanted = [batch(DEMAND, 60), batch(DEMAND, 60), batch(DEMAND, 60)]
    for each in wanted:
        queue.add(each)
    assert queue.ahead_bytes == 20 + 180
    assert taken(queue) == wanted[:2], "its own limit is not used up by what is speculative"
    queue.ended(wanted[0])
    assert taken(queue) == wanted[2:]
    for each in (*begun, *wanted[1:]):
        queue.ended(each)
    assert (queue.inflight_bytes, queue.speculative_bytes, queue.demand_bytes) == (0, 0, 0)
    assert len(taken(queue)) == 2


async def test_a_batch_larger_than_a_limit_goes_alone():
    queue = ReadQueue(5, 5)
    speculative, demanded = [batch(0), batch(0)], [batch(DEMAND), batch(DEMAND)]
    queue.add(speculative[0])
    assert taken(queue) == speculative[:1]
    for each in (speculative[1], *demanded):
        queue.add(each)
    assert taken(queue) == demanded[:1]


async def test_who_joins_makes_a_read_as_urgent_as_its_own_wish():
    queue = ReadQueue(MANY, MANY)
    first, second = batch(0), batch(0)
    queue.add(first)
    queue.add(second)
    queue.join(second.entries, Job(DEMAND, 0.0))
    queue.join(second.entries, Job(LOOKUP, 0.0))  # less than it has
    assert queue.demand_bytes == 10
    assert taken(queue) == [second, first]
    assert not second.speculative
    assert (queue.demand_bytes, queue.speculative_bytes) == (0, 10)


@pytest.mark.parametrize(
    ("own", "other", "after"), [(3.0, 9.0, 9.0), (9.0, 3.0, 9.0), (3.0, 0.0, 0.0), (0.0, 3.0, 0.0)]
)
async def test_who_joins_may_have_more_time(own, other, after):
    queue = ReadQueue(MANY, MANY)
    one = batch(0, deadline_s=own)
    queue.add(one)
    queue.join(one.entries, Job(0, other))
    assert one.deadline_s == after


async def test_what_is_dropped_does_not_gather():
    queue = ReadQueue(1, 1)
    queue.add(batch(DEMAND))
    (running,) = taken(queue)
    queue.add(batch(DEMAND))  # may not begin, and stands before all that follow
    for _ in range(50 * HEAP_MIN):
        one = batch(0)
        queue.add(one)
        queue.remove(one)
    assert len(queue._heap) <= HEAP_MIN + 1
    assert queue.blocks == 1
    assert not running.waiting


# ---- on a device ----

BLOCK = 4096
PIECE = 4 * BLOCK  # of a prefetch
CALLER = Caller("alice", "tenant", "session")
LIMIT = 2 * PIECE


class LoggingDevice(SimulatedDevice):
    """Knows what was read of extents, in order."""

    def __init__(self):
        super().__init__(1, NO_FAULTS)
        self.log = []  # offset, bytes

    def _preadv(self, file, buffers, offset):
        got = super()._preadv(file, buffers, offset)
        if file.path.suffix == ".ext":
            self.log.append((offset, got))
        return got


def config(root):
    return NodeConfig(
        dram=DramConfig(64 * BLOCK, 64 * BLOCK, "never", "never"),
        nvme=NvmeConfig(paths=[root], capacity_bytes=4 * EXTENT_BYTES_MIN, extent_bytes=EXTENT_BYTES_MIN, io_threads=1),
        limits=Limits(1 << 20, 64, 16, 64 * BLOCK, 5.0, 60.0),
        staging_bytes=4 << 20,
        sessions=4,
        speculative_bytes=LIMIT,
    )


def test_a_get_overtakes_every_prefetch_that_the_device_has_not_got_yet(monkeypatch):
    monkeypatch.setattr("kvstored.mover.promoter.SPECULATIVE_BATCH_BYTES", PIECE)
    device = LoggingDevice()
    root = Path("/sim/drive")
    device.disk.make_folder(root.parent)
    loop = VirtualLoop(Delays(1))
    device.now = loop.time

    async def life():
        node = SimulatedNode(loop, device, config(root))
        await node.start()
        store, promoter = node.store, node.below.promoter
        session = await store.open_session(CALLER, staging_bytes=1 << 20, create_group=False, join_group=b"")
        _, space, _ = await store.open_namespace(session, pb.NamespaceSpec(model="m"))
        wanted = chain("wanted", 4)
        for hashes in (chain("ahead", 32), wanted):
            await put_below(node, session, space, hashes)
        started = await store.prefetches.start(session, [space], chain("ahead", 32), 0, 0.0)
        assert (started.queued_blocks, promoter.queue.speculative_bytes) == (32, LIMIT)
        load, begun = node.nvme.load, []

        async def marked(loads):
            if loads[0].hash in wanted:
                begun.append((len(device.log), {each.record.location.offset for each in loads}, promoter.queued_blocks))
            return await load(loads)

        node.nvme.load = marked
        held = await store.reads.get(session, [space], wanted, 60.0)
        assert held.blocks == 4
        ((start, offsets, waiting),) = begun
        end = next(index for index, (offset, _) in enumerate(device.log) if index >= start and offset in offsets)
        between = sum(size for _, size in device.log[start:end])
        assert between <= LIMIT, f"{between} bytes of prefetches were read before it"
        assert waiting >= 16, "most of the prefetch was still to come"
        job = await store.prefetches.poll(session, started.prefetch_id, 60.0)
        assert job.ready_blocks == 32, "and it came"
        store.end_session(session)
        await node.stop(flush_s=0.0)

    try:
        loop.run_until_complete(life())
    finally:
        abandon(loop)


async def put_below(node, session, space, hashes):
    """Blocks that are only on NVMe."""
    reserved = await node.store.writes.reserve(session, space, hashes, [BLOCK] * len(hashes), b"", 1.0)
    offsets = [index * BLOCK for index in range(len(hashes))]
    committing = node.store.commits.commit(session, reserved.reservation_id, list(range(len(hashes))), offsets)
    if inspect.isawaitable(committing):
        await committing
    await node.below.mover.flush(60.0)
    node.parts.room.evict([space.entries[hash_] for hash_ in hashes], "test")
