"""The contract of purges and of the ends of sessions; see `contract`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1 import kvstored_pb2 as pb

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
    hashes_of,
    open_namespace,
    packed,
    reserve,
)

POLL_S = 0.02


async def purged(client: Client, **selection: Any) -> admin.PurgeReceipt:
    """Purge and wait for the end of it."""
    receipt = (await client.call("Purge", admin.PurgeRequest(**selection))).receipt
    while receipt.state in ("waiting", "running"):
        await asyncio.sleep(POLL_S)
        request = admin.PurgeStatusRequest(purge_id=receipt.purge_id)
        (receipt,) = (await client.call("PurgeStatus", request)).receipts
    found: admin.PurgeReceipt = receipt
    return found


class PurgeContract:
    """Inherit, and provide the fixtures `transport` and `deep_transport`."""

    async def test_a_purge_takes_a_tenants_blocks_and_nobody_elses(self, deep_transport: Transport) -> None:
        acme, rival, root = [await deep_transport.connect(name) for name in (ACME, RIVAL, ROOT)]
        ours, theirs = await open_namespace(acme), await open_namespace(rival)
        blocks, others = chain("a", 6), chain("r", 6)
        await acme.put(ours, blocks)
        await rival.put(theirs, others)
        await root.call("Flush", admin.FlushRequest())
        receipt = await purged(root, tenant=ACME)
        assert (receipt.state, list(receipt.remains)) == ("complete", [])
        assert (receipt.dram_blocks, receipt.nvme_blocks, receipt.by) == (6, 6, ROOT)
        assert receipt.nvme_zeroed_bytes >= receipt.nvme_bytes > 0
        assert await acme.read(ours, hashes_of(blocks)) == []
        assert await rival.read(theirs, hashes_of(others)) == [b.data for b in others]
        answer = await acme.call("Explain", admin.ExplainRequest(hash=blocks[0].hash))
        assert answer.verdict == "purged"
        await acme.put(ours, blocks)
        assert await acme.read(ours, hashes_of(blocks)) == [b.data for b in blocks]

    async def test_a_tenant_purges_what_is_its_own(self, transport: Transport) -> None:
        acme, rival = await transport.connect(ACME), await transport.connect(RIVAL)
        ours, theirs = await open_namespace(acme), await open_namespace(rival)
        await acme.put(ours, chain("a", 2))
        await rival.put(theirs, chain("a", 2))
        receipt = await purged(acme, model="m")  # theirs is of the same model
        assert (receipt.state, receipt.dram_blocks, receipt.selection.tenant) == ("complete", 2, ACME)
        assert await rival.read(theirs, hashes_of(chain("a", 2))) == [b.data for b in chain("a", 2)]

    async def test_another_tenants_blocks_need_an_admin_and_a_reader_purges_nothing(self, transport: Transport) -> None:
        acme, viewer, rival = [await transport.connect(name) for name in (ACME, VIEWER, RIVAL)]
        await acme.put(await open_namespace(acme), chain("a", 1))
        (ours,) = (await acme.call("ListNamespaces", admin.ListNamespacesRequest())).namespaces
        for client, selection, code in (
            (rival, {"tenant": ACME}, 7),
            (rival, {"tenant": "nobody"}, 7),
            (rival, {"namespace_digest": ours.digest}, 5),
            (viewer, {"model": "m"}, 7),
        ):
            with pytest.raises(CallFailed) as failed:
                await client.call("Purge", admin.PurgeRequest(**selection))
            assert failed.value.code == code
        assert await acme.read(1, hashes_of(chain("a", 1))) == [chain("a", 1)[0].data]

    @pytest.mark.parametrize(
        ("selection", "message"),
        [
            ({}, "name what to purge"),
            ({"dry_run": True, "deadline_ms": 5}, "name what to purge"),
            ({"model_version": "1", "tenant": ACME}, "model_version needs a model"),
            ({"namespace_digest": b"short"}, "16 bytes"),
            ({"older_than_ms": 1 << 63}, "hundred years"),
        ],
    )
    async def test_a_selection_that_makes_no_sense_is_refused(
        self, transport: Transport, selection: dict[str, Any], message: str
    ) -> None:
        root = await transport.connect(ROOT)
        with pytest.raises(CallFailed, match=message) as failed:
            await root.call("Purge", admin.PurgeRequest(**selection))
        assert failed.value.code == 3

    async def test_receipts_are_shown_to_who_purged(self, transport: Transport) -> None:
        acme, rival, root = [await transport.connect(name) for name in (ACME, RIVAL, ROOT)]
        mine = await purged(acme, model="m")
        theirs = await purged(root, tenant=ACME)
        for client, seen in ((acme, [mine]), (rival, []), (root, [theirs, mine])):
            receipts = (await client.call("PurgeStatus", admin.PurgeStatusRequest())).receipts
            assert [receipt.purge_id for receipt in receipts] == [receipt.purge_id for receipt in seen]
        for purge_id in (mine.purge_id, "0" * 12):
            with pytest.raises(CallFailed, match="no such purge") as failed:
                await rival.call("PurgeStatus", admin.PurgeStatusRequest(purge_id=purge_id))
            assert failed.value.code == 5

    async def test_a_dry_run_tells_what_would_go(self, transport: Transport) -> None:
        acme, root = await transport.connect(ACME), await transport.connect(ROOT)
        namespace = await open_namespace(acme)
        await acme.put(namespace, chain("a", 3))
        await get(acme, [namespace], chain("a", 3))
        receipt = (await root.call("Purge", admin.PurgeRequest(tenant=ACME, dry_run=True))).receipt
        assert (receipt.state, receipt.purge_id, receipt.dram_blocks, receipt.leases) == ("dry_run", "", 3, 1)
        assert await acme.read(namespace, hashes_of(chain("a", 3))) == [b.data for b in chain("a", 3)]
        assert not (await root.call("PurgeStatus", admin.PurgeStatusRequest())).receipts

    async def test_who_holds_it_past_the_deadline_is_parted_with(self, transport: Transport) -> None:
        acme, bystander, root = [await transport.connect(name) for name in (ACME, ACME, ROOT)]
        namespace = await open_namespace(acme)
        await acme.put(namespace, chain("a", 2))
        await get(acme, [namespace], chain("a", 2))
        receipt = await purged(root, tenant=ACME, deadline_ms=50)
        assert (receipt.state, receipt.leases_ended, receipt.sessions_ended_count) == ("complete", 1, 1)
        (left,) = (await bystander.call("Status", pb.StatusRequest())).sessions
        assert left.id != receipt.sessions_ended[0][:8]

    # ---- sessions ----

    async def test_a_session_is_killed_by_its_tenant_or_an_admin(self, transport: Transport) -> None:
        acme, watcher, rival, root = [await transport.connect(name) for name in (ACME, ACME, RIVAL, ROOT)]
        namespace = await open_namespace(acme)
        await acme.put(namespace, chain("a", 2))
        await get(acme, [namespace], chain("a", 2))
        await reserve(acme, namespace, chain("b", 1))
        sessions = (await watcher.call("Status", pb.StatusRequest())).sessions
        victim = next(session for session in sessions if session.leases)
        for client in (rival, await transport.connect(VIEWER)):
            with pytest.raises(CallFailed) as failed:
                await client.call("KillSession", admin.KillSessionRequest(session_id=victim.id))
            assert failed.value.code in (5, 7)
        killed = await watcher.call("KillSession", admin.KillSessionRequest(session_id=victim.id))
        assert (killed.leases, killed.reservations) == (1, 1)
        left = (await watcher.call("Status", pb.StatusRequest())).sessions
        assert victim.id not in [session.id for session in left]
        status: pb.StatusReply = await root.call("Status", pb.StatusRequest())
        assert (status.counters["held_leases"], status.counters["held_reservations"]) == (0, 0)
        with pytest.raises(CallFailed, match="no such session") as failed:
            await root.call("KillSession", admin.KillSessionRequest(session_id=victim.id))
        assert failed.value.code == 5

    async def test_a_session_to_kill_must_be_named(self, transport: Transport) -> None:
        root = await transport.connect(ROOT)
        for session_id in ("", "xyz", "\x00", "0" * 1000):
            with pytest.raises(CallFailed, match="no such session"):
                await root.call("KillSession", admin.KillSessionRequest(session_id=session_id))

    async def test_a_put_that_a_purge_overtakes_answers_a_miss(self, transport: Transport) -> None:
        acme, root = await transport.connect(ACME), await transport.connect(ROOT)
        namespace, blocks = await open_namespace(acme), chain("a", 1)
        reserved = await reserve(acme, namespace, blocks)
        purging = asyncio.ensure_future(purged(root, tenant=ACME))
        await asyncio.sleep(5 * POLL_S)
        request = pb.AbortRequest(reservation_id=reserved.reservation_id)
        await acme.call("Abort", request)
        assert (await purging).state == "complete"
        found = await acme.call("Contains", pb.ContainsRequest(namespace_id=namespace, **packed(blocks)))
        assert found.outcomes == bytes([2]) or not any(found.tiers)
