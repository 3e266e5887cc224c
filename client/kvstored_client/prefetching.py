"""The prefetch verbs: start, poll, cancel. Once for both clients (see `effects`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from google.protobuf.message import Message
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored_client.connection import Connection
from kvstored_client.core import Core
from kvstored_client.effects import CONNECT, Verb, call
from kvstored_client.errors import Refused
from kvstored_client.keys import Packed
from kvstored_client.namespace import Namespace
from kvstored_client.results import Outcome, PrefetchStatus, outcome
from kvstored_client.verbs import leading, milliseconds, namespace_ids

_NOT_FOUND: Final = 5


@dataclass(frozen=True, slots=True)
class Started:
    """A prefetch as the daemon took it."""

    connection: Connection | None = None
    prefetch_id: int = 0  # 0: nothing runs
    outcome: Outcome = Outcome.MISS  # HIT: all resident; PENDING: started; MISS; THROTTLED
    resident_blocks: int = 0
    queued_blocks: int = 0

    @property
    def unknown(self) -> PrefetchStatus:
        """The status where the daemon does not say: not done, as far as is known."""
        return PrefetchStatus(False, 0, 0, self.queued_blocks)

    @property
    def settled(self) -> PrefetchStatus | None:
        """The status where no question is needed: nothing was started, or its session has ended."""
        if not self.prefetch_id:
            return PrefetchStatus()
        if self.connection is None or not self.connection.alive():
            return PrefetchStatus(True, 0, self.queued_blocks, self.queued_blocks)
        return None


def start(
    core: Core, namespaces: Sequence[Namespace], hashes: Packed, priority: int, deadline_s: float
) -> Verb[Started]:
    """Ask for blocks to be brought to DRAM."""
    connection = yield CONNECT
    ids = yield from namespace_ids(core, connection, namespaces)
    asked = leading(connection, hashes)
    request = pb.PrefetchRequest(
        namespace_ids=ids,
        hashes=asked.data,
        hash_bytes=asked.hash_bytes,
        deadline_ms=milliseconds(deadline_s),
        priority=priority,
    )
    late = partial(_cancel_late, connection)
    reply = yield from call(connection, pb.OPERATION_PREFETCH, request, pb.PrefetchReply, core.timeout_s(), late)
    if reply.outcome == pb.OUTCOME_THROTTLED:
        core.stats.throttled += 1
    return Started(connection, reply.prefetch_id, outcome(reply.outcome), reply.resident_blocks, reply.queued_blocks)


def _cancel_late(connection: Connection, body: bytes) -> None:
    prefetch_id = pb.PrefetchReply.FromString(body).prefetch_id
    if prefetch_id:
        connection.post(pb.OPERATION_CANCEL_PREFETCH, pb.CancelPrefetchRequest(prefetch_id=prefetch_id))


def poll(core: Core, started: Started, wait_s: float) -> Verb[PrefetchStatus]:
    """Progress; answered when done, or after `wait_s`."""
    request = pb.PollPrefetchRequest(prefetch_id=started.prefetch_id, wait_ms=milliseconds(wait_s))
    return (yield from _ask(core, started, pb.OPERATION_POLL_PREFETCH, request, wait_s))


def cancel(core: Core, started: Started) -> Verb[PrefetchStatus]:
    """End it; answered when no copy of it runs any more."""
    request = pb.CancelPrefetchRequest(prefetch_id=started.prefetch_id)
    return (yield from _ask(core, started, pb.OPERATION_CANCEL_PREFETCH, request, 0.0))


def cancel_lookup(core: Core, prefetch_id: int) -> Verb[PrefetchStatus]:
    """Drop what of a lookup's prefetch is queued. One that is done, or was another session's, is forgotten already."""
    if not prefetch_id:
        return PrefetchStatus()
    connection = yield CONNECT
    request = pb.CancelPrefetchRequest(prefetch_id=prefetch_id)
    try:
        reply = yield from call(
            connection, pb.OPERATION_CANCEL_PREFETCH, request, pb.PollPrefetchReply, core.timeout_s()
        )
    except Refused as refusal:
        if refusal.code != _NOT_FOUND:
            raise
        return PrefetchStatus()
    return PrefetchStatus(reply.done, reply.ready_blocks, reply.failed_blocks, reply.total_blocks)


def _ask(core: Core, started: Started, operation: int, request: Message, wait_s: float) -> Verb[PrefetchStatus]:
    settled = started.settled
    if settled is not None or started.connection is None:
        return settled or PrefetchStatus()
    reply = yield from call(started.connection, operation, request, pb.PollPrefetchReply, core.timeout_s(wait_s))
    return PrefetchStatus(reply.done, reply.ready_blocks, reply.failed_blocks, reply.total_blocks)
