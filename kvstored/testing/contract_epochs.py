"""The contract of epoch bumps: what is out of reach, for whom, and who may; see `contract`."""

from __future__ import annotations

import pytest
from kvstored_proto.v1 import admin_pb2 as admin

from kvstored.store.outcomes import HIT
from kvstored.testing.contract_client import (
    ACME,
    RIVAL,
    ROOT,
    VIEWER,
    CallFailed,
    Transport,
    chain,
    hashes_of,
    lookup,
    open_namespace,
)

INVALID, DENIED = 3, 7


class EpochContract:
    """Inherit, and provide the fixtures `transport` and `deep_transport`, the latter with a lower tier."""

    async def test_a_bump_is_of_ones_own_blocks_and_the_open_namespace_goes_on(self, transport: Transport) -> None:
        acme, rival = await transport.connect(ACME), await transport.connect(RIVAL)
        namespace, other = await open_namespace(acme), await open_namespace(acme, model="other")
        theirs = await open_namespace(rival)
        blocks = chain("a", 4)
        for client, handle in ((acme, namespace), (acme, other), (rival, theirs)):
            await client.put(handle, blocks)
        bumped = await acme.call("BumpEpoch", admin.BumpEpochRequest(model="m"))
        assert (bumped.namespaces, bumped.dram_blocks) == (1, 4)
        assert (await lookup(acme, [namespace], blocks)).prefix_blocks == 0
        assert (await lookup(acme, [other], blocks)).prefix_blocks == 4
        assert (await lookup(rival, [theirs], blocks)).prefix_blocks == 4
        assert await acme.put(namespace, blocks[:2]) == bytes([HIT] * 2)
        assert await acme.read(namespace, hashes_of(blocks)) == [b.data for b in blocks[:2]]
        again = await open_namespace(acme)
        assert await acme.read(again, hashes_of(blocks)) == [b.data for b in blocks[:2]]

    async def test_a_bump_reaches_what_is_on_nvme(self, deep_transport: Transport) -> None:
        client, root = await deep_transport.connect(ACME), await deep_transport.connect(ROOT)
        namespace = await open_namespace(client, model_version="v1")
        kept = await open_namespace(client, model_version="v2")
        blocks = chain("a", 4)
        await client.put(namespace, blocks)
        await client.put(kept, blocks)
        await root.call("Flush", admin.FlushRequest(wait_ms=60_000))
        await client.call("BumpEpoch", admin.BumpEpochRequest(model="m", model_version="v1"))
        assert (await lookup(client, [namespace], blocks)).prefix_blocks == 0
        assert (await lookup(client, [kept], blocks)).prefix_blocks == 4

    async def test_epochs_are_bumped_and_listed_by_whom_they_belong_to(self, transport: Transport) -> None:
        acme, rival, viewer, root = [await transport.connect(name) for name in (ACME, RIVAL, VIEWER, ROOT)]
        await acme.call("BumpEpoch", admin.BumpEpochRequest(model="m"))
        await root.call("BumpEpoch", admin.BumpEpochRequest(model="m", model_version="v", tenant=RIVAL))
        for client, tenant in ((rival, ACME), (rival, "nobody"), (viewer, ""), (viewer, ACME)):
            with pytest.raises(CallFailed) as failed:
                await client.call("BumpEpoch", admin.BumpEpochRequest(model="m", tenant=tenant))
            assert failed.value.code == DENIED
        with pytest.raises(CallFailed, match="name it") as failed:
            await acme.call("BumpEpoch", admin.BumpEpochRequest(tenant=ACME))
        assert failed.value.code == INVALID
        listed = [
            [
                (e.tenant, e.model, e.model_version)
                for e in (await c.call("ListEpochs", admin.ListEpochsRequest())).epochs
            ]
            for c in (acme, rival, viewer, root)
        ]
        ours, theirs = (ACME, "m", ""), (RIVAL, "m", "v")
        assert listed == [[ours], [theirs], [], [ours, theirs]]
