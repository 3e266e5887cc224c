"""Reading and putting blocks inside of messages (`inline`), for sessions without shared memory; see `bridge`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, cast

import xxhash
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored_client import buffers as memory
from kvstored_client import hinting, verbs
from kvstored_client.bridge import Bridge
from kvstored_client.connection import Connection
from kvstored_client.core import Core
from kvstored_client.deadline import Deadline
from kvstored_client.effects import Verb, Work
from kvstored_client.errors import Unavailable
from kvstored_client.hinting import Hints
from kvstored_client.keys import Packed
from kvstored_client.namespace import Namespace
from kvstored_client.putting import Put
from kvstored_client.results import Outcome, outcomes
from kvstored_client.writing import DURABILITIES, DURABLE_TIMEOUT_S

CHUNK_BYTES: Final = 1 << 20  # of a block, in one message
SLOWEST_BYTES_PER_S: Final = 8 << 20  # on top of the usual limit of a call: so much a second comes over a slow link


def get_into(
    core: Core,
    connection: Connection,
    namespaces: Sequence[Namespace],
    hashes: Packed,
    targets: Sequence[memory.Place],
    wait_s: float,
) -> Verb[int]:
    """Copy the leading blocks out; how many came of all namespaces."""
    ids = yield from verbs.namespace_ids(core, connection, namespaces)
    asked = verbs.leading(connection, hashes)
    came = asked.length
    for namespace_id, place in zip(ids, targets, strict=True):
        asked = asked.part(0, came)
        if not came:
            return 0
        request = pb.GetInlineRequest(
            namespace_id=namespace_id,
            hashes=asked.data,
            hash_bytes=asked.hash_bytes,
            wait_ms=verbs.milliseconds(wait_s),
        )
        size_bytes = sum(place.sizes_bytes[:came])
        limit_s = core.timeout_s(wait_s) + size_bytes / SLOWEST_BYTES_PER_S
        came = yield Work(partial(_receive, bridge_of(connection), request, place, limit_s), size_bytes)
    core.stats.blocks_delivered += came * len(namespaces)
    core.stats.bytes_delivered += sum(sum(place.sizes_bytes[:came]) for place in targets)
    return came


def _receive(bridge: Bridge, request: pb.GetInlineRequest, place: memory.Place, timeout_s: float) -> int:
    """How many leading blocks came whole. Raises ValueError for one of another size than its buffer."""
    whole, block = 0, bytearray()
    for reply in bridge.get(request, timeout_s):
        if whole == len(place.sizes_bytes):
            raise Unavailable(f"more than the {whole} blocks that were asked for")
        wanted = place.sizes_bytes[whole]
        if reply.size_bytes != wanted:
            raise ValueError(f"block {whole} has {reply.size_bytes} bytes, its buffer {wanted}")
        block += reply.chunk
        if len(block) < wanted:
            continue
        if len(block) > wanted or xxhash.xxh3_128_digest(block) != reply.content_hash:
            raise Unavailable(f"block {whole} is not what was stored")
        held = (ctypes.c_ubyte * wanted).from_buffer(block)
        place.write(whole, 1, ctypes.addressof(held), wanted)
        whole, block = whole + 1, bytearray()
    return whole


def put(
    asked: Put,
    connection: Connection,
    hashes: Packed,
    source: memory.Place,
    parent: bytes,
    final: list[Outcome],
) -> Verb[int]:
    """Store a part of a put, and say in `final` what became of each; how many were written.

    Those that are not stored yet; where its deadline passes, what was sent before.
    """
    core, namespace, terms = asked.core, asked.namespace, asked.terms
    durable = terms.want_nvme(namespace.terms)
    if durable:
        verbs.check_knows_durability(connection)
    if terms.ttl_s:
        verbs.check_knows_ttl(connection)
    verbs.check_seeded(hashes)
    if not durable:  # else what is there may have to be written below
        final[:] = yield from verbs.contains(core, namespace, hashes)
    (namespace_id,) = yield from verbs.namespace_ids(core, connection, [namespace])
    header = pb.PutInlineHeader(
        namespace_id=namespace_id,
        durability=DURABILITIES[terms.durability or namespace.terms.durability],
        ttl_ms=terms.ttl_ms,
        sliding_ttl=terms.sliding,
    )
    missing = [i for i, each in enumerate(final) if each is Outcome.MISS]
    written = 0
    if missing:
        blocks = _requests(header, hashes, missing, source, parent, asked.deadline)
        size_bytes = sum(source.sizes_bytes[i] for i in missing)
        outcomes_of = yield from _sent(core, connection, blocks, size_bytes, durable)
        for i, each in zip(missing, outcomes_of, strict=False):
            final[i] = each
            written += each in (Outcome.HIT, Outcome.NOT_DURABLE)
            core.stats.bytes_stored += source.sizes_bytes[i] * (each is Outcome.HIT)
        core.stats.blocks_stored += written
    if terms.hint:  # of what is stored already too, which is not in the stream
        yield from hinting.hint(core, namespace, hashes, cast(Hints, terms.hint))
    return written


def _sent(
    core: Core, connection: Connection, blocks: Iterator[pb.PutInlineRequest], size_bytes: int, durable: bool
) -> Verb[list[Outcome]]:
    """One stream; what became of each block."""
    limit_s = core.timeout_s() + size_bytes / SLOWEST_BYTES_PER_S + (DURABLE_TIMEOUT_S if durable else 0.0)
    reply = yield Work(partial(bridge_of(connection).put, blocks, limit_s), size_bytes)
    return outcomes(reply.outcomes)


def _requests(
    header: pb.PutInlineHeader,
    hashes: Packed,
    indices: Sequence[int],
    source: memory.Place,
    parent: bytes,
    deadline: Deadline,
) -> Iterator[pb.PutInlineRequest]:
    """Of each block its header, then its bytes, until the deadline; one is in memory at a time."""
    for i in indices:
        if deadline.passed():
            return
        header.hash, header.parent = hashes.one(i), hashes.one(i - 1) if i else parent
        header.size_bytes = source.sizes_bytes[i]
        yield pb.PutInlineRequest(header=header)
        block = bytearray(header.size_bytes)
        source.read([i], [ctypes.addressof((ctypes.c_ubyte * len(block)).from_buffer(block))])
        for start in range(0, len(block), CHUNK_BYTES):
            yield pb.PutInlineRequest(chunk=bytes(block[start : start + CHUNK_BYTES]))


def bridge_of(connection: Connection) -> Bridge:
    """What carries the session. Raises Unavailable where it has shared memory."""
    if not isinstance(connection.carrier, Bridge):
        raise Unavailable("this session has shared memory")
    return connection.carrier
