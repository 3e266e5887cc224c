"""The contract of TTLs: how they are asked for, and that what has ended is there for nobody; see `contract`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.store.outcomes import HIT
from kvstored.testing.contract_client import (
    ROOT,
    CallFailed,
    Client,
    Transport,
    chain,
    hashes_of,
    lookup,
    packed,
    reserve,
    spec,
)

INVALID = 3
TTL_MS = 1000


async def opened(client: Client, **fields: Any) -> int:
    """A namespace's handle, opened with more than a spec."""
    reply = await client.call("OpenNamespace", pb.OpenNamespaceRequest(spec=spec(), **fields))
    handle: int = reply.namespace_id
    return handle


async def gone(client: Client, namespace: int, blocks: Any) -> None:
    """Return when none of the blocks is there any more."""
    request = pb.ContainsRequest(namespace_id=namespace, **packed(blocks))
    while any((await client.call("Contains", request)).outcomes):  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.02)


class ExpiryContract:
    """Inherit, and provide the fixtures `transport` and `deep_transport`, the latter with a lower tier."""

    async def test_a_ttl_is_of_the_handle_and_not_of_the_namespace(self, transport: Transport) -> None:
        client = await transport.connect()
        short, plain = await opened(client, ttl_ms=TTL_MS), await opened(client)
        assert short != plain
        assert short == await opened(client, ttl_ms=TTL_MS)
        assert await client.put(short, chain("short", 3)) == bytes([HIT] * 3)
        await client.put(plain, chain("plain", 3))
        await gone(client, plain, chain("short", 3))
        assert await client.read(plain, hashes_of(chain("plain", 3))) == [b.data for b in chain("plain", 3)]
        assert await client.put(plain, chain("short", 3)) == bytes([HIT] * 3)
        assert await client.read(short, hashes_of(chain("short", 3))) == [b.data for b in chain("short", 3)]

    async def test_what_has_ended_is_not_on_nvme_either_and_explain_says_why(self, deep_transport: Transport) -> None:
        client, root = await deep_transport.connect(), await deep_transport.connect(ROOT)
        short, plain = await opened(client, ttl_ms=TTL_MS), await opened(client)
        await client.put(short, chain("a", 2))
        await client.put(plain, chain("b", 2))
        await root.call("Flush", admin.FlushRequest(wait_ms=60_000))
        await gone(client, plain, chain("a", 2))
        answer = await client.call("Explain", admin.ExplainRequest(hash=chain("a", 2)[0].hash))
        assert answer.verdict == "expired"
        assert (await lookup(client, [plain], chain("a", 2))).prefix_blocks == 0
        assert (await lookup(client, [plain], chain("b", 2))).prefix_blocks == 2

    async def test_a_listing_says_when_a_block_ends(self, transport: Transport) -> None:
        client = await transport.connect()
        await client.put(await opened(client, ttl_ms=3_600_000), chain("a", 1))
        await client.put(await opened(client), chain("b", 1))
        listed = (await client.call("ListBlocks", admin.ListBlocksRequest())).blocks
        ends = {block.hash: block.expires_s for block in listed}
        assert ends[chain("a", 1)[0].hash] > 1e9
        assert ends[chain("b", 1)[0].hash] == 0

    @pytest.mark.parametrize(
        "fields",
        [{"sliding_ttl": True}, {"ttl_ms": 500, "sliding_ttl": True}, {"ttl_ms": 1 << 63}],
    )
    async def test_a_ttl_that_makes_no_sense_is_refused(self, transport: Transport, fields: dict[str, Any]) -> None:
        client = await transport.connect()
        with pytest.raises(CallFailed, match=r"(?i)ttl") as failed:
            await opened(client, **fields)
        assert failed.value.code == INVALID
        namespace = await opened(client)
        request = pb.ReserveRequest(namespace_id=namespace, block_bytes=4096, **packed(chain("a", 1)), **fields)
        with pytest.raises(CallFailed, match=r"(?i)ttl") as failed:
            await client.call("Reserve", request)
        assert failed.value.code == INVALID
        assert (await reserve(client, namespace, chain("a", 1))).reservation_id
