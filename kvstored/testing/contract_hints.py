"""The contract of hints: what they may say, of whose blocks, and that a limit is one; see `contract`."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import Message
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.store.outcomes import HIT, MISS
from kvstored.testing.contract_client import (
    ACME,
    RIVAL,
    ROOT,
    VIEWER,
    Block,
    CallFailed,
    Transport,
    chain,
    contains,
    hashes_of,
    open_namespace,
)

INVALID, DENIED = 3, 7


async def _hint(client: Any, namespace: int, blocks: list[Block], **said: Any) -> Message:
    hashes = hashes_of(blocks)
    request = pb.HintRequest(namespace_id=namespace, hashes=b"".join(hashes), hash_bytes=len(hashes[0]), **said)
    return await client.call("Hint", request)  # type: ignore[no-any-return]


class HintContract:
    """Inherit, and provide the fixture `transport`; ACME may not pin hard there."""

    async def test_a_hint_is_about_blocks_and_what_they_hang_on(self, transport: Transport) -> None:
        client = await transport.connect(ACME)
        namespace = await open_namespace(client)
        blocks = chain("a", 8)
        await client.put(namespace, blocks)
        reply: Any = await _hint(client, namespace, blocks[6:], priority=2)
        assert (reply.blocks, reply.applied_blocks) == (8, 8)
        reply = await _hint(client, namespace, blocks[6:], final=True)
        assert (reply.blocks, reply.applied_blocks) == (2, 2)
        reply = await _hint(client, namespace, blocks[:2], soft_pin_ms=60_000)
        assert (reply.blocks, reply.applied_blocks) == (2, 2)
        reply = await _hint(client, namespace, chain("never", 2), continues=True)
        assert (reply.blocks, reply.applied_blocks) == (0, 0)

    async def test_nothing_is_pinned_hard_beyond_the_tenants_limit(self, transport: Transport) -> None:
        client = await transport.connect(ACME)
        namespace = await open_namespace(client)
        await client.put(namespace, chain("a", 4))
        reply: Any = await _hint(client, namespace, chain("a", 4), hard_pin_ms=1000)
        assert (reply.blocks, reply.applied_blocks, reply.hard_pinned_bytes) == (4, 0, 0)

    async def test_hints_are_listed_to_whom_they_belong(self, transport: Transport) -> None:
        acme, rival, root = [await transport.connect(name) for name in (ACME, RIVAL, ROOT)]
        namespace = await open_namespace(acme)
        await acme.put(namespace, chain("a", 8))
        await _hint(acme, namespace, chain("a", 2), soft_pin_ms=60_000)
        await _hint(acme, namespace, chain("a", 1), priority=1)
        (pin,) = (await acme.call("ListPins", admin.ListPinsRequest())).pins
        assert (pin.tenant, pin.soft_blocks, pin.hard_blocks, pin.preferred_blocks) == (ACME, 2, 0, 1)
        assert 0 < pin.longest_s <= 60
        theirs = await rival.call("ListPins", admin.ListPinsRequest())
        assert not theirs.pins
        assert [limit.tenant for limit in theirs.limits] == [RIVAL]
        assert [each.tenant for each in (await root.call("ListPins", admin.ListPinsRequest())).pins] == [ACME]
        await _hint(acme, namespace, chain("a", 8), unpin=True)
        (pin,) = (await acme.call("ListPins", admin.ListPinsRequest())).pins
        assert (pin.soft_blocks, pin.preferred_blocks, pin.longest_s) == (0, 1, 0)

    async def test_a_put_may_say_it_of_its_blocks_new_ones_and_old(self, transport: Transport) -> None:
        client = await transport.connect(ACME)
        namespace = await open_namespace(client)
        blocks = chain("a", 6)
        await client.put(namespace, chain("filler", 20))
        await client.put(namespace, blocks[:2])
        said = pb.PutHints(priority=2, soft_pin_ms=60_000, hard_pin_ms=60_000)
        assert await client.put(namespace, blocks, hints=said) == bytes([HIT] * 6)
        (pin,) = (await client.call("ListPins", admin.ListPinsRequest())).pins
        assert (pin.preferred_blocks, pin.soft_blocks, pin.hard_blocks) == (6, 6, 0)
        assert await client.put(namespace, blocks, hints=pb.PutHints(final=True)) == bytes([HIT] * 6), "all is there"
        await _hint(client, namespace, blocks, unpin=True, priority=0)
        assert await client.put(namespace, blocks[:3], hints=pb.PutHints(priority=-1)) == bytes([HIT] * 3)
        (pin,) = (await client.call("ListPins", admin.ListPinsRequest())).pins
        assert (pin.preferred_blocks, pin.soft_blocks) == (3, 0)

    @pytest.mark.parametrize("said", [{"priority": 4}, {"final": True, "continues": True}, {"soft_pin_ms": 1 << 40}])
    async def test_a_put_that_says_what_makes_no_sense_stores_nothing(
        self, transport: Transport, said: dict[str, Any]
    ) -> None:
        client = await transport.connect(ACME)
        namespace = await open_namespace(client)
        with pytest.raises(CallFailed) as failed:
            await client.put(namespace, chain("a", 2), hints=pb.PutHints(**said))
        assert failed.value.code == INVALID
        assert await contains(client, namespace, chain("a", 2)) == bytes([MISS] * 2)

    @pytest.mark.parametrize(
        "said",
        [
            {"priority": 4},
            {"priority": -4},
            {"final": True, "continues": True},
            {"unpin": True, "hard_pin_ms": 1},
            {"soft_pin_ms": 86_400_001},
            {"ttl_ms": 1 << 62},
        ],
    )
    async def test_what_makes_no_sense_is_refused(self, transport: Transport, said: dict[str, Any]) -> None:
        client = await transport.connect(ACME)
        namespace = await open_namespace(client)
        with pytest.raises(CallFailed) as failed:
            await _hint(client, namespace, chain("a", 1), **said)
        assert failed.value.code == INVALID

    async def test_a_reader_gives_no_hints(self, transport: Transport) -> None:
        client = await transport.connect(VIEWER)
        namespace = await open_namespace(client)
        with pytest.raises(CallFailed) as failed:
            await _hint(client, namespace, chain("a", 1), final=True)
        assert failed.value.code == DENIED
        assert not (await client.call("ListPins", admin.ListPinsRequest())).pins
