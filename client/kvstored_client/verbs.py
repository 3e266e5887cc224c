"""The reading verbs, once for both clients (see `effects`).

A verb raises KVStoredClientError where the daemon is absent, late or refuses; the drivers turn
that into a miss. What a reply holds is given back in `finally`, or by `late` where it comes
after nobody waits for it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from google.protobuf.message import Message
from kvstored_proto import frames
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored_client import buffers as memory
from kvstored_client.blocks import Blocks, blocks_of, deliver, map_segments
from kvstored_client.connection import Connection
from kvstored_client.core import Core
from kvstored_client.effects import CONNECT, Verb, Work, call
from kvstored_client.errors import FAILED_PRECONDITION, Refused, Unavailable
from kvstored_client.holds import post_release
from kvstored_client.keys import UNSEEDED, Packed
from kvstored_client.namespace import Namespace
from kvstored_client.results import LookupResult, Outcome, outcome, outcomes
from kvstored_client.slots import BYTES_PER_BLOCK, Slots
from kvstored_client.terms import Asking

R = TypeVar("R", bound=Message)
DURABILITY: Final = "durability"  # the feature
TTL: Final = "ttl"  # likewise
_MILLISECONDS_MAX: Final = (1 << 32) - 1
_REPLY_BYTES_MAX: Final = frames.MAX_BODY_BYTES - 4096  # the slots of a get must fit in one frame


def milliseconds(seconds: float, most: int = _MILLISECONDS_MAX) -> int:
    """For the protocol: whole, and no more than the field holds (that of a wait 49 days).

    0 for nothing left alone: for a deadline it means that there is none.
    """
    return 0 if seconds <= 0 else max(1, round(min(seconds * 1000.0, most)))


def namespace_ids(core: Core, connection: Connection, namespaces: Sequence[Namespace]) -> Verb[list[int]]:
    """Handles in this session; opens what is not open in it yet."""
    ids = []
    for namespace in namespaces:
        reply = connection.namespaces.get(namespace.key)
        if reply is None:
            request = pb.OpenNamespaceRequest(spec=namespace.spec)
            if namespace.terms.ttl_s:
                check_knows_ttl(connection)
                request.ttl_ms, request.sliding_ttl = namespace.terms.ttl_ms, namespace.terms.sliding
            if namespace.terms.durability == "nvme":
                check_knows_durability(connection)
                request.durability = pb.DURABILITY_NVME
            reply = yield from call(
                connection, pb.OPERATION_OPEN_NAMESPACE, request, pb.OpenNamespaceReply, core.timeout_s()
            )
            connection.namespaces[namespace.key] = reply
        namespace.reply = reply
        ids.append(reply.namespace_id)
    return ids


def check_knows_durability(connection: Connection) -> None:
    """Raises Refused where the daemon would take a durable put for a plain one."""
    if DURABILITY not in connection.opened.features:
        raise Refused(FAILED_PRECONDITION, "the daemon does not know durable puts: update it, or use memory")


def check_knows_ttl(connection: Connection) -> None:
    """Raises Refused where the daemon would keep blocks beyond their TTL."""
    if TTL not in connection.opened.features:
        raise Refused(FAILED_PRECONDITION, "the daemon does not know TTLs: update it, or put without ttl_s")


def open_namespace(core: Core, namespace: Namespace) -> Verb[None]:
    """Learn its digest and seed."""
    connection = yield CONNECT
    yield from namespace_ids(core, connection, [namespace])


def check_seeded(hashes: Packed) -> None:
    """Raises Refused for hashes that were made without a seed."""
    if hashes.data.startswith(UNSEEDED):
        raise Refused(FAILED_PRECONDITION, "the hashes were made before any session was open: make them again")


def leading(connection: Connection, hashes: Packed, reply_bytes: int = 0) -> Packed:
    """As many leading hashes as one call carries and, with `reply_bytes` a block, its reply does.

    Raises Refused for hashes that were made without a seed.
    """
    check_seeded(hashes)
    limit = connection.opened.limits.max_blocks_per_call or hashes.length
    return hashes.part(0, min(limit, _REPLY_BYTES_MAX // reply_bytes) if reply_bytes else limit)


def lookup(core: Core, namespaces: Sequence[Namespace], hashes: Packed, asking: Asking) -> Verb[LookupResult]:
    """How long the prefix is. Of more hashes than one call carries, the leading ones are asked for."""
    connection = yield CONNECT
    ids = yield from namespace_ids(core, connection, namespaces)
    asked = leading(connection, hashes)
    request = pb.LookupRequest(namespace_ids=ids, hashes=asked.data, hash_bytes=asked.hash_bytes)
    if asking.prefill_tokens_per_s:
        request.prefill_tokens_per_s = asking.prefill_tokens_per_s
    if asking.prefetch:
        request.prefetch, request.prefetch_deadline_ms = True, milliseconds(asking.prefetch_deadline_s)
    reply = yield from call(connection, pb.OPERATION_LOOKUP, request, pb.LookupReply, core.timeout_s())
    return LookupResult(
        reply.prefix_blocks,
        reply.ready_blocks,
        reply.dram_blocks,
        reply.nvme_blocks,
        reply.pending_blocks,
        outcome(reply.next),
        reply.load_s,
        reply.recompute_s,
        # Without an estimate (none was asked for, or an older daemon knows none) loading is taken to pay.
        min(reply.paying_blocks, reply.prefix_blocks) if reply.recompute_s else reply.prefix_blocks,
        reply.queued_blocks,
        reply.prefetch_id,
    )


def contains(core: Core, namespace: Namespace, hashes: Packed) -> Verb[list[Outcome]]:
    """One outcome per hash."""
    answers = yield from _in_parts(core, namespace, hashes, pb.OPERATION_CONTAINS, pb.ContainsRequest, pb.ContainsReply)
    found = [each for reply in answers for each in outcomes(reply.outcomes)]
    if len(found) != hashes.length:
        raise Unavailable(f"{len(found)} outcomes for {hashes.length} blocks")
    return found


def touch(core: Core, namespace: Namespace, hashes: Packed) -> Verb[int]:
    """How many blocks were there to be marked as used."""
    answers = yield from _in_parts(core, namespace, hashes, pb.OPERATION_TOUCH, pb.TouchRequest, pb.TouchReply)
    return sum(reply.touched for reply in answers)


def delete(core: Core, namespace: Namespace, hashes: Packed) -> Verb[int]:
    """How many blocks were there and are gone."""
    answers = yield from _in_parts(core, namespace, hashes, pb.OPERATION_DELETE, pb.DeleteRequest, pb.DeleteReply)
    return sum(reply.deleted for reply in answers)


def _in_parts(
    core: Core,
    namespace: Namespace,
    hashes: Packed,
    operation: int,
    request_type: Callable[..., Message],
    reply_type: type[R],
) -> Verb[list[R]]:
    """One call per part of `hashes` that a call carries."""
    connection = yield CONNECT
    (namespace_id,) = yield from namespace_ids(core, connection, [namespace])
    replies: list[R] = []
    while hashes.length:
        part = leading(connection, hashes)
        request = request_type(namespace_id=namespace_id, hashes=part.data, hash_bytes=part.hash_bytes)
        replies.append((yield from call(connection, operation, request, reply_type, core.timeout_s())))
        hashes = hashes.part(part.length, hashes.length)
    return replies


# ---- get ----


def _hold(
    core: Core, connection: Connection, namespaces: Sequence[Namespace], hashes: Packed, wait_s: float
) -> Verb[pb.GetReply]:
    """Take leases on the leading blocks."""
    ids = yield from namespace_ids(core, connection, namespaces)
    asked = leading(connection, hashes, BYTES_PER_BLOCK * len(namespaces))
    request = pb.GetRequest(
        namespace_ids=ids, hashes=asked.data, hash_bytes=asked.hash_bytes, wait_ms=milliseconds(wait_s)
    )
    late = partial(_release_late, connection)
    reply = yield from call(connection, pb.OPERATION_GET, request, pb.GetReply, core.timeout_s(wait_s), late)
    if reply.next == pb.OUTCOME_THROTTLED:
        core.stats.throttled += 1
    if reply.blocks > asked.length:
        _release(connection, reply)
        raise Unavailable(f"a get of {asked.length} blocks was answered with {reply.blocks}")
    return reply


def _release_late(connection: Connection, body: bytes) -> None:
    _release(connection, pb.GetReply.FromString(body))


def _release(connection: Connection, reply: pb.GetReply) -> None:
    if reply.leases:
        post_release(connection, [lease.lease_id for lease in reply.leases])


def _checked_slots(core: Core, reply: pb.GetReply, shards: int) -> list[Slots]:
    """The slots of each lease. Raises Unavailable where the reply contradicts itself."""
    slots = [core.known_slots.of(lease) for lease in reply.leases]
    if reply.blocks and (len(slots) != shards or any(len(each) != reply.blocks for each in slots)):
        raise Unavailable(f"a get of {shards} namespaces was answered with {[len(s) for s in slots]} slots")
    return slots if reply.blocks else []


def get(core: Core, namespaces: Sequence[Namespace], hashes: Packed, wait_s: float) -> Verb[Blocks]:
    """Hold the leading blocks."""
    connection = yield CONNECT
    if connection.carrier is not None:
        raise Refused(FAILED_PRECONDITION, "this session shares no memory with the daemon: use get_into")
    reply = yield from _hold(core, connection, namespaces, hashes, wait_s)
    return (yield from _to_blocks(core, connection, reply, len(namespaces)))


def attach(core: Core, lease_id: int) -> Verb[Blocks]:
    """Use a lease that another session of the group took."""
    connection = yield CONNECT
    request = pb.AttachRequest(lease_id=lease_id)
    late = partial(_release_late, connection)
    reply = yield from call(connection, pb.OPERATION_ATTACH, request, pb.GetReply, core.timeout_s(), late)
    return (yield from _to_blocks(core, connection, reply, len(reply.leases)))


def _to_blocks(core: Core, connection: Connection, reply: pb.GetReply, shards: int) -> Verb[Blocks]:
    kept = False
    try:
        slots = _checked_slots(core, reply, shards)
        if not slots:
            return Blocks(None, [], outcome(reply.next))
        fresh = connection.segments.unmapped_bytes(set().union(*(each.segment_ids for each in slots)))
        blocks = yield Work(partial(blocks_of, connection, reply, slots), fresh)
        kept = True
    finally:
        if not kept:
            _release(connection, reply)
    _count_delivery(core, slots, sum(each.size_bytes for each in slots))
    return blocks  # type: ignore[no-any-return]


def get_into(
    core: Core,
    namespaces: Sequence[Namespace],
    hashes: Packed,
    targets: Sequence[memory.Place],
    wait_s: float,
) -> Verb[int]:
    """Copy the leading blocks out; how many were delivered, 0 where the session ended during the copy."""
    connection = yield CONNECT
    if connection.carrier is not None:
        from kvstored_client import inline

        return (yield from inline.get_into(core, connection, namespaces, hashes, targets, wait_s))
    reply = yield from _hold(core, connection, namespaces, hashes, wait_s)
    try:
        slots = _checked_slots(core, reply, len(namespaces))
        if not slots:
            return 0
        size_bytes = sum(each.size_bytes for each in slots)
        yield Work(partial(_copy_out, connection, slots, targets), size_bytes)
        # Asked before the release, after the last byte: a yes means that every byte was under the lease.
        if not connection.alive():
            core.stats.deliveries_lost += 1
            return 0
    finally:
        _release(connection, reply)
    _count_delivery(core, slots, size_bytes)
    return reply.blocks


def _copy_out(connection: Connection, slots: list[Slots], targets: Sequence[memory.Place]) -> None:
    for each, place in zip(slots, targets, strict=True):
        mappings = map_segments(connection.segments, each)  # held while we copy
        deliver(each, mappings, place)


def _count_delivery(core: Core, slots: list[Slots], size_bytes: int) -> None:
    core.stats.blocks_delivered += sum(map(len, slots))
    core.stats.bytes_delivered += size_bytes


# ---- admin ----


def ask(core: Core, operation: int, request: Message, reply_type: type[R], timeout_s: float | None) -> Verb[R]:
    """Any operation, for tools."""
    connection: Any = yield CONNECT
    limit_s = core.settings.timeout_s if timeout_s is None else timeout_s
    return (yield from call(connection, operation, request, reply_type, limit_s))
