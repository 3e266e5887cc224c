"""The verb `hint`: what an engine knows of blocks that the daemon cannot know."""

from __future__ import annotations

from typing import Final

from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored_client.core import Core
from kvstored_client.effects import CONNECT, Verb, call
from kvstored_client.errors import FAILED_PRECONDITION, Refused
from kvstored_client.keys import Packed
from kvstored_client.namespace import Namespace
from kvstored_client.results import HintResult
from kvstored_client.terms import PutHints
from kvstored_client.verbs import leading, milliseconds, namespace_ids

HINTS: Final = "hints"  # the feature
_TTL_MS_MAX: Final = 1 << 53


class Hints(PutHints, total=False):
    """What may be said of blocks; see `Client.hint`."""

    ttl_s: float
    unpin: bool


def of_put(said: PutHints | None) -> pb.PutHints | None:
    """For the protocol. A daemon that does not know it passes over it: a hint may have no effect."""
    if not said:
        return None
    return pb.PutHints(
        priority=said.get("priority"),
        soft_pin_ms=milliseconds(said.get("soft_pin_s", 0.0)),
        hard_pin_ms=milliseconds(said.get("hard_pin_s", 0.0)),
        continues=said.get("continues", False),
        final=said.get("final", False),
    )


def hint(core: Core, namespace: Namespace, packed: Packed, said: Hints) -> Verb[HintResult]:
    """One call per part of `hashes` that a call carries."""
    connection = yield CONNECT
    if HINTS not in connection.opened.features:
        raise Refused(FAILED_PRECONDITION, "the daemon does not know hints: update it")
    (namespace_id,) = yield from namespace_ids(core, connection, [namespace])
    blocks = applied = pinned = 0
    while packed.length:
        part = leading(connection, packed)
        request = pb.HintRequest(
            namespace_id=namespace_id,
            hashes=part.data,
            hash_bytes=part.hash_bytes,
            priority=said.get("priority"),
            ttl_ms=milliseconds(said.get("ttl_s", 0.0), _TTL_MS_MAX),
            soft_pin_ms=milliseconds(said.get("soft_pin_s", 0.0)),
            hard_pin_ms=milliseconds(said.get("hard_pin_s", 0.0)),
            continues=said.get("continues", False),
            final=said.get("final", False),
            unpin=said.get("unpin", False),
        )
        reply = yield from call(connection, pb.OPERATION_HINT, request, pb.HintReply, core.timeout_s())
        blocks, applied, pinned = blocks + reply.blocks, applied + reply.applied_blocks, reply.hard_pinned_bytes
        packed = packed.part(part.length, packed.length)
    return HintResult(blocks, applied, pinned)
