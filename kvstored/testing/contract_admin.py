"""The contract of status and the admin operations; see `contract`."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.message import Message
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.store.outcomes import HIT, THROTTLED
from kvstored.testing.contract_client import (
    ACME,
    RIVAL,
    ROOT,
    CallFailed,
    Transport,
    chain,
    get,
    hashes_of,
    open_namespace,
    reserve,
)


class AdminContract:
    """Inherit, and provide the fixture `transport`."""

    # ---- status ----

    async def test_a_tenant_sees_itself_and_an_admin_sees_all(self, transport: Transport) -> None:
        acme, rival, root = [await transport.connect(name) for name in (ACME, RIVAL, ROOT)]
        await acme.put(await open_namespace(acme), chain("a", 2))
        await rival.put(await open_namespace(rival), chain("a", 1))
        ours: pb.StatusReply = await acme.call("Status", pb.StatusRequest())
        assert ours.state == "serving"
        assert [(t.name, t.dram_blocks, t.blocks_put) for t in ours.tenants] == [(ACME, 2, 2)]
        assert {s.tenant for s in ours.sessions} == {ACME}
        assert not ours.tiers
        assert not ours.counters
        every: pb.StatusReply = await root.call("Status", pb.StatusRequest())
        assert {(t.name, t.dram_blocks) for t in every.tenants} >= {(ACME, 2), (RIVAL, 1), (ROOT, 0)}
        assert sorted(s.tenant for s in every.sessions) == [ACME, RIVAL, ROOT]
        (dram,) = every.tiers
        assert (dram.name, dram.blocks) == ("dram", 3)
        assert dram.used_bytes + dram.dead_bytes + dram.retired_bytes + dram.free_bytes == dram.capacity_bytes

    async def test_status_tells_what_a_session_holds(self, transport: Transport) -> None:
        client = await transport.connect(client_name="engine 7")
        namespace = await open_namespace(client)
        blocks = chain("a", 3)
        await client.put(namespace, blocks[:2])
        await get(client, [namespace], blocks[:2])
        await reserve(client, namespace, blocks[2:])
        (session,) = (await client.call("Status", pb.StatusRequest())).sessions
        assert session.client == "engine 7"
        assert (session.leases, session.reservations, session.leased_bytes) == (1, 1, 2 * len(blocks[0].data))
        assert session.staging_bytes == client.opened.staging_bytes

    # ---- listings ----

    async def test_namespaces_are_listed_to_whom_they_belong(self, transport: Transport) -> None:
        acme, rival, root = [await transport.connect(name) for name in (ACME, RIVAL, ROOT)]
        await acme.put(await open_namespace(acme, adapter="lora"), chain("a", 2, 5000))
        await open_namespace(rival)
        (ours,) = (await acme.call("ListNamespaces", admin.ListNamespacesRequest())).namespaces
        assert (ours.tenant, ours.fields["adapter"], ours.dram_blocks, ours.dram_bytes) == (ACME, "lora", 2, 2 * 8192)
        every = (await root.call("ListNamespaces", admin.ListNamespacesRequest())).namespaces
        assert sorted(n.tenant for n in every) == [ACME, RIVAL]
        with pytest.raises(CallFailed) as failed:
            await rival.call("ListBlocks", admin.ListBlocksRequest(namespace_digest=ours.digest))
        assert failed.value.code == 5

    @pytest.mark.parametrize("limit", [1, 2, 3, 100])
    async def test_blocks_are_listed_page_by_page_each_once(self, transport: Transport, limit: int) -> None:
        client, rival = await transport.connect(), await transport.connect(RIVAL)
        await rival.put(await open_namespace(rival), chain("r", 2))
        blocks = chain("a", 3), chain("b", 2)
        for number, part in enumerate(blocks):
            await client.put(await open_namespace(client, layers=number + 1), part)
        request, listed = admin.ListBlocksRequest(limit=limit), []
        while True:
            page = await client.call("ListBlocks", request)
            assert len(page.blocks) <= limit
            listed += page.blocks
            if not page.cursor:
                break
            request.cursor = page.cursor
        assert sorted(b.hash for b in listed) == sorted(hashes_of([*blocks[0], *blocks[1]]))
        first = next(b for b in listed if b.hash == blocks[0][1].hash)
        assert (first.parent, first.size_bytes, first.state) == (blocks[0][0].hash, len(blocks[0][1].data), "ready")
        assert (first.tiers, first.holds, len(first.content_hash)) == ("dram", 0, 16)

    @pytest.mark.parametrize("cursor", [b"x", b"d", b"d0000" + b"\xff" * 8, b"d0000" + bytes(9), b"n0000" + bytes(300)])
    async def test_a_made_up_cursor_is_refused(self, transport: Transport, cursor: bytes) -> None:
        client = await transport.connect()
        with pytest.raises(CallFailed, match="cursor") as failed:
            await client.call("ListBlocks", admin.ListBlocksRequest(cursor=cursor))
        assert failed.value.code == 3

    # ---- for admins ----

    async def test_verify_checks_every_block(self, transport: Transport) -> None:
        client, root = await transport.connect(), await transport.connect(ROOT)
        await client.put(await open_namespace(client), chain("a", 3))
        verified = await root.call("Verify", admin.VerifyRequest())
        assert (verified.dram_blocks, verified.corrupt, verified.bytes) == (3, 0, 3 * len(chain("a", 1)[0].data))

    async def test_drained_means_no_new_blocks_but_the_old_ones(self, transport: Transport) -> None:
        client, root = await transport.connect(), await transport.connect(ROOT)
        namespace = await open_namespace(client)
        await client.put(namespace, chain("a", 1))
        assert (await root.call("Drain", admin.DrainRequest())).state == "draining"
        assert await client.put(namespace, chain("b", 1)) == bytes([THROTTLED])
        assert await client.read(namespace, hashes_of(chain("a", 1))) == [chain("a", 1)[0].data]
        assert (await client.call("Status", pb.StatusRequest())).state == "draining"
        assert (await root.call("Drain", admin.DrainRequest(resume=True))).state == "serving"
        assert await client.put(namespace, chain("b", 1)) == bytes([HIT])

    async def test_drain_counts_what_is_still_held(self, transport: Transport) -> None:
        client, root = await transport.connect(), await transport.connect(ROOT)
        namespace = await open_namespace(client)
        await client.put(namespace, chain("a", 1))
        await get(client, [namespace], chain("a", 1))
        await reserve(client, namespace, chain("b", 1))
        drained = await root.call("Drain", admin.DrainRequest())
        assert (drained.leases, drained.reservations) == (1, 1)

    @pytest.mark.parametrize(
        "request_",
        [admin.VerifyRequest(), admin.FlushRequest(), admin.DrainRequest(), admin.WearRequest(), admin.PolicyRequest()],
        ids=lambda r: type(r).__name__,
    )
    async def test_what_concerns_all_tenants_needs_an_admin(self, transport: Transport, request_: Message) -> None:
        client = await transport.connect()
        with pytest.raises(CallFailed, match="admin") as failed:
            await client.call(type(request_).__name__.removesuffix("Request"), request_)
        assert failed.value.code == 7

    async def test_an_admin_changes_the_eviction_policy_of_all_tenants(self, transport: Transport) -> None:
        client, root = await transport.connect(), await transport.connect(ROOT)
        namespace = await open_namespace(client)
        await client.put(namespace, chain("a", 3))
        before = await root.call("Policy", admin.PolicyRequest())
        assert before.eviction == before.configured_eviction
        assert before.settings["mover.high_watermark"] == "0.9"
        for eviction in ("lfu", before.eviction):
            changed = await root.call("SetPolicy", admin.SetPolicyRequest(eviction=eviction))
            assert (changed.eviction, changed.configured_eviction) == (eviction, before.eviction)
            while (await root.call("Policy", admin.PolicyRequest())).changing:  # noqa: ASYNC110 - asked, not waited for
                await asyncio.sleep(0.01)
            assert await client.read(namespace, hashes_of(chain("a", 3))) == [block.data for block in chain("a", 3)]
        with pytest.raises(CallFailed, match="one of heat, lfu") as failed:
            await root.call("SetPolicy", admin.SetPolicyRequest(eviction="random"))
        assert failed.value.code == 3

    async def test_there_is_no_flush_without_a_lower_tier(self, transport: Transport) -> None:
        root = await transport.connect(ROOT)
        for request in (admin.FlushRequest(), admin.WearRequest()):
            with pytest.raises(CallFailed, match=r"nvme\.paths") as failed:
                await root.call(type(request).__name__.removesuffix("Request"), request)
            assert failed.value.code == 9
