"""The contract of blocks that lie on NVMe: lookup, get, prefetch and delete; see `contract`."""

from __future__ import annotations

import contextlib

import pytest
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.store.outcomes import HIT, MISS, PENDING
from kvstored.testing.contract_client import (
    BLOCK_BYTES,
    RIVAL,
    ROOT,
    Block,
    CallFailed,
    Client,
    Transport,
    chain,
    contains,
    fill,
    get,
    hashes_of,
    lookup,
    open_namespace,
    packed,
    reserve,
)

DRAM_BLOCKS = (8 << 20) // BLOCK_BYTES


async def sunk(transport: Transport, client: Client, namespace: int, count: int = 8) -> list[Block]:
    """A chain that is on NVMe only."""
    root = await transport.connect(ROOT)
    blocks = chain("sunk", count)
    await client.put(namespace, blocks)
    await root.call("Flush", admin.FlushRequest(wait_ms=60_000))
    await fill(client, namespace, DRAM_BLOCKS)
    await root.call("Flush", admin.FlushRequest(wait_ms=60_000))  # so that all of it can make room at once
    assert (await lookup(client, [namespace], blocks)).nvme_blocks == count
    await root.end()
    return blocks


class MovementContract:
    """Inherit, and provide the fixture `deep_transport`: a transport to a daemon with a lower tier."""

    async def test_what_is_on_nvme_counts_as_stored(self, deep_transport: Transport) -> None:
        client = await deep_transport.connect()
        namespace = await open_namespace(client)
        blocks = await sunk(deep_transport, client, namespace)
        found = await lookup(client, [namespace], blocks)
        assert (found.prefix_blocks, found.ready_blocks, found.dram_blocks, found.nvme_blocks) == (8, 8, 0, 8)
        assert found.next == HIT
        reply = await client.call("Contains", pb.ContainsRequest(namespace_id=namespace, **packed(blocks)))
        assert (reply.outcomes, reply.tiers) == (bytes([HIT] * 8), bytes([2] * 8))
        assert (await reserve(client, namespace, blocks)).outcomes == bytes([HIT] * 8)

    async def test_a_get_brings_blocks_up(self, deep_transport: Transport) -> None:
        client = await deep_transport.connect()
        namespace = await open_namespace(client)
        blocks = await sunk(deep_transport, client, namespace)
        assert await client.read(namespace, hashes_of(blocks)) == [b.data for b in blocks]
        assert (await lookup(client, [namespace], blocks)).dram_blocks == 8

    async def test_a_get_that_must_not_wait_starts_what_a_later_one_finds(self, deep_transport: Transport) -> None:
        client = await deep_transport.connect()
        namespace = await open_namespace(client)
        blocks = await sunk(deep_transport, client, namespace)
        got = await get(client, [namespace], blocks, wait_ms=0)
        assert (got.blocks, got.next) == (0, PENDING)
        assert (await get(client, [namespace], blocks, wait_ms=60_000)).blocks == 8

    async def test_a_prefetch_brings_blocks_up_and_is_told_once(self, deep_transport: Transport) -> None:
        client = await deep_transport.connect()
        namespace = await open_namespace(client)
        blocks = await sunk(deep_transport, client, namespace)
        started = await client.call("Prefetch", pb.PrefetchRequest(namespace_ids=[namespace], **packed(blocks)))
        assert (started.outcome, started.resident_blocks, started.queued_blocks) == (PENDING, 0, 8)
        poll = pb.PollPrefetchRequest(prefetch_id=started.prefetch_id, wait_ms=60_000)
        done = await client.call("PollPrefetch", poll)
        assert (done.done, done.ready_blocks, done.failed_blocks, done.total_blocks) == (True, 8, 0, 8)
        assert (await get(client, [namespace], blocks)).blocks == 8
        with pytest.raises(CallFailed) as failed:
            await client.call("PollPrefetch", poll)
        assert failed.value.code == 5

    async def test_a_prefetch_of_what_is_there_or_nowhere_is_nothing_to_do(self, deep_transport: Transport) -> None:
        client = await deep_transport.connect()
        namespace = await open_namespace(client)
        blocks = chain("a", 2)
        for outcome in (MISS, HIT):
            started = await client.call("Prefetch", pb.PrefetchRequest(namespace_ids=[namespace], **packed(blocks)))
            assert (started.prefetch_id, started.outcome, started.queued_blocks) == (0, outcome, 0)
            await client.put(namespace, blocks)

    async def test_a_cancelled_prefetch_is_over(self, deep_transport: Transport) -> None:
        client = await deep_transport.connect()
        namespace = await open_namespace(client)
        blocks = await sunk(deep_transport, client, namespace)
        started = await client.call("Prefetch", pb.PrefetchRequest(namespace_ids=[namespace], **packed(blocks)))
        request = pb.CancelPrefetchRequest(prefetch_id=started.prefetch_id)
        done = await client.call("CancelPrefetch", request)
        assert done.done
        assert done.ready_blocks + done.failed_blocks == done.total_blocks == 8
        with pytest.raises(CallFailed) as failed:
            await client.call("CancelPrefetch", request)
        assert failed.value.code == 5
        assert await client.read(namespace, hashes_of(blocks)) == [b.data for b in blocks]

    async def test_a_prefetch_is_its_own_sessions(self, deep_transport: Transport) -> None:
        client, other = await deep_transport.connect(), await deep_transport.connect(RIVAL)
        namespace = await open_namespace(client)
        blocks = await sunk(deep_transport, client, namespace)
        started = await client.call("Prefetch", pb.PrefetchRequest(namespace_ids=[namespace], **packed(blocks)))
        with pytest.raises(CallFailed) as failed:
            await other.call("PollPrefetch", pb.PollPrefetchRequest(prefetch_id=started.prefetch_id))
        assert failed.value.code == 5

    async def test_a_delete_reaches_every_tier(self, deep_transport: Transport) -> None:
        client = await deep_transport.connect()
        namespace = await open_namespace(client)
        blocks = await sunk(deep_transport, client, namespace)
        await client.read(namespace, hashes_of(blocks[:1]))
        request = pb.DeleteRequest(namespace_id=namespace, **packed(blocks[:2]))
        assert (await client.call("Delete", request)).deleted == 2
        assert await contains(client, namespace, blocks[:3]) == bytes([MISS, MISS, HIT])

    async def test_a_lookup_counts_blocks_in_the_tier_where_they_are(self, deep_transport: Transport) -> None:
        client = await deep_transport.connect()
        namespace = await open_namespace(client)
        blocks = await sunk(deep_transport, client, namespace)
        await client.read(namespace, hashes_of(blocks[:3]))
        found = await lookup(client, [namespace], blocks)
        assert (found.dram_blocks, found.nvme_blocks, found.pending_blocks) == (3, 5, 0)

    async def test_a_lookup_with_a_prefill_rate_says_whether_loading_pays(self, deep_transport: Transport) -> None:
        client = await deep_transport.connect()
        namespace = await open_namespace(client)
        blocks = await sunk(deep_transport, client, namespace)
        plain = pb.LookupRequest(namespace_ids=[namespace], **packed(blocks))
        bare = await client.call("Lookup", plain)
        assert (bare.load_s, bare.recompute_s, bare.paying_blocks) == (0, 0, 0)
        for tokens_per_s, paying in ((0.001, 8), (1e15, 0)):
            asked = pb.LookupRequest(prefill_tokens_per_s=tokens_per_s)
            asked.MergeFrom(plain)
            found = await client.call("Lookup", asked)
            assert (found.prefix_blocks, found.nvme_blocks, found.paying_blocks) == (8, 8, paying)
            assert found.load_s > 0
            assert found.recompute_s == pytest.approx(8 * 16 / tokens_per_s)

    async def test_a_lookup_brings_up_what_it_finds_where_it_is_asked_to(self, deep_transport: Transport) -> None:
        client = await deep_transport.connect()
        namespace = await open_namespace(client)
        blocks = await sunk(deep_transport, client, namespace)
        found = await client.call(
            "Lookup", pb.LookupRequest(namespace_ids=[namespace], prefetch=True, **packed(blocks))
        )
        assert (found.prefix_blocks, found.nvme_blocks, found.queued_blocks) == (8, 8, 8)
        assert found.prefetch_id
        assert await client.read(namespace, hashes_of(blocks)) == [b.data for b in blocks]
        with pytest.raises(CallFailed) as failed:  # it is done, and so forgotten
            await client.call("CancelPrefetch", pb.CancelPrefetchRequest(prefetch_id=found.prefetch_id))
        assert failed.value.code == 5
        assert (await lookup(client, [namespace], blocks)).dram_blocks == 8

    async def test_a_lookups_prefetch_is_cancelled_by_its_name(self, deep_transport: Transport) -> None:
        client = await deep_transport.connect()
        namespace = await open_namespace(client)
        blocks = await sunk(deep_transport, client, namespace)
        request = pb.LookupRequest(namespace_ids=[namespace], prefetch=True, **packed(blocks))
        found = await client.call("Lookup", request)
        with contextlib.suppress(CallFailed):  # it may be done before, and so forgotten
            done = await client.call("CancelPrefetch", pb.CancelPrefetchRequest(prefetch_id=found.prefetch_id))
            assert done.done
            assert done.ready_blocks + done.failed_blocks == 8
        assert await client.read(namespace, hashes_of(blocks)) == [b.data for b in blocks]

    async def test_what_estimates_go_by_is_shown_to_admins_alone(self, deep_transport: Transport) -> None:
        client, root = await deep_transport.connect(), await deep_transport.connect(ROOT)
        namespace = await open_namespace(client)
        blocks = await sunk(deep_transport, client, namespace)
        await client.read(namespace, hashes_of(blocks))
        shown = (await root.call("Status", pb.StatusRequest())).load_costs
        assert shown.reads > 0
        assert shown.copy_bytes_per_s > 0
        assert not (await client.call("Status", pb.StatusRequest())).HasField("load_costs")

    async def test_blocks_on_nvme_are_listed_explained_and_verified(self, deep_transport: Transport) -> None:
        client, root = await deep_transport.connect(), await deep_transport.connect(ROOT)
        namespace = await open_namespace(client)
        blocks = await sunk(deep_transport, client, namespace)
        answer = await client.call("Explain", admin.ExplainRequest(hash=blocks[0].hash))
        assert (answer.verdict, [b.tiers for b in answer.blocks]) == ("hit", ["nvme"])
        listed = {}
        request = admin.ListBlocksRequest(limit=10)
        while True:
            page = await client.call("ListBlocks", request)
            listed.update({b.hash: b.tiers for b in page.blocks})
            if not page.cursor:
                break
            request.cursor = page.cursor
        assert [listed.get(hash_) for hash_ in hashes_of(blocks)] == ["nvme"] * 8
        (info,) = (await client.call("ListNamespaces", admin.ListNamespacesRequest())).namespaces
        assert info.nvme_blocks >= 8
        verified = await root.call("Verify", admin.VerifyRequest())
        assert verified.nvme_blocks >= 8
        assert verified.corrupt == 0
