"""A segment changes tenants: who has its descriptor is asked for it, and cannot stop it."""

import asyncio

import pytest

from kvstored.catalog.leases import Caller
from kvstored.errors import InvalidArgument
from kvstored.store.outcomes import RESERVED
from kvstored.testing.node import BLOCK_BYTES, Node, chain
from kvstored.testing.waiting import until


class Scene:
    """Alice has the descriptors of a full tier; Bob puts. What Alice is told is noted in `told`."""

    def __init__(self, node):
        self.node = node
        self.told = []
        node.store.tell_retired = lambda session, ids: self.told.extend(ids) or True

    async def set(self):
        node = self.node
        self.alice, self.bob = await node.session("alice"), await node.session("bob")
        hers, self.his = await node.space(self.alice), await node.space(self.bob)
        for name in ("a", "b"):
            await node.put(self.alice, hers, chain(name, 8))
            held = await node.get(self.alice, hers, chain(name, 8))
            assert node.store.expose(self.alice, held.leases)
            node.store.reads.release(self.alice, [lease.lease_id for lease in held.leases])
        assert RESERVED not in await node.put(self.bob, self.his, chain("x", 4))
        assert len(self.told) == 1
        return self

    @property
    def retired_bytes(self):
        return self.node.parts.dram.usage().retired_bytes

    async def remade(self):
        await until(lambda: not self.retired_bytes)


async def test_memory_is_made_anew_when_the_holder_has_answered():
    async with Node(blocks=16, segment_blocks=4) as node:
        scene = await Scene(node).set()
        await asyncio.sleep(0.01)
        assert scene.retired_bytes == 4 * BLOCK_BYTES
        node.store.segments_dropped(scene.alice, scene.told)
        await scene.remade()
        assert RESERVED in await node.put(scene.bob, scene.his, chain("x", 4))


async def test_memory_is_made_anew_when_the_holder_has_ended():
    async with Node(blocks=16, segment_blocks=4) as node:
        scene = await Scene(node).set()
        node.store.end_session(scene.alice)
        await scene.remade()


async def test_a_holder_that_never_answers_delays_once():
    async with Node(blocks=16, segment_blocks=4) as node:
        node.store.return_wait_s = 0.01
        scene = await Scene(node).set()
        await scene.remade()
        assert node.counters["segments_not_returned"] == 1
        node.store.return_wait_s = 1000.0
        for number in range(4000):
            await node.put(scene.bob, scene.his, chain(f"y{number}", 4))
            await asyncio.sleep(0.002)
            if len(scene.told) == 3:
                break
        await scene.remade()
        assert node.counters["segments_not_returned"] == 1
        node.store.segments_dropped(scene.alice, scene.told)  # late, and harmless
        assert not scene.alice.silent


async def test_a_silent_holder_that_turns_out_to_be_gone_when_told_is_let_go_once():
    async with Node(blocks=16, segment_blocks=4) as node:
        node.store.return_wait_s = 0.01
        scene = await Scene(node).set()
        await scene.remade()
        node.store.tell_retired = lambda session, ids: node.store.end_session(session)
        for name in ("y", "z"):  # the first puts into what was remade, the second needs the next
            await node.put(scene.bob, scene.his, chain(name, 4))
        assert scene.alice.ended
        await scene.remade()


async def test_giving_up_a_segment_that_is_in_service_changes_nothing():
    async with Node(blocks=16, segment_blocks=4) as node:
        alice = await node.session("alice")
        hers = await node.space(alice)
        await node.put(alice, hers, chain("a", 4))
        held = await node.get(alice, hers, chain("a", 4))
        sent = node.store.expose(alice, held.leases)
        node.store.segments_dropped(alice, [segment_id for segment_id, _, _ in sent] + [12345])
        assert node.store.expose(alice, held.leases) == []


async def test_a_session_whose_staging_cannot_be_made_is_no_session(monkeypatch):
    async with Node() as node:

        async def refused(size_bytes, tenant, limit_bytes):
            raise InvalidArgument("no")

        monkeypatch.setattr(node.parts.staging, "create", refused)
        with pytest.raises(InvalidArgument):
            await node.store.open_session(
                Caller("alice", "tenant", "session"), staging_bytes=1, create_group=False, join_group=b""
            )
        assert not len(node.parts.sessions)
