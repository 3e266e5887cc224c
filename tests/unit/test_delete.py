"""A block that was deleted does not come back, wherever it was at that moment."""

import asyncio

import pytest

from kvstored.catalog.history import Reason
from kvstored.errors import DeviceError
from kvstored.lifetime import Lifetime
from kvstored.store.outcomes import HIT, MISS, RESERVED
from kvstored.store.removal import gone_below
from kvstored.testing import node as testing_node
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import Node, chain
from kvstored.testing.waiting import turns


async def on_nvme_only(node, session, space, hashes, lifetime=None):
    sizes = [testing_node.BLOCK_BYTES] * len(hashes)
    reserved = await node.store.writes.reserve(session, space, hashes, sizes, b"", 0.0, lifetime=lifetime)
    await node.commit(session, reserved, hashes)
    await node.parts.below.mover.flush(5)
    node.parts.room.evict(list(space.entries.values()), "test")


async def written(node):
    """Until the lower tier was given something to store."""
    while not node.lower.calls["store"]:  # noqa: ASYNC110 - a task brings it about
        await asyncio.sleep(0)


async def test_a_block_deleted_on_its_way_up_does_not_arrive():
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await on_nvme_only(node, session, space, chain("a", 4))
        node.lower.gate.clear()
        await node.store.prefetches.start(session, [space], chain("a", 4), 0, 0)
        await asyncio.sleep(0)
        deleted = await node.store.writes.delete(session, space, chain("a", 4)[2:])
        node.lower.gate.set()
        assert deleted == 2
        held = await node.get(session, space, chain("a", 4), wait_s=60)
        assert (held.blocks, held.next) == (2, MISS)
        assert list(await node.put(session, space, chain("a", 4)[:2])) == [HIT] * 2
        node.store.reads.release(session, [held.leases[0].lease_id])


async def test_bytes_put_after_a_delete_are_not_replaced_by_those_on_their_way_down(monkeypatch):
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 1))
        node.lower.gate.clear()
        flushing = asyncio.create_task(node.parts.below.mover.flush(5))
        await written(node)
        deleting = asyncio.create_task(node.store.writes.delete(session, space, chain("a", 1)))
        await asyncio.sleep(0)
        monkeypatch.setattr(testing_node, "payload", lambda hash_: b"new." * (testing_node.BLOCK_BYTES // 4))
        await node.put(session, space, chain("a", 1))
        node.lower.gate.set()
        await flushing
        assert await deleting == 1
        await node.parts.below.mover.flush(5)
        node.parts.room.evict(list(space.entries.values()), "test")
        assert (await node.get(session, space, chain("a", 1), wait_s=60)).blocks == 1  # its bytes are checked


async def test_a_deleted_block_does_not_stay_that_was_brought_up_from_a_copy_just_written():
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 1))
        node.lower.gate.clear()
        flushing = asyncio.create_task(node.parts.below.mover.flush(5))
        await written(node)
        deleting = asyncio.create_task(node.store.writes.delete(session, space, chain("a", 1)))
        await asyncio.sleep(0)
        really_delete = node.lower.delete

        async def brought_up_before(*key):
            node.lower.delete = really_delete
            assert (await node.get(session, space, chain("a", 1), wait_s=60)).blocks == 1
            node.store.reads.release(session, list(session.group.leases))
            return await really_delete(*key)

        node.lower.delete = brought_up_before
        node.lower.gate.set()
        await flushing
        assert await deleting == 1
        assert (await node.get(session, space, chain("a", 1), wait_s=60)).blocks == 0


@pytest.mark.parametrize("loses", ["recycled", "used"])
async def test_a_deleted_block_does_not_stay_that_came_up_meanwhile_and_whose_copy_below_does_not_count(loses):
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        (hash_,) = hashes = chain("a", 1)
        lifetime = Lifetime(100.0, sliding=True) if loses == "used" else None
        await on_nvme_only(node, session, space, hashes, lifetime)
        node.clock.now += 50
        really_delete = node.lower.delete

        async def comes_up_before(*key):
            assert (await node.get(session, space, hashes, wait_s=60)).blocks == 1
            node.store.reads.release(session, list(session.group.leases))
            if loses == "recycled":
                gone_below(node.parts.catalog, node.parts.history, space.digest, hashes, Reason.EVICTED, "a test")
            assert not space.entries[hash_].below
            return await really_delete(*key)

        node.lower.delete = comes_up_before
        assert await node.store.writes.delete(session, space, hashes) == 1
        assert (await node.get(session, space, hashes, wait_s=60)).blocks == 0


async def test_a_delete_is_answered_when_nothing_of_the_block_is_on_its_way_down():
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 2))
        node.lower.gate.clear()
        flushing = asyncio.create_task(node.parts.below.mover.flush(5))
        await written(node)
        deleting = asyncio.create_task(node.store.writes.delete(session, space, chain("a", 2)))
        await turns()
        assert not deleting.done()
        node.lower.gate.set()
        assert await deleting == 2
        outcomes, _ = await node.store.reads.contains(space, chain("a", 2))
        assert list(outcomes) == [MISS, MISS]
        await flushing


class Tells(MemoryTier):
    """It remembers what it was ever asked to store."""

    def __init__(self):
        super().__init__()
        self.stored = set()

    async def store(self, tenant, stores):
        self.stored.update(store.hash for store in stores)
        return await super().store(tenant, stores)


async def durably(node, session, space, hashes):
    sizes = [testing_node.BLOCK_BYTES] * len(hashes)
    return await node.store.writes.reserve(session, space, hashes, sizes, b"", 0.0, durable=True)


@pytest.mark.parametrize("way", ["behind others", "with one that is on its way"])
async def test_a_block_deleted_while_it_waits_to_be_made_durable_never_goes_below(way):
    async with Node(below=Tells()) as node:
        session = await node.session()
        space = await node.space(session)
        first, second = chain("a", 1), chain("b", 1)
        await node.put(session, space, first)
        node.lower.gate.clear()
        if way == "behind others":
            await node.put(session, space, second)
            before = asyncio.create_task(durably(node, session, space, first))
            await turns()
            waiting = asyncio.create_task(durably(node, session, space, second))
        else:
            before = asyncio.create_task(node.parts.below.mover.flush(5))
            await turns()
            await node.put(session, space, second)
            waiting = asyncio.create_task(durably(node, session, space, first + second))
        await turns()
        assert await asyncio.wait_for(node.store.writes.delete(session, space, second), 60) == 1
        node.lower.gate.set()
        await before
        reserved = await waiting
        assert reserved.outcomes[-1] not in (HIT, RESERVED), "it is not there, and whoever asked is told so"
        assert node.lower.stored == set(first)
        assert node.counters["demote_failed_blocks"] == 0
        await node.settle()
        assert not any(entry.holds for entry in space.entries.values())


class SlowToAnswer(MemoryTier):
    """Its index has been read when the answer is still on its way."""

    def __init__(self):
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked = asyncio.Event()

    async def find(self, tenant, digest, hashes, *, prefix):
        records = await super().find(tenant, digest, hashes, prefix=prefix)
        if prefix:
            self.asked.set()
            await self.answers.wait()
        return records


async def test_what_the_index_said_before_a_delete_brings_nothing_back():
    async with Node(below=SlowToAnswer()) as node:
        session = await node.session()
        space = await node.space(session)
        await on_nvme_only(node, session, space, chain("a", 4))
        node.lower.answers.clear()
        getting = asyncio.create_task(node.get(session, space, chain("a", 4), wait_s=60))
        await node.lower.asked.wait()
        assert await node.store.writes.delete(session, space, chain("a", 4)[2:]) == 2
        node.lower.answers.set()
        held = await getting
        assert (held.blocks, held.next) == (2, MISS)
        assert len(space.entries) == 2
        node.store.reads.release(session, [held.leases[0].lease_id])


async def test_the_lower_tier_hears_of_a_delete_also_of_what_it_does_not_show():
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        deleted = []

        async def delete(_tenant, _digest, hashes):
            deleted.extend(hashes)
            return 0

        node.lower.delete = delete
        assert await node.store.writes.delete(session, space, chain("a", 2)) == 0
        assert deleted == chain("a", 2)


async def test_a_delete_that_one_path_could_not_take_part_in_is_done_elsewhere_and_not_acknowledged(monkeypatch):
    async with Node(blocks=8, below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 2))

        async def off(tenant, digest, hashes):
            raise DeviceError("drive0 is off")

        monkeypatch.setattr(node.lower, "delete", off)
        with pytest.raises(DeviceError, match="drive0 is off"):
            await node.store.writes.delete(session, space, chain("a", 1))
        assert not space.entries.keys() & set(chain("a", 1))
        assert node.parts.history.why(space, chain("a", 1)[0]).reason == "deleted"
