"""The contract of reading and writing blocks in memory; see `contract`."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest
import xxhash
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.store.outcomes import HIT, MISS, NO_ROOM, PENDING, RESERVED, THROTTLED
from kvstored.testing.contract_client import (
    BLOCK_BYTES,
    Client,
    Transport,
    block,
    chain,
    commit,
    contains,
    fill,
    get,
    hashes_of,
    lookup,
    open_namespace,
    packed,
    release,
    reserve,
    unpack,
)

DRAM_BLOCKS: Final = (8 << 20) // BLOCK_BYTES


def only_with_shared_memory(client: Client) -> None:
    """Skip where bytes travel inline."""
    if not client.shares_memory:
        pytest.skip("bytes travel inline here")


class BlockContract:
    """Inherit, and provide the fixture `transport`."""

    # ---- writing ----

    async def test_what_was_put_is_read(self, transport: Transport) -> None:
        client, reader = await transport.connect(), await transport.connect()
        namespace = await open_namespace(client)
        blocks = [block(f"b{size}", size) for size in (1, 4095, 4096, 4097, 100_000)]
        assert await client.put(namespace, blocks) == bytes([HIT] * 5)
        theirs = await open_namespace(reader)
        assert await reader.read(theirs, hashes_of(blocks)) == [b.data for b in blocks]

    async def test_blocks_that_are_copied_by_threads_are_read_too(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await open_namespace(client)
        blocks = chain("big", 2, 900_000)
        assert await client.put(namespace, blocks) == bytes([HIT, HIT])
        assert await client.read(namespace, hashes_of(blocks)) == [b.data for b in blocks]

    async def test_what_is_stored_is_not_written_again(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await open_namespace(client)
        blocks = chain("a", 3)
        await client.put(namespace, blocks[:2])
        reserved = await reserve(client, namespace, blocks)
        assert reserved.outcomes == bytes([HIT, HIT, RESERVED])
        again = await reserve(client, namespace, blocks[:2])
        assert (again.reservation_id, again.outcomes) == (0, bytes([HIT, HIT]))

    async def test_a_reserved_block_is_no_hit_before_its_commit(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await open_namespace(client)
        blocks = chain("a", 3)
        await client.put(namespace, blocks[:1])
        await reserve(client, namespace, blocks[1:])
        found = await lookup(client, [namespace], blocks)
        assert (found.prefix_blocks, found.ready_blocks, found.dram_blocks, found.pending_blocks) == (3, 1, 1, 2)
        assert await contains(client, namespace, blocks) == bytes([HIT, PENDING, PENDING])
        got = await get(client, [namespace], blocks)
        assert (got.blocks, got.next) == (1, PENDING)

    async def test_a_committed_block_is_a_hit_and_the_rest_is_not(self, transport: Transport) -> None:
        client = await transport.connect()
        only_with_shared_memory(client)
        namespace = await open_namespace(client)
        blocks = chain("a", 3)
        reservation_id = (await reserve(client, namespace, blocks)).reservation_id
        assert await commit(client, reservation_id, blocks, [1, 0]) == bytes([HIT, HIT])
        assert await contains(client, namespace, blocks) == bytes([HIT, HIT, PENDING])
        assert await commit(client, reservation_id, blocks, [2]) == bytes([HIT])
        assert await client.read(namespace, hashes_of(blocks)) == [b.data for b in blocks]

    async def test_an_aborted_block_is_a_miss_and_can_be_reserved_again(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await open_namespace(client)
        blocks = chain("a", 3)
        reservation_id = (await reserve(client, namespace, blocks)).reservation_id
        await client.call("Abort", pb.AbortRequest(reservation_id=reservation_id, indices=[2]))
        assert await contains(client, namespace, blocks) == bytes([PENDING, PENDING, MISS])
        await client.call("Abort", pb.AbortRequest(reservation_id=reservation_id))
        assert await contains(client, namespace, blocks) == bytes([MISS] * 3)
        assert (await reserve(client, namespace, blocks)).outcomes == bytes([RESERVED] * 3)

    async def test_the_end_of_a_session_aborts_what_it_did_not_commit(self, transport: Transport) -> None:
        writer, reader = await transport.connect(), await transport.connect()
        blocks = chain("a", 2)
        namespace = await open_namespace(reader)
        await reserve(writer, await open_namespace(writer), blocks)
        waiting = asyncio.ensure_future(get(reader, [namespace], blocks, wait_ms=60_000))
        await lookup(reader, [namespace], blocks)
        await writer.end()
        got = await waiting
        assert (got.blocks, got.next) == (0, MISS)
        assert await contains(reader, namespace, blocks) == bytes([MISS, MISS])

    async def test_blocks_without_room_are_refused_from_the_first_on_that_has_none(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await open_namespace(client)
        blocks = [block("small"), block("larger than any segment", 2 << 20), block("after it")]
        assert (await reserve(client, namespace, blocks)).outcomes == bytes([RESERVED, NO_ROOM, NO_ROOM])

    async def test_old_blocks_make_room_for_new_ones(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await open_namespace(client)
        blocks = [block(f"{i}") for i in range(2 * DRAM_BLOCKS)]
        for each in blocks:
            assert await client.put(namespace, [each]) == bytes([HIT])
        found = await contains(client, namespace, blocks)
        assert found == bytes([MISS] * (len(blocks) // 2) + [HIT] * (len(blocks) // 2))

    # ---- looking ----

    async def test_a_lookup_ends_at_the_first_block_that_is_missing(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await open_namespace(client)
        blocks = chain("a", 5)
        await client.put(namespace, blocks[:2])
        await client.put(namespace, blocks[3:], blocks[2].hash)
        found = await lookup(client, [namespace], blocks)
        assert (found.prefix_blocks, found.ready_blocks, found.dram_blocks, found.nvme_blocks) == (2, 2, 2, 0)
        assert found.next == MISS
        assert (await lookup(client, [namespace], blocks[:2])).next == HIT
        assert await contains(client, namespace, blocks) == bytes([HIT, HIT, MISS, HIT, HIT])

    async def test_where_blocks_are_is_told_by_tier(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await open_namespace(client)
        blocks = chain("a", 2)
        await client.put(namespace, blocks[:1])
        reply = await client.call("Contains", pb.ContainsRequest(namespace_id=namespace, **packed(blocks)))
        assert reply.tiers == bytes([1, 0])

    async def test_a_lookup_over_shards_finds_what_all_of_them_have(self, transport: Transport) -> None:
        client = await transport.connect()
        shards = [await open_namespace(client, tp_size=2, tp_rank=rank) for rank in range(2)]
        blocks = chain("a", 4)
        await client.put(shards[0], blocks)
        await client.put(shards[1], blocks[:3])
        assert (await lookup(client, shards, blocks)).prefix_blocks == 3
        assert (await lookup(client, shards[:1], blocks)).prefix_blocks == 4
        await reserve(client, shards[1], blocks[3:])
        found = await lookup(client, shards, blocks)
        assert (found.prefix_blocks, found.ready_blocks, found.pending_blocks, found.next) == (4, 3, 1, HIT)

    async def test_a_touched_block_outlives_those_that_were_not(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await open_namespace(client)
        blocks = [block(f"{i}") for i in range(DRAM_BLOCKS + 1)]
        for each in blocks[:-1]:
            await client.put(namespace, [each])
        request = pb.TouchRequest(namespace_id=namespace, **packed([blocks[0], block("unknown")]))
        assert (await client.call("Touch", request)).touched == 1
        await client.put(namespace, blocks[-1:])
        assert await contains(client, namespace, blocks[:3]) == bytes([HIT, MISS, HIT])

    # ---- leasing ----

    async def test_a_lease_tells_where_and_what_each_block_is(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await open_namespace(client)
        blocks = [block("a", 5000), block("b", 70_000)]
        await client.put(namespace, blocks)
        got = await get(client, [namespace], blocks)
        assert (got.blocks, got.next, len(got.leases)) == (2, HIT, 1)
        assert got.leases[0].namespace_id == namespace
        heads = unpack(got.leases[0])
        assert [head.size_bytes for head in heads] == [5000, 70_000]
        assert [head.content_hash for head in heads] == [xxhash.xxh3_128_digest(b.data) for b in blocks]
        assert len({head.slot for head in heads}) == 2
        if client.shares_memory:
            assert [client.slot_data(head.slot, head.size_bytes) for head in heads] == [b.data for b in blocks]

    async def test_a_get_over_shards_leases_each_as_far_as_all_have_it(self, transport: Transport) -> None:
        client = await transport.connect()
        shards = [await open_namespace(client, tp_size=2, tp_rank=rank) for rank in range(2)]
        blocks = chain("a", 3)
        await client.put(shards[0], blocks)
        await client.put(shards[1], blocks[:2])
        got = await get(client, shards, blocks)
        assert (got.blocks, got.next) == (2, MISS)
        assert [lease.namespace_id for lease in got.leases] == shards
        assert [len(unpack(lease)) for lease in got.leases] == [2, 2]
        assert await release(client, got) == 2

    async def test_a_get_of_nothing_leases_nothing(self, transport: Transport) -> None:
        client = await transport.connect()
        got = await get(client, [await open_namespace(client)], chain("a", 2))
        assert (got.blocks, got.next, len(got.leases)) == (0, MISS, 0)

    async def test_a_get_waits_for_a_block_that_is_being_written(self, transport: Transport) -> None:
        writer, reader = await transport.connect(), await transport.connect()
        only_with_shared_memory(writer)
        blocks = chain("a", 1)
        theirs = await open_namespace(reader)
        reservation_id = (await reserve(writer, await open_namespace(writer), blocks)).reservation_id
        waiting = asyncio.ensure_future(get(reader, [theirs], blocks, wait_ms=60_000))
        await lookup(reader, [theirs], blocks)
        await commit(writer, reservation_id, blocks, [0])
        got = await waiting
        assert (got.blocks, got.next) == (1, HIT)

    async def test_a_lease_is_released_once(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await open_namespace(client)
        await client.put(namespace, chain("a", 1))
        got = await get(client, [namespace], chain("a", 1))
        assert await release(client, got) == 1
        assert await release(client, got) == 0

    async def test_leased_blocks_stay_while_others_come_and_go(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await open_namespace(client)
        kept = chain("kept", 4)
        await client.put(namespace, kept)
        got = await get(client, [namespace], kept)
        await fill(client, namespace, 2 * DRAM_BLOCKS)
        assert await contains(client, namespace, kept) == bytes([HIT] * 4)
        if client.shares_memory:
            assert [client.slot_data(h.slot, h.size_bytes) for h in unpack(got.leases[0])] == [b.data for b in kept]
        await release(client, got)

    async def test_leases_are_limited_and_past_the_limit_throttled(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await open_namespace(client)
        await client.put(namespace, chain("a", 1))
        limit = client.opened.limits.max_leases
        taken = [await get(client, [namespace], chain("a", 1)) for _ in range(limit + 1)]
        assert [reply.blocks for reply in taken] == [1] * limit + [0]
        assert taken[-1].next == THROTTLED
        await release(client, taken[0])
        assert (await get(client, [namespace], chain("a", 1))).blocks == 1

    # ---- deleting ----

    async def test_a_deleted_block_is_gone_and_can_be_put_again(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await open_namespace(client)
        blocks = chain("a", 3)
        await client.put(namespace, blocks)
        request = pb.DeleteRequest(namespace_id=namespace, **packed([*blocks[1:], block("unknown")]))
        assert (await client.call("Delete", request)).deleted == 2
        assert await contains(client, namespace, blocks) == bytes([HIT, MISS, MISS])
        assert await client.put(namespace, blocks[1:], blocks[0].hash) == bytes([HIT, HIT])
        assert await client.read(namespace, hashes_of(blocks)) == [b.data for b in blocks]

    async def test_a_block_deleted_under_a_lease_is_gone_at_once_and_its_bytes_stay(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await open_namespace(client)
        blocks = chain("a", 1)
        await client.put(namespace, blocks)
        got = await get(client, [namespace], blocks)
        await client.call("Delete", pb.DeleteRequest(namespace_id=namespace, **packed(blocks)))
        assert (await get(client, [namespace], blocks)).next == MISS
        await client.put(namespace, blocks)
        await fill(client, namespace, DRAM_BLOCKS)
        if client.shares_memory:
            assert [client.slot_data(h.slot, h.size_bytes) for h in unpack(got.leases[0])] == [blocks[0].data]
        assert await release(client, got) == 1

    async def test_a_commit_tells_the_truth_about_a_block_deleted_meanwhile(self, transport: Transport) -> None:
        client = await transport.connect()
        only_with_shared_memory(client)
        namespace = await open_namespace(client)
        blocks = chain("a", 1)
        reservation_id = (await reserve(client, namespace, blocks)).reservation_id
        await client.call("Delete", pb.DeleteRequest(namespace_id=namespace, **packed(blocks)))
        outcome = await commit(client, reservation_id, blocks, [0])
        assert outcome == await contains(client, namespace, blocks)
