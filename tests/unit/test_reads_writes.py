"""The store without a transport: what a put, a get and their ends do to the tiers."""

import asyncio

import pytest
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.errors import InvalidArgument, LimitExceeded, NotFound, PermissionDenied, Unauthenticated
from kvstored.policy.quota import Quota
from kvstored.store.answers import FoundRun
from kvstored.store.outcomes import HIT, MISS, NO_ROOM, PENDING, RESERVED, THROTTLED
from kvstored.store.parts import Limits
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import BLOCK_BYTES, STAGING_BYTES, Node, chain, payload
from kvstored.testing.waiting import until


async def lookup(node, space, hashes):
    found = node.store.reads.lookup([space], hashes)
    return found if isinstance(found, FoundRun) else await found


async def test_a_block_is_readable_after_its_commit_and_not_before():
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 4)
        reserved = await node.reserve(session, space, hashes)
        assert list(reserved.outcomes) == [RESERVED] * 4
        found = await lookup(node, space, hashes)
        assert (found.prefix_blocks, found.ready_blocks, found.pending_blocks) == (4, 0, 4)
        assert (await node.get(session, space, hashes)).blocks == 0
        assert await node.commit(session, reserved, hashes) == bytes([HIT] * 4)
        assert (await lookup(node, space, hashes)).ready_blocks == 4
        assert (await node.get(session, space, hashes)).blocks == 4


async def test_an_aborted_reservation_leaves_nothing():
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 4)
        reserved = await node.reserve(session, space, hashes)
        node.store.writes.abort(session, reserved.reservation_id, [1])
        node.store.writes.abort(session, reserved.reservation_id, [])
        assert (await lookup(node, space, hashes)).prefix_blocks == 0
        assert node.parts.dram.usage().used_bytes == 0
        with pytest.raises(NotFound):
            node.store.writes.abort(session, reserved.reservation_id, [])


async def test_a_session_that_ends_takes_its_reservations_and_leases_with_it():
    async with Node() as node:
        session, other = await node.session(), await node.session()
        space = await node.space(session)
        await node.space(other)
        await node.put(session, space, chain("kept", 2))
        await node.get(session, space, chain("kept", 2))
        await node.reserve(session, space, chain("lost", 2))
        node.store.end_session(session)
        assert (await lookup(node, space, chain("kept", 2))).ready_blocks == 2
        assert (await lookup(node, space, chain("lost", 2))).prefix_blocks == 0
        node.store.end_session(other)
        node.audit()


async def test_a_group_lease_outlives_the_session_that_took_it_but_not_the_group():
    async with Node() as node:
        scheduler = await node.session(create_group=True)
        worker = await node.session(join_group=scheduler.group.group_id)
        space = await node.space(scheduler)
        await node.put(scheduler, space, chain("a", 2))
        held = await node.get(scheduler, space, chain("a", 2))
        node.store.end_session(scheduler)
        assert node.store.reads.attach(worker, held.leases[0].lease_id).blocks == 2
        node.store.end_session(worker)
        node.audit()


async def test_another_tenants_group_cannot_be_joined_and_does_not_show():
    async with Node() as node:
        scheduler = await node.session("alice", create_group=True)
        texts = []
        for group in (scheduler.group.group_id, b"x" * 16):
            with pytest.raises(NotFound) as caught:
                await node.session("bob", join_group=group)
            texts.append(str(caught.value))
        assert texts[0] == texts[1]


async def test_a_leased_block_survives_any_pressure_and_a_deleted_one_until_its_release():
    async with Node(blocks=4) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 2))
        held = await node.get(session, space, chain("a", 2))
        await node.put(session, space, chain("b", 2))
        outcomes = await node.put(session, space, chain("c", 4))
        assert list(outcomes) == [RESERVED, RESERVED, NO_ROOM, NO_ROOM]
        assert await node.store.writes.delete(session, space, chain("a", 2)) == 2
        assert (await lookup(node, space, chain("a", 2))).prefix_blocks == 0
        for entry in held.leases[0].entries:
            assert bytes(node.parts.dram.view(entry.slot, BLOCK_BYTES)) == payload(entry.hash)
        node.store.reads.release(session, [held.leases[0].lease_id])
        assert list(await node.put(session, space, chain("d", 2))) == [RESERVED, RESERVED]
        assert (await lookup(node, space, chain("c", 2))).ready_blocks == 2


async def test_a_block_asked_for_twice_in_one_call_is_given_back_once():
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 2))
        held = await node.get(session, space, chain("a", 2) * 2)
        other = await node.get(session, space, chain("a", 2))
        assert held.blocks == 4
        assert node.parts.catalog.leased_bytes["alice"] == 2 * BLOCK_BYTES
        node.store.reads.release(session, [other.leases[0].lease_id])
        await node.store.writes.delete(session, space, chain("a", 2))
        node.store.reads.release(session, [held.leases[0].lease_id])
        assert node.parts.dram.usage().used_bytes == 0
        assert node.parts.catalog.leased_bytes["alice"] == 0


async def test_eviction_takes_the_tail_of_the_least_recently_used_chain():
    async with Node(blocks=8) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("old", 4))
        await node.put(session, space, chain("new", 4))
        held = await node.get(session, space, chain("old", 4))
        node.store.reads.release(session, [held.leases[0].lease_id])
        await node.put(session, space, chain("third", 2))
        assert (await lookup(node, space, chain("new", 4))).ready_blocks == 2
        assert (await lookup(node, space, chain("old", 4))).ready_blocks == 4


async def test_a_put_below_a_parent_keeps_the_parent_warmer():
    async with Node(blocks=8) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 6)
        await node.put(session, space, hashes[:3])
        await node.put(session, space, chain("other", 2))
        await node.put(session, space, hashes[3:], parent=hashes[2])
        await node.put(session, space, chain("more", 4))
        assert (await lookup(node, space, chain("other", 2))).ready_blocks == 0
        assert (await lookup(node, space, hashes)).ready_blocks == 4


async def test_a_block_that_was_there_already_stays_warmer_than_what_was_put_after_it():
    async with Node(blocks=8) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 5)
        await node.put(session, space, hashes[2:3], parent=hashes[1])
        await node.put(session, space, chain("other", 2))
        await node.put(session, space, hashes)  # all but the one in the middle
        await node.put(session, space, chain("more", 5))
        assert set(hashes) & set(space.entries) == set(hashes[:3])


async def test_a_put_does_not_make_room_by_evicting_the_start_of_its_own_chain():
    async with Node(blocks=8) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 8)
        await node.put(session, space, hashes[:4])
        await node.put(session, space, chain("b", 4))
        assert list(await node.put(session, space, hashes)) == [HIT] * 4 + [RESERVED] * 4
        assert (await lookup(node, space, hashes)).ready_blocks == 8


async def test_committing_in_parts_is_leaf_first_too():
    async with Node(blocks=8) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 6)
        reserved = await node.reserve(session, space, hashes)
        for index in range(6):
            committing = node.store.commits.commit(session, reserved.reservation_id, [index], [index * BLOCK_BYTES])
            assert committing == bytes([HIT])
        await node.put(session, space, chain("b", 4))
        assert (await lookup(node, space, hashes)).ready_blocks == 4


async def test_what_is_stored_is_not_written_again_and_what_another_writes_is_pending():
    async with Node() as node:
        session, other = await node.session(), await node.session()
        space = await node.space(session)
        await node.space(other)
        await node.put(session, space, chain("a", 2))
        await node.reserve(session, space, chain("a", 3)[2:])
        reserved = await node.reserve(other, space, chain("a", 4))
        assert list(reserved.outcomes) == [HIT, HIT, PENDING, RESERVED]


async def test_a_get_waits_for_a_block_that_is_being_written():
    async with Node() as node:
        session, other = await node.session(), await node.session()
        space = await node.space(session)
        await node.space(other)
        reserved = await node.reserve(session, space, chain("a", 2))
        getting = asyncio.ensure_future(node.get(other, space, chain("a", 2), wait_s=60))
        await asyncio.sleep(0)
        await node.commit(session, reserved, chain("a", 2))
        assert (await getting).blocks == 2


async def test_a_get_that_waited_for_an_aborted_block_is_cut_there():
    async with Node() as node:
        session, other = await node.session(), await node.session()
        space = await node.space(session)
        await node.space(other)
        await node.put(session, space, chain("a", 1))
        reserved = await node.reserve(session, space, chain("a", 2)[1:], parent=chain("a", 1)[0])
        getting = asyncio.ensure_future(node.get(other, space, chain("a", 2), wait_s=60))
        await asyncio.sleep(0)
        node.store.writes.abort(session, reserved.reservation_id, [])
        held = await getting
        assert (held.blocks, held.next) == (1, MISS)


async def test_a_session_that_ended_while_its_get_waited_holds_nothing():
    async with Node() as node:
        session, other = await node.session(), await node.session()
        space = await node.space(session)
        await node.space(other)
        reserved = await node.reserve(session, space, chain("a", 2))
        getting = asyncio.ensure_future(node.get(other, space, chain("a", 2), wait_s=60))
        await asyncio.sleep(0)
        node.store.end_session(other)
        await node.commit(session, reserved, chain("a", 2))
        assert (await getting).blocks == 0
        node.store.end_session(session)
        node.audit()


async def test_a_call_that_is_served_after_the_end_of_its_session_leaves_nothing():
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        data = bytearray(payload(chain("a", 1)[0]))
        putting = node.store.commits.put_inline(session, space, chain("a", 1)[0], b"", data, 0.0)
        opening = node.store.open_namespace(session, pb.NamespaceSpec(model="other"))
        node.store.end_session(session)
        for late in (putting, opening):
            with pytest.raises(Unauthenticated):
                await late
        assert list(node.parts.catalog.spaces.values()) == [space]
        assert not space.entries
        assert not session.reservations


async def test_no_name_of_a_removed_tenant_is_kept_for_a_call_that_it_left_behind(monkeypatch):
    lower = MemoryTier()
    async with Node(below=lower) as node:
        session, noting = await node.session(), asyncio.Event()
        remembered = []

        async def slow(namespaces):
            await noting.wait()

        async def remember(*namespace):
            remembered.append(namespace)

        monkeypatch.setattr(node.parts.dram, "remember_namespaces", slow)
        monkeypatch.setattr(lower, "remember_namespace", remember)
        opening = [asyncio.ensure_future(node.space(session, model)) for model in ("one", "two")]
        await until(lambda: len(node.parts.catalog.spaces) == 2)
        one, two = node.parts.catalog.spaces.values()
        node.store.end_session(session)  # with its credential, and then all that the tenant has is forgotten
        node.parts.catalog.drop(two)
        noting.set()
        first, second = await asyncio.gather(*opening, return_exceptions=True)
        assert first is one, "a session that only ends has its namespace remembered: the next one finds it known"
        assert isinstance(second, Unauthenticated)
        assert [digest for _, digest, *_ in remembered] == [one.namespace.digest]


async def test_several_namespaces_answer_what_all_have():
    async with Node() as node:
        session = await node.session()
        shards = [await node.space(session, tp_rank=rank, tp_size=2) for rank in range(2)]
        await node.put(session, shards[0], chain("a", 4))
        await node.put(session, shards[1], chain("a", 3))
        found = node.store.reads.lookup(shards, chain("a", 4))
        assert isinstance(found, FoundRun)
        assert (found.ready_blocks, found.next) == (3, MISS)
        held = node.store.reads.get(session, shards, chain("a", 4), 0)
        assert not asyncio.iscoroutine(held)
        assert [len(lease.entries) for lease in held.leases] == [3, 3]


async def test_bad_input_is_refused_and_changes_nothing():
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        writes = node.store.writes
        for hashes, sizes, parent in (
            (chain("a", 2), [BLOCK_BYTES], b""),
            (chain("a", 1), [0], b""),
            (chain("a", 1), [17 << 20], b""),
            (chain("a", 1), [BLOCK_BYTES], b"short"),
            (chain("a", 1) * 2, [BLOCK_BYTES] * 2, b""),
        ):
            with pytest.raises(InvalidArgument):
                writes.reserve(session, space, hashes, sizes, parent, 0)
        reserved = await node.reserve(session, space, chain("a", 2))
        for indices, offsets in (([0], []), ([], []), ([2], [0]), ([0, 0], [0, 0]), ([0], [STAGING_BYTES])):
            with pytest.raises(InvalidArgument):
                node.store.commits.commit(session, reserved.reservation_id, indices, offsets)
        assert await node.commit(session, reserved, chain("a", 2)) == bytes([HIT, HIT])


async def test_a_reader_may_not_write():
    async with Node() as node:
        reader = await node.session(role="reader")
        space = await node.space(reader)
        with pytest.raises(PermissionDenied):
            await node.reserve(reader, space, chain("a", 1))
        with pytest.raises(PermissionDenied):
            await node.store.writes.delete(reader, space, chain("a", 1))


async def test_what_a_session_may_hold_is_limited():
    limits = Limits(STAGING_BYTES, 2, 2, 4 * BLOCK_BYTES, 1.0, 1.0)
    async with Node(limits=limits) as node:
        session = await node.session()
        space = await node.space(session)
        assert list(await node.put(session, space, chain("a", 6)))[4:] == [NO_ROOM, NO_ROOM]
        await node.put(session, space, chain("a", 6)[4:], parent=chain("a", 4)[3])
        held = await node.get(session, space, chain("a", 6))
        assert (held.blocks, held.next) == (4, THROTTLED)
        node.store.reads.release(session, [held.leases[0].lease_id])
        for _ in range(2):
            assert (await node.get(session, space, chain("a", 1))).blocks == 1
        assert (await node.get(session, space, chain("a", 1))).next == THROTTLED
        for name in ("b", "c"):
            await node.reserve(session, space, chain(name, 1))
        with pytest.raises(LimitExceeded):
            await node.reserve(session, space, chain("d", 1))


async def test_a_tenants_limit_is_never_exceeded_and_costs_only_its_own_blocks():
    async with Node(blocks=16, segment_blocks=4, quotas={"bob": Quota(4 * BLOCK_BYTES)}) as node:
        alice, bob = await node.session("alice"), await node.session("bob")
        hers, his = await node.space(alice), await node.space(bob)
        await node.put(alice, hers, chain("a", 4))
        await node.put(bob, his, chain("b", 4))
        await node.put(bob, his, chain("c", 4))
        assert node.parts.dram.tenant_usage()["bob"] == (4 * BLOCK_BYTES, 4)
        assert (await lookup(node, hers, chain("a", 4))).ready_blocks == 4
        assert (await lookup(node, his, chain("c", 4))).ready_blocks == 4


async def test_draining_refuses_puts_and_serves_gets():
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 2))
        node.store.writes.draining = True
        assert list(await node.put(session, space, chain("b", 2))) == [THROTTLED] * 2
        assert (await node.get(session, space, chain("a", 2))).blocks == 2


async def test_a_put_finds_what_is_only_on_nvme():
    async with Node(blocks=4, below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 4))
        await node.put(session, space, chain("b", 4), wait_s=60)
        await node.settle()
        stored = {hash_ for _, hash_ in node.lower.blocks}
        assert stored >= set(chain("a", 4))
        assert set(await node.put(session, space, chain("a", 4))) == {HIT}
