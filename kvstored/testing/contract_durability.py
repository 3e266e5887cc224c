"""The contract of durable puts: acknowledged when the blocks are on NVMe; see `contract`."""

from __future__ import annotations

import pytest
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.store.outcomes import HIT, RESERVED, THROTTLED
from kvstored.testing.contract_client import (
    ROOT,
    Block,
    CallFailed,
    Client,
    Transport,
    chain,
    commit,
    get,
    hashes_of,
    open_namespace,
    packed,
    release,
    reserve,
    spec,
)

FAILED_PRECONDITION = 9
IN_DRAM, IN_BOTH = 1, 3


async def tiers(client: Client, namespace: int, blocks: list[Block]) -> bytes:
    """Where each block is."""
    reply = await client.call("Contains", pb.ContainsRequest(namespace_id=namespace, **packed(blocks)))
    found: bytes = reply.tiers
    return found


class DurabilityContract:
    """Inherit, and provide the fixtures `transport` and `deep_transport`, the latter with a lower tier."""

    async def test_a_durable_put_is_on_nvme_when_it_is_answered(self, deep_transport: Transport) -> None:
        client = await deep_transport.connect()
        namespace = await open_namespace(client, pb.DURABILITY_NVME)
        blocks = chain("durable", 12)
        assert await client.put(namespace, blocks) == bytes([HIT] * 12)
        assert await tiers(client, namespace, blocks) == bytes([IN_BOTH] * 12)
        assert await client.read(namespace, hashes_of(blocks)) == [b.data for b in blocks]

    async def test_a_put_in_memory_is_made_durable_by_a_durable_one_of_the_same_blocks(
        self, deep_transport: Transport
    ) -> None:
        client = await deep_transport.connect()
        plain, durable = await open_namespace(client), await open_namespace(client, pb.DURABILITY_NVME)
        blocks = chain("twice", 4)
        await client.put(plain, blocks)
        assert await tiers(client, plain, blocks) == bytes([IN_DRAM] * 4)
        assert await client.put(durable, blocks) == bytes([HIT] * 4)
        assert await tiers(client, plain, blocks) == bytes([IN_BOTH] * 4)

    async def test_durability_is_of_the_handle_and_not_of_the_namespace(self, deep_transport: Transport) -> None:
        client = await deep_transport.connect()
        opened = [
            await client.call("OpenNamespace", pb.OpenNamespaceRequest(spec=spec(), durability=durability))
            for durability in (pb.DURABILITY_MEMORY, pb.DURABILITY_NVME, pb.DURABILITY_NVME)
        ]
        assert len({reply.digest for reply in opened}) == 1
        assert opened[0].namespace_id != opened[1].namespace_id == opened[2].namespace_id

    async def test_a_put_can_say_otherwise_than_its_namespace(self, deep_transport: Transport) -> None:
        client = await deep_transport.connect()
        if not client.shares_memory:
            pytest.skip("the fields of a reservation")
        plain, durable = await open_namespace(client), await open_namespace(client, pb.DURABILITY_NVME)
        for handle, durability, expected in (
            (plain, pb.DURABILITY_NVME, IN_BOTH),
            (durable, pb.DURABILITY_MEMORY, IN_DRAM),
        ):
            blocks = chain(f"otherwise {handle}", 2)
            reserved = await reserve(client, handle, blocks, durability=durability)
            assert reserved.outcomes == bytes([RESERVED] * 2)
            assert await commit(client, reserved.reservation_id, blocks, [0, 1]) == bytes([HIT] * 2)
            assert await tiers(client, handle, blocks) == bytes([expected] * 2)

    async def test_without_nvme_a_durable_namespace_is_refused(self, transport: Transport) -> None:
        client = await transport.connect()
        with pytest.raises(CallFailed, match=r"nvme\.paths") as refused:
            await open_namespace(client, pb.DURABILITY_NVME)
        assert refused.value.code == FAILED_PRECONDITION
        namespace = await open_namespace(client)
        with pytest.raises(CallFailed, match=r"nvme\.paths") as refused:
            await reserve(client, namespace, chain("refused", 1), durability=pb.DURABILITY_NVME)
        assert refused.value.code == FAILED_PRECONDITION
        assert await client.put(namespace, chain("refused", 1)) == bytes([HIT])

    async def test_a_drain_flushes_what_is_only_in_dram_and_can_be_taken_back(self, deep_transport: Transport) -> None:
        client, root = await deep_transport.connect(), await deep_transport.connect(ROOT)
        namespace = await open_namespace(client)
        blocks = chain("drained", 6)
        await client.put(namespace, blocks)
        drained = await root.call("Drain", admin.DrainRequest(deadline_ms=60_000))
        assert (drained.state, drained.written_blocks, drained.left_blocks) == ("draining", 6, 0)
        assert (drained.leases, drained.reservations) == (0, 0)
        assert await tiers(client, namespace, blocks) == bytes([IN_BOTH] * 6)
        assert await client.read(namespace, hashes_of(blocks)) == [b.data for b in blocks]
        assert await client.put(namespace, chain("refused", 1)) == bytes([THROTTLED])
        assert (await root.call("Status", pb.StatusRequest())).counters["drained_puts"] >= 1
        assert (await root.call("Drain", admin.DrainRequest(resume=True))).state == "serving"
        assert await client.put(namespace, chain("taken", 1)) == bytes([HIT])

    async def test_a_drain_tells_what_is_held_at_its_deadline(self, deep_transport: Transport) -> None:
        client, root = await deep_transport.connect(), await deep_transport.connect(ROOT)
        namespace = await open_namespace(client)
        await client.put(namespace, chain("held", 2))
        got = await get(client, [namespace], chain("held", 2))
        await reserve(client, namespace, chain("reserved", 1))
        drained = await root.call("Drain", admin.DrainRequest(deadline_ms=300))
        assert (drained.leases, drained.reservations, drained.written_blocks + drained.left_blocks) == (1, 1, 2)
        await root.call("Flush", admin.FlushRequest(wait_ms=60_000))
        assert await tiers(client, namespace, chain("held", 2)) == bytes([IN_BOTH] * 2), "held ones are written too"
        await release(client, got)
