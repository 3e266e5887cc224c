"""The contract of explain and of the counters of misses; see `contract`."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message
from kvstored_proto import namespace as wire
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.explain import hit_rates
from kvstored.store.outcomes import HIT, MISS, NO_ROOM, THROTTLED
from kvstored.testing.contract_client import (
    ACME,
    BLOCK_BYTES,
    RIVAL,
    ROOT,
    Block,
    CallFailed,
    Client,
    Transport,
    block,
    chain,
    fill,
    get,
    hashes_of,
    lookup,
    open_namespace,
    packed,
    reserve,
    spec,
)
from kvstored.testing.contract_movement import sunk

DRAM_BLOCKS = (8 << 20) // BLOCK_BYTES
DIFFERS = "the namespace before it of this model differs in extra start 2 / start 1"


async def opened(client: Client, **fields: object) -> pb.OpenNamespaceReply:
    """A namespace that differs from others in these fields."""
    reply: pb.OpenNamespaceReply = await client.call("OpenNamespace", pb.OpenNamespaceRequest(spec=spec(**fields)))
    return reply


async def explain_chain(
    client: Client, digest: bytes, blocks: list[Block], tenant: str = ""
) -> admin.ExplainChainReply:
    """Explain a chain in the namespace of this digest."""
    request = admin.ExplainChainRequest(namespace_digest=digest, tenant=tenant, **packed(blocks))
    reply: admin.ExplainChainReply = await client.call("ExplainChain", request)
    return reply


async def explain_namespace(client: Client, tenant: str = "", **fields: object) -> admin.ExplainNamespaceReply:
    """Explain the namespace that has these fields."""
    request = admin.ExplainNamespaceRequest(spec=spec(**fields), tenant=tenant)
    reply: admin.ExplainNamespaceReply = await client.call("ExplainNamespace", request)
    return reply


async def hit_warnings(client: Client) -> list[str]:
    """The warnings that the status has about hit rates."""
    status: pb.StatusReply = await client.call("Status", pb.StatusRequest())
    return [warning for warning in status.warnings if "were there" in warning]


async def miss_reasons(client: Client) -> dict[str, int]:
    """How many misses of the client's tenant had which reason."""
    status: pb.StatusReply = await client.call("Status", pb.StatusRequest())
    (tenant,) = status.tenants
    return dict(tenant.miss_reasons)


class ExplainContract:
    """Inherit, and provide the fixtures `transport` and `deep_transport`."""

    # ---- one block ----

    async def test_explain_tells_where_a_block_is_or_why_it_is_not(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await open_namespace(client)
        blocks = chain("a", 4)
        await client.put(namespace, blocks[:2])
        await reserve(client, namespace, blocks[2:3])
        await client.call("Delete", pb.DeleteRequest(namespace_id=namespace, **packed(blocks[1:2])))
        verdicts = []
        for hash_ in hashes_of(blocks):
            answer = await client.call("Explain", admin.ExplainRequest(hash=hash_))
            assert answer.detail
            verdicts.append(answer.verdict)
        assert verdicts == ["hit", "deleted", "pending", "never_stored"]

    async def test_explain_tells_by_which_rule_a_block_was_evicted(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await open_namespace(client)
        await client.put(namespace, chain("old", 1))
        await fill(client, namespace, DRAM_BLOCKS)
        answer = await client.call("Explain", admin.ExplainRequest(hash=chain("old", 1)[0].hash))
        assert answer.verdict == "evicted"
        assert "to make room in DRAM" in answer.detail
        assert "policy.eviction: " in answer.detail

    async def test_explain_tells_why_a_put_was_refused(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await open_namespace(client)
        await reserve(client, namespace, chain("held", DRAM_BLOCKS))
        refused = chain("refused", 2)
        assert set((await reserve(client, namespace, refused)).outcomes) <= {NO_ROOM, THROTTLED}
        for hash_ in hashes_of(refused):
            answer = await client.call("Explain", admin.ExplainRequest(hash=hash_))
            assert answer.verdict == "put_refused"

    async def test_explain_names_the_fields_of_the_nearest_namespace_that_has_the_block(
        self, transport: Transport
    ) -> None:
        client = await transport.connect()
        ours = await opened(client, dtype="bf16")
        for differing in ({"dtype": "fp8", "layout": "other"}, {"dtype": "fp16"}):
            await client.put((await opened(client, **differing)).namespace_id, chain("a", 1))
        await opened(client, dtype="fp16", layout="holds nothing")
        request = admin.ExplainRequest(hash=chain("a", 1)[0].hash, namespace_digest=ours.digest)
        answer = await client.call("Explain", request)
        assert answer.verdict == "namespace_differs"
        assert answer.detail == "the nearest namespace that has this block differs in: dtype bf16 / fp16"

    async def test_explain_tells_nothing_of_another_tenant(self, transport: Transport) -> None:
        acme, rival = await transport.connect(), await transport.connect(RIVAL)
        theirs = await opened(acme)
        await acme.put(theirs.namespace_id, chain("a", 1))
        ours = await opened(rival)
        (hash_,) = hashes_of(chain("a", 1))
        for digest in (b"", ours.digest):
            answer = await rival.call("Explain", admin.ExplainRequest(hash=hash_, namespace_digest=digest))
            assert (answer.verdict, list(answer.blocks)) == ("never_stored", [])
        found = await explain_chain(rival, ours.digest, chain("a", 1))
        assert (found.verdict, found.HasField("nearest")) == ("never_stored", False)
        asked = admin.ExplainNamespaceRequest(digest=theirs.digest)
        unknown = admin.ExplainNamespaceRequest(digest=bytes(16))
        replies = [await rival.call("ExplainNamespace", request) for request in (asked, unknown)]
        replies[0].digest = replies[1].digest
        assert replies[0] == replies[1]
        assert (replies[0].known, list(replies[0].near)) == (False, [])
        assert [n.digest for n in (await explain_namespace(rival, dtype="fp16")).near] == [ours.digest]

    @pytest.mark.parametrize(
        "request_",
        [
            admin.ExplainRequest(hash=bytes(32), tenant=ACME),
            admin.ExplainChainRequest(namespace_digest=bytes(16), hashes=bytes(32), hash_bytes=32, tenant=ACME),
            admin.ExplainNamespaceRequest(digest=bytes(16), tenant=ACME),
        ],
        ids=lambda r: type(r).__name__,
    )
    async def test_only_an_admin_may_name_another_tenant(self, transport: Transport, request_: Message) -> None:
        rival = await transport.connect(RIVAL)
        with pytest.raises(CallFailed, match="admin") as failed:
            await rival.call(type(request_).__name__.removesuffix("Request"), request_)
        assert failed.value.code == 7

    async def test_an_admin_asks_about_a_tenant_that_it_names(self, transport: Transport) -> None:
        acme, rival, root = [await transport.connect(name) for name in (ACME, RIVAL, ROOT)]
        theirs = await opened(acme)
        await acme.put(theirs.namespace_id, chain("a", 2))
        await opened(rival, dtype="fp16")
        (hash_, _) = hashes_of(chain("a", 2))
        answer = await root.call("Explain", admin.ExplainRequest(hash=hash_, tenant=RIVAL))
        assert answer.verdict == "never_stored"
        answer = await root.call("Explain", admin.ExplainRequest(hash=hash_, tenant=ACME))
        assert answer.verdict == "hit"
        assert (await explain_chain(root, theirs.digest, chain("a", 2), ACME)).verdict == "hit"
        found = await explain_namespace(root, ACME)
        assert (found.known, found.digest, found.tenant, list(found.near)) == (True, theirs.digest, ACME, [])

    # ---- a chain ----

    async def test_a_chain_is_explained_up_to_its_break_and_behind_it(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await opened(client)
        blocks = chain("a", 8)
        await client.put(namespace.namespace_id, blocks[:6])
        deleted = pb.DeleteRequest(namespace_id=namespace.namespace_id, **packed(blocks[3:5]))
        await client.call("Delete", deleted)
        found = await explain_chain(client, namespace.digest, blocks)
        assert (found.hit_blocks, found.dram_blocks, found.nvme_blocks, found.pending_blocks) == (3, 3, 0, 0)
        assert (found.verdict, found.missing, found.stored_after) == ("deleted", blocks[3].hash, 1)
        assert dict(found.missing_blocks) == {"deleted": 2, "never_stored": 2}
        whole = await explain_chain(client, namespace.digest, blocks[:3])
        assert (whole.verdict, whole.hit_blocks, whole.missing) == ("hit", 3, b"")

    async def test_a_chain_under_another_namespace_is_found_there(self, transport: Transport) -> None:
        client = await transport.connect()
        ours, theirs = await opened(client, tp_rank=0, tp_size=2), await opened(client, tp_rank=1, tp_size=2)
        await client.put(theirs.namespace_id, chain("a", 2))
        found = await explain_chain(client, ours.digest, chain("a", 2))
        assert (found.hit_blocks, found.verdict, found.nearest.digest) == (0, "namespace_differs", theirs.digest)
        assert [(d.field, d.ours, d.theirs) for d in found.nearest.differences] == [("tp_rank", "unset", "1")]
        assert dict(found.missing_blocks) == {"namespace_differs": 1, "never_stored": 1}

    async def test_a_chain_on_nvme_is_counted_there(self, deep_transport: Transport) -> None:
        client = await deep_transport.connect()
        namespace = await opened(client)
        blocks = await sunk(deep_transport, client, namespace.namespace_id)
        await reserve(client, namespace.namespace_id, chain("pending", 1))
        found = await explain_chain(client, namespace.digest, [*blocks, *chain("pending", 1), block("nowhere")])
        assert (found.hit_blocks, found.nvme_blocks, found.dram_blocks, found.pending_blocks) == (9, 8, 1, 1)
        assert found.verdict == "never_stored"
        known = await explain_namespace(client)
        assert known.nvme_blocks >= 8

    async def test_a_chain_needs_a_namespace_and_hashes(self, transport: Transport) -> None:
        client = await transport.connect()
        with pytest.raises(CallFailed) as failed:
            await explain_chain(client, bytes(16), chain("a", 1))
        assert failed.value.code == 5
        with pytest.raises(CallFailed) as failed:
            await client.call("ExplainChain", admin.ExplainChainRequest(namespace_digest=bytes(16)))
        assert failed.value.code == 3

    # ---- a namespace ----

    async def test_a_namespace_is_known_or_its_nearest_is_named(self, transport: Transport) -> None:
        client = await transport.connect()
        nothing = await explain_namespace(client)
        assert (nothing.known, list(nothing.near), nothing.tenant) == (False, [], ACME)
        bf16 = await opened(client, dtype="bf16")
        await opened(client, dtype="bf16", layout="x", quantization="awq")
        await opened(client, model="another", dtype="fp16")
        await client.put(bf16.namespace_id, chain("a", 2))
        known = await explain_namespace(client, dtype="bf16")
        assert (known.known, known.dram_blocks, known.digest) == (True, 2, bf16.digest)
        assert known.fields["dtype"] == "bf16"
        unknown = await explain_namespace(client, dtype="fp16")
        assert (unknown.known, unknown.digest) == (False, wire.digest(ACME, spec(dtype="fp16")))
        assert [len(near.differences) for near in unknown.near] == [1, 3]
        assert unknown.near[0].digest == bf16.digest
        assert "of this model differs in: dtype fp16 / bf16" in unknown.detail
        by_digest = await client.call("ExplainNamespace", admin.ExplainNamespaceRequest(digest=bf16.digest))
        assert by_digest == known

    async def test_near_namespaces_are_as_many_as_asked_for(self, transport: Transport) -> None:
        client = await transport.connect()
        for layers in range(1, 6):
            await opened(client, layers=layers)
        request = admin.ExplainNamespaceRequest(spec=spec(layers=77), near_max=3)
        assert len((await client.call("ExplainNamespace", request)).near) == 3

    # ---- counters ----

    async def test_misses_are_counted_by_the_reason_of_the_first_missing_block(self, transport: Transport) -> None:
        client, root = await transport.connect(), await transport.connect(ROOT)
        namespace = await open_namespace(client)
        blocks = chain("a", 4)
        await client.put(namespace, blocks[:3])
        assert (await lookup(client, [namespace], blocks[:3])).next == HIT
        assert (await get(client, [namespace], blocks[:3])).next == HIT
        assert await miss_reasons(client) == {}
        assert (await lookup(client, [namespace], blocks)).next == MISS
        await client.call("Delete", pb.DeleteRequest(namespace_id=namespace, **packed(blocks[1:2])))
        assert (await get(client, [namespace], blocks)).next == MISS
        assert (await lookup(client, [namespace], blocks)).next == MISS
        assert await miss_reasons(client) == {"never_stored": 1, "deleted": 2}
        every: pb.StatusReply = await root.call("Status", pb.StatusRequest())
        assert {t.name: dict(t.miss_reasons) for t in every.tenants if t.miss_reasons} == {
            ACME: {"never_stored": 1, "deleted": 2}
        }

    async def test_a_namespace_that_stores_much_for_little_is_warned_of(
        self, transport: Transport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hit_rates, "STORED_BLOCKS_MIN", 4)
        monkeypatch.setattr(hit_rates, "ASKED_BLOCKS_MIN", 8)
        client, rival, root = [await transport.connect(name) for name in (ACME, RIVAL, ROOT)]
        await opened(client, extra="start 1")
        ours = await opened(client, extra="start 2")
        await lookup(client, [ours.namespace_id], chain("a", 8))
        assert not await hit_warnings(client)
        await client.put(ours.namespace_id, chain("b", 4))
        (warning,) = await hit_warnings(client)
        assert f"stored 4 blocks, and of 8 asked for 0 % were there: {DIFFERS}" in warning
        assert f"kvstorectl explain --namespace {ours.digest.hex()}" in warning
        assert await hit_warnings(rival) == []
        assert await hit_warnings(root) == [warning]
        assert warning in (await explain_namespace(client, extra="start 2")).detail
        await lookup(client, [ours.namespace_id], chain("b", 4) * 2)
        await client.put(ours.namespace_id, chain("c", 4))
        assert await hit_warnings(client) == []
