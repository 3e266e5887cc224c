"""The contract of bad input: the documented code, nothing changed, and the session goes on; see `contract`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
from google.protobuf.message import Message
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.store.outcomes import HIT, RESERVED
from kvstored.testing.contract_client import (
    ROOT,
    CallFailed,
    Transport,
    chain,
    commit,
    contains,
    get,
    held,
    open_namespace,
    packed,
    reserve,
)

INVALID: Final = 3
NOT_FOUND: Final = 5
HASH: Final = bytes(32)
ONE: Final[dict[str, Any]] = {"hashes": HASH, "hash_bytes": 32}
# Every way to name hashes wrongly.
BAD_HASHES: Final[list[dict[str, Any]]] = [
    {},
    {"hashes": b"", "hash_bytes": 32},
    {"hashes": HASH, "hash_bytes": 0},
    {"hashes": bytes(7), "hash_bytes": 7},
    {"hashes": bytes(65), "hash_bytes": 65},
    {"hashes": HASH + b"x", "hash_bytes": 32},
    {"hashes": bytes(8 * 8193), "hash_bytes": 8},
]
# Operations that take hashes, and how each names its namespaces.
WITH_HASHES: Final[list[tuple[str, Callable[..., Message]]]] = [
    ("Lookup", lambda ns, **f: pb.LookupRequest(namespace_ids=[ns], **f)),
    ("Contains", lambda ns, **f: pb.ContainsRequest(namespace_id=ns, **f)),
    ("Reserve", lambda ns, **f: pb.ReserveRequest(namespace_id=ns, block_bytes=4096, **f)),
    ("Get", lambda ns, **f: pb.GetRequest(namespace_ids=[ns], **f)),
    ("Prefetch", lambda ns, **f: pb.PrefetchRequest(namespace_ids=[ns], **f)),
    ("Touch", lambda ns, **f: pb.TouchRequest(namespace_id=ns, **f)),
    ("Delete", lambda ns, **f: pb.DeleteRequest(namespace_id=ns, **f)),
]
# The rest: method, request in namespace 1, code.
REFUSED: Final[list[tuple[str, Message, int]]] = [
    ("Lookup", pb.LookupRequest(**ONE), INVALID),
    ("Lookup", pb.LookupRequest(namespace_ids=[1] * 65, **ONE), INVALID),
    ("Lookup", pb.LookupRequest(namespace_ids=[1], prefill_tokens_per_s=-1.0, **ONE), INVALID),
    ("Lookup", pb.LookupRequest(namespace_ids=[1], prefill_tokens_per_s=float("nan"), **ONE), INVALID),
    ("Get", pb.GetRequest(**ONE), INVALID),
    ("Get", pb.GetRequest(namespace_ids=[1] * 64, hashes=bytes(8 * 8192), hash_bytes=8), INVALID),
    ("Prefetch", pb.PrefetchRequest(**ONE), INVALID),
    ("Reserve", pb.ReserveRequest(namespace_id=1, **ONE), INVALID),
    ("Reserve", pb.ReserveRequest(namespace_id=1, block_bytes=(16 << 20) + 1, **ONE), INVALID),
    ("Reserve", pb.ReserveRequest(namespace_id=1, block_bytes=4096, sizes_bytes=[4096], **ONE), INVALID),
    ("Reserve", pb.ReserveRequest(namespace_id=1, sizes_bytes=[4096, 4096], **ONE), INVALID),
    ("Reserve", pb.ReserveRequest(namespace_id=1, sizes_bytes=[0], **ONE), INVALID),
    ("Reserve", pb.ReserveRequest(namespace_id=1, block_bytes=1, parent=b"short", **ONE), INVALID),
    ("Reserve", pb.ReserveRequest(namespace_id=1, block_bytes=1, hashes=HASH * 2, hash_bytes=32), INVALID),
    ("Commit", pb.CommitRequest(reservation_id=77, indices=[0], staging_offsets=[0]), NOT_FOUND),
    ("Abort", pb.AbortRequest(reservation_id=77), NOT_FOUND),
    ("Attach", pb.AttachRequest(lease_id=77), NOT_FOUND),
    ("PollPrefetch", pb.PollPrefetchRequest(prefetch_id=77), NOT_FOUND),
    ("CancelPrefetch", pb.CancelPrefetchRequest(prefetch_id=77), NOT_FOUND),
    ("OpenNamespace", pb.OpenNamespaceRequest(), INVALID),
    ("ListBlocks", admin.ListBlocksRequest(namespace_digest=bytes(16)), NOT_FOUND),
    ("Explain", admin.ExplainRequest(hash=b"short"), INVALID),
    ("Explain", admin.ExplainRequest(hash=bytes(65)), INVALID),
    ("Explain", admin.ExplainRequest(hash=HASH, namespace_digest=bytes(16)), NOT_FOUND),
]
# Wrong commits of a reservation of three blocks, of which the first is committed already: indices, offsets.
BAD_COMMITS: Final[list[tuple[list[int], list[int]]]] = [
    ([], []),
    ([1], []),
    ([1], [0, 0]),
    ([0], [0]),
    ([1, 1], [0, 0]),
    ([3], [0]),
    ([1], [1 << 20]),
    ([1], [(1 << 20) - 4096]),
    ([1, 2], [0, (1 << 64) - 4096]),
]


class ErrorContract:
    """Inherit, and provide the fixture `transport`."""

    @pytest.mark.parametrize(("method", "request_"), WITH_HASHES, ids=[name for name, _ in WITH_HASHES])
    async def test_hashes_and_namespaces_out_of_bounds_are_refused(
        self, transport: Transport, method: str, request_: Callable[..., Message]
    ) -> None:
        calls = [(method, request_(1, **fields), INVALID) for fields in BAD_HASHES]
        calls += [(method, request_(namespace, **ONE), NOT_FOUND) for namespace in (0, 2, 2**32 - 1)]
        await self._refused(transport, calls)

    async def test_bad_input_is_refused(self, transport: Transport) -> None:
        await self._refused(transport, REFUSED)

    async def _refused(self, transport: Transport, calls: Sequence[tuple[str, Message, int]]) -> None:
        """Each fails with its code and a sentence, nothing is held, and the session is as good as before."""
        client, root = await transport.connect(), await transport.connect(ROOT)
        namespace = await open_namespace(client)
        before = await held(root)
        for method, request, code in calls:
            with pytest.raises(CallFailed) as failed:
                await client.call(method, request)
            assert (failed.value.code, bool(failed.value.message)) == (code, True), (method, str(request))
        assert await held(root) == before
        blocks = chain("a", 1)
        assert await client.put(namespace, blocks) == bytes([HIT])
        assert (await get(client, [namespace], blocks)).blocks == 1

    async def test_a_bad_commit_changes_nothing(self, transport: Transport) -> None:
        client = await transport.connect(staging_bytes=1 << 20)
        if not client.shares_memory:
            pytest.skip("bytes travel inline here")
        namespace = await open_namespace(client)
        blocks = chain("a", 3)
        id_ = (await reserve(client, namespace, blocks)).reservation_id
        assert await commit(client, id_, blocks, [0]) == bytes([HIT])
        for indices, offsets in BAD_COMMITS:
            request = pb.CommitRequest(reservation_id=id_, indices=indices, staging_offsets=offsets)
            with pytest.raises(CallFailed) as failed:
                await client.call("Commit", request)
            assert failed.value.code == INVALID, (indices, offsets)
        assert await commit(client, id_, blocks, [1, 2]) == bytes([HIT, HIT])
        assert await client.read(namespace, [b.hash for b in blocks]) == [b.data for b in blocks]

    async def test_a_commit_without_staging_is_refused(self, transport: Transport) -> None:
        client = await transport.connect(staging_bytes=0)
        namespace = await open_namespace(client)
        reserved = await reserve(client, namespace, chain("a", 1))
        request = pb.CommitRequest(reservation_id=reserved.reservation_id, indices=[0], staging_offsets=[0])
        with pytest.raises(CallFailed, match="staging") as failed:
            await client.call("Commit", request)
        assert failed.value.code == INVALID
        await client.call("Abort", pb.AbortRequest(reservation_id=reserved.reservation_id, indices=[0]))

    async def test_an_abort_of_what_is_not_reserved_changes_nothing(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await open_namespace(client)
        blocks = chain("a", 2)
        reserved = await reserve(client, namespace, blocks)
        for indices in ([2], [0, 0], [0, 5]):
            with pytest.raises(CallFailed) as failed:
                await client.call("Abort", pb.AbortRequest(reservation_id=reserved.reservation_id, indices=indices))
            assert failed.value.code == INVALID
        assert (await reserve(client, namespace, blocks)).reservation_id == 0

    async def test_reservations_are_limited(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await open_namespace(client)
        for i in range(client.opened.limits.max_reservations):
            assert (await reserve(client, namespace, chain(f"{i}", 1, 4096))).outcomes == bytes([RESERVED])
        with pytest.raises(CallFailed, match="reservations") as failed:
            await reserve(client, namespace, chain("more", 1, 4096))
        assert failed.value.code == 8

    async def test_unknown_leases_are_passed_over(self, transport: Transport) -> None:
        client = await transport.connect()
        assert (await client.call("Release", pb.ReleaseRequest(lease_ids=[1, 2, 2**64 - 1]))).released == 0

    async def test_asking_for_the_most_blocks_in_one_call_is_answered(self, transport: Transport) -> None:
        client = await transport.connect()
        namespace = await open_namespace(client)
        count = client.opened.limits.max_blocks_per_call
        blocks = chain("a", count, 1)
        reply = await client.call("Lookup", pb.LookupRequest(namespace_ids=[namespace], **packed(blocks)))
        assert reply.prefix_blocks == 0
        assert len(await contains(client, namespace, blocks)) == count
