"""The contract of sessions, namespaces and groups; see `contract`."""

from __future__ import annotations

from typing import Any

import pytest
from kvstored_proto import frames
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.store.outcomes import HIT, MISS, PENDING
from kvstored.testing.contract_client import (
    ACME,
    RIVAL,
    ROOT,
    VIEWER,
    CallFailed,
    Client,
    Transport,
    chain,
    get,
    held,
    lookup,
    open_namespace,
    release,
    reserve,
    spec,
    unpack,
)

# Shards of one model share their chains, so that one lookup can ask for all of them.
SHARD_FIELDS = {"tp_rank", "tp_size", "pp_rank", "pp_size", "kv_group", "kv_group_kind", "window_tokens"}


def changed(name: str) -> dict[str, Any]:
    """A value of a namespace's field that differs from that of `spec()`."""
    kind = type(getattr(pb.NamespaceSpec(), name))
    return {name: {str: "other", int: 3, float: 1e6}[kind]}


class SessionContract:
    """Inherit, and provide the fixture `transport`."""

    # ---- opening ----

    async def test_opening_tells_who_one_is_and_what_one_may_hold(self, transport: Transport) -> None:
        opened = (await transport.connect(ACME)).opened
        assert opened.boot_id
        assert (opened.tenant, opened.role, opened.protocol) == (ACME, "tenant", frames.PROTOCOL_MAX)
        assert len(opened.session_id) == 16
        assert opened.daemon_version
        assert opened.limits.max_blocks_per_call
        assert opened.limits.max_block_bytes
        assert opened.limits.max_leases
        assert opened.limits.max_reservations

    async def test_every_boot_has_one_id_and_every_session_its_own(self, transport: Transport) -> None:
        a, b = (await transport.connect()).opened, (await transport.connect(RIVAL)).opened
        assert a.boot_id == b.boot_id
        assert a.session_id != b.session_id

    @pytest.mark.parametrize("newer_by", [0, 1])
    async def test_a_client_that_speaks_one_version_more_is_served(self, transport: Transport, newer_by: int) -> None:
        client = await transport.connect(protocol_max=frames.PROTOCOL_MAX + newer_by)
        assert client.opened.protocol == frames.PROTOCOL_MAX
        older = await transport.connect(protocol_min=frames.PROTOCOL_MIN - newer_by)
        assert older.opened.protocol == frames.PROTOCOL_MAX

    @pytest.mark.parametrize(
        ("low", "high"),
        [(frames.PROTOCOL_MAX + 1, frames.PROTOCOL_MAX + 1), (0, frames.PROTOCOL_MIN - 1), (1, 0)],
    )
    async def test_a_client_of_versions_that_the_daemon_does_not_speak_is_told_which_it_does(
        self, transport: Transport, low: int, high: int
    ) -> None:
        with pytest.raises(CallFailed, match=f"{frames.PROTOCOL_MIN} to {frames.PROTOCOL_MAX}") as failed:
            await transport.connect(protocol_min=low, protocol_max=high)
        assert failed.value.code == 9

    async def test_features_are_those_that_both_know(self, transport: Transport) -> None:
        client = await transport.connect(features=["time-travel", "groups", "prefetch"])
        assert sorted(client.opened.features) == ["groups", "prefetch"]
        assert not (await transport.connect()).opened.features

    async def test_an_unknown_token_opens_nothing(self, transport: Transport) -> None:
        with pytest.raises(CallFailed) as failed:
            await transport.connect(token="token of nobody")
        assert failed.value.code == 16
        assert (await held(await transport.connect(ROOT)))["sessions"] == 1

    async def test_a_role_is_told(self, transport: Transport) -> None:
        assert (await transport.connect(VIEWER)).opened.role == "reader"
        assert (await transport.connect(ROOT)).opened.role == "admin"

    async def test_the_end_of_a_session_gives_back_all_that_it_held(self, transport: Transport) -> None:
        root = await transport.connect(ROOT)
        client = await transport.connect()
        namespace = await open_namespace(client)
        blocks = chain("a", 3)
        await client.put(namespace, blocks[:2])
        await get(client, [namespace], blocks)
        await reserve(client, namespace, blocks[2:])
        before = await held(root)
        assert (before["sessions"], before["leases"], before["reservations"]) == (2, 1, 1)
        await client.end()
        staging = root.opened.staging_bytes
        nothing = {"leases": 0, "leased_bytes": 0, "reservations": 0, "registrations": 0}
        found = await held(root)
        assert found == {"sessions": 1, "staging_bytes": staging, **nothing}, found

    # ---- namespaces ----

    async def test_the_same_namespace_has_one_digest_and_one_handle(self, transport: Transport) -> None:
        client, other = await transport.connect(), await transport.connect()
        replies = [await c.call("OpenNamespace", pb.OpenNamespaceRequest(spec=spec())) for c in (client, client, other)]
        assert replies[0] == replies[1]
        assert replies[0].digest == replies[2].digest
        assert (len(replies[0].digest), len(replies[0].chain_seed)) == (16, 16)

    async def test_every_field_makes_another_namespace_and_shards_share_their_chains(
        self, transport: Transport
    ) -> None:
        first = await self._opened(await transport.connect(), {})
        same_digest, same_seed = set(), set()
        for name in (field.name for field in pb.NamespaceSpec.DESCRIPTOR.fields):
            reply = await self._opened(await transport.connect(), changed(name))
            same_digest |= {name} if reply.digest == first.digest else set()
            same_seed |= {name} if reply.chain_seed == first.chain_seed else set()
        assert not same_digest
        assert same_seed == SHARD_FIELDS

    async def _opened(self, client: Client, fields: dict[str, Any]) -> pb.OpenNamespaceReply:
        reply: pb.OpenNamespaceReply = await client.call("OpenNamespace", pb.OpenNamespaceRequest(spec=spec(**fields)))
        return reply

    async def test_blocks_of_another_namespace_are_not_found(self, transport: Transport) -> None:
        client = await transport.connect()
        ours, theirs = await open_namespace(client), await open_namespace(client, permission_version="2")
        blocks = chain("a", 1)
        await client.put(ours, blocks)
        assert (await lookup(client, [theirs], blocks)).next == MISS
        assert (await lookup(client, [ours, theirs], blocks)).next == MISS

    async def test_a_handle_is_good_in_its_own_session_only(self, transport: Transport) -> None:
        client, other = await transport.connect(), await transport.connect()
        await open_namespace(client)
        second = await open_namespace(client, layers=5)
        await open_namespace(other)
        with pytest.raises(CallFailed, match="not open in this session") as failed:
            await lookup(other, [second], chain("a", 1))
        assert failed.value.code == 5

    @pytest.mark.parametrize("fields", [{"model": ""}, {"extra": "x" * 20_000}])
    async def test_a_namespace_without_a_name_or_out_of_bounds_is_refused(
        self, transport: Transport, fields: dict[str, Any]
    ) -> None:
        client = await transport.connect()
        with pytest.raises(CallFailed) as failed:
            await open_namespace(client, **fields)
        assert failed.value.code == 3

    async def test_namespaces_of_one_session_are_limited(self, transport: Transport) -> None:
        client = await transport.connect()
        for layers in range(8):
            await open_namespace(client, layers=layers + 1)
        with pytest.raises(CallFailed, match="8 namespaces") as failed:
            await open_namespace(client, layers=100)
        assert failed.value.code == 8
        await open_namespace(client, layers=1)

    # ---- tenants ----

    async def test_no_tenant_sees_what_another_stored(self, transport: Transport) -> None:
        acme, rival = await transport.connect(ACME), await transport.connect(RIVAL)
        ours, theirs = await open_namespace(acme), await open_namespace(rival)
        blocks = chain("a", 2)
        assert await acme.put(ours, blocks) == bytes([HIT, HIT])
        assert (await lookup(rival, [theirs], blocks)).prefix_blocks == 0
        assert (await get(rival, [theirs], blocks, wait_ms=10)).blocks == 0
        deleted = await rival.call(
            "Delete", pb.DeleteRequest(namespace_id=theirs, hashes=blocks[0].hash, hash_bytes=len(blocks[0].hash))
        )
        assert deleted.deleted == 0
        assert await rival.put(theirs, blocks[:1]) == bytes([HIT])
        assert await acme.read(ours, [b.hash for b in blocks]) == [b.data for b in blocks]

    async def test_a_reader_may_not_write(self, transport: Transport) -> None:
        viewer = await transport.connect(VIEWER)
        namespace = await open_namespace(viewer)
        blocks = chain("a", 1)
        for attempt in (
            lambda: viewer.put(namespace, blocks),
            lambda: reserve(viewer, namespace, blocks),
            lambda: viewer.call(
                "Delete", pb.DeleteRequest(namespace_id=namespace, hashes=blocks[0].hash, hash_bytes=32)
            ),
        ):
            with pytest.raises(CallFailed, match="reader") as failed:
                await attempt()
            assert failed.value.code == 7
        assert (await lookup(viewer, [namespace], blocks)).next == MISS

    # ---- groups ----

    async def test_a_lease_is_used_and_released_by_another_session_of_the_group(self, transport: Transport) -> None:
        scheduler = await transport.connect(create_group=True)
        worker = await transport.connect(join_group=scheduler.opened.group_id)
        namespace = await open_namespace(scheduler)
        blocks = chain("a", 3)
        await scheduler.put(namespace, blocks)
        taken = await get(scheduler, [namespace], blocks)
        attached = await worker.call("Attach", pb.AttachRequest(lease_id=taken.leases[0].lease_id))
        assert attached.blocks == 3
        assert unpack(attached.leases[0]) == unpack(taken.leases[0])
        if worker.shares_memory:
            data = [worker.slot_data(head.slot, head.size_bytes) for head in unpack(attached.leases[0])]
            assert data == [b.data for b in blocks]
        assert await release(worker, attached) == 1
        assert await release(scheduler, taken) == 0

    async def test_a_lease_ends_with_the_last_of_its_group(self, transport: Transport) -> None:
        root = await transport.connect(ROOT)
        scheduler = await transport.connect(create_group=True)
        worker = await transport.connect(join_group=scheduler.opened.group_id)
        namespace = await open_namespace(scheduler)
        await scheduler.put(namespace, chain("a", 1))
        lease_id = (await get(scheduler, [namespace], chain("a", 1))).leases[0].lease_id
        await scheduler.end()
        assert (await worker.call("Attach", pb.AttachRequest(lease_id=lease_id))).blocks == 1
        await worker.end()
        assert (await held(root))["leases"] == 0

    @pytest.mark.parametrize("stranger", [ACME, RIVAL])
    async def test_a_lease_is_nothing_to_who_is_not_in_its_group(self, transport: Transport, stranger: str) -> None:
        client, other = await transport.connect(), await transport.connect(stranger, create_group=True)
        namespace = await open_namespace(client)
        await client.put(namespace, chain("a", 1))
        taken = await get(client, [namespace], chain("a", 1))
        with pytest.raises(CallFailed) as failed:
            await other.call("Attach", pb.AttachRequest(lease_id=taken.leases[0].lease_id))
        assert failed.value.code == 5
        assert await release(other, taken) == 0
        assert await release(client, taken) == 1

    async def test_no_other_tenant_joins_a_group_or_learns_that_it_is_there(self, transport: Transport) -> None:
        group_id = (await transport.connect(create_group=True)).opened.group_id
        assert len(group_id) == 16
        messages = []
        for tenant, wanted in ((RIVAL, group_id), (ACME, bytes(16))):
            with pytest.raises(CallFailed) as failed:
                await transport.connect(tenant, join_group=wanted)
            assert failed.value.code == 5
            messages.append(failed.value.message)
        assert messages[0] == messages[1]

    async def test_a_group_is_made_or_joined_but_not_both(self, transport: Transport) -> None:
        with pytest.raises(CallFailed) as failed:
            await transport.connect(create_group=True, join_group=bytes(16))
        assert failed.value.code == 3
        assert (await transport.connect()).opened.group_id == b""

    async def test_what_one_session_reserved_is_pending_for_another(self, transport: Transport) -> None:
        writer, reader = await transport.connect(), await transport.connect()
        blocks = chain("a", 2)
        reserved = await reserve(writer, await open_namespace(writer), blocks)
        assert reserved.reservation_id
        again = await reserve(reader, await open_namespace(reader), blocks)
        assert (again.reservation_id, again.outcomes) == (0, bytes([PENDING, PENDING]))
        with pytest.raises(CallFailed) as failed:
            await reader.call("Abort", pb.AbortRequest(reservation_id=reserved.reservation_id))
        assert failed.value.code == 5
