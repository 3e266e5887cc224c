"""Stores by the daemon's device worker (`cuda_ipc`), once for both clients; see `device_verbs`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored_client.chains import Chain
from kvstored_client.connection import Connection
from kvstored_client.core import Core
from kvstored_client.device_verbs import (
    CANCEL_TIMEOUT_S,
    LAYERS,
    DeviceMemory,
    give_back_words,
    give_up,
    hurrying,
    layers_told,
    number_of,
    packed_ids,
)
from kvstored_client.effects import CONNECT, Sleep, Verb, finish
from kvstored_client.errors import FAILED_PRECONDITION, FAILURES, KVStoredClientError, Refused, failure_of
from kvstored_client.hinting import of_put
from kvstored_client.putting import first_to_retry
from kvstored_client.results import Outcome, PutResult, outcomes
from kvstored_client.tickets import Ticket
from kvstored_client.verbs import check_knows_ttl, leading, milliseconds, namespace_ids
from kvstored_client.writing import DURABILITIES, DURABLE_TIMEOUT_S

PAUSE_S: Final = 0.005  # before a store is tried again


def _request(
    core: Core, memory: DeviceMemory, connection: Connection, chain: Chain, start: int, wait_s: float
) -> Verb[tuple[pb.StoreRequest, int]]:
    """For as many blocks from `start` on as one call carries, and how many these are. Raises Refused."""
    terms = chain.terms
    if terms.ttl_s:
        check_knows_ttl(connection)
    if chain.deadline.limited and LAYERS not in connection.opened.features:
        raise Refused(FAILED_PRECONDITION, "the daemon does not know deadlines: update it")
    number = yield from number_of(connection, memory, core.timeout_s())
    (namespace_id,) = yield from namespace_ids(core, connection, [chain.namespace])
    part = leading(connection, chain.hashes.part(start, chain.hashes.length))
    request = pb.StoreRequest(
        registration_id=number,
        namespace_id=namespace_id,
        hashes=part.data,
        hash_bytes=part.hash_bytes,
        block_ids=packed_ids(chain.ids[start : start + part.length]),
        parent=chain.hashes.one(start - 1) if start else chain.parent,
        wait_ms=milliseconds(wait_s),
        durability=DURABILITIES[terms.durability],
        ttl_ms=terms.ttl_ms,
        sliding_ttl=terms.sliding,
        hints=of_put(terms.hint),
        transfer_id=next(core.transfers),
        deadline_ms=chain.deadline.milliseconds_left,
    )
    return request, part.length


def _answer_s(core: Core, chain: Chain, wait_s: float) -> float:
    return core.timeout_s(wait_s) + (DURABLE_TIMEOUT_S if chain.durable else 0.0)


def _count(core: Core, memory: DeviceMemory, chain: Chain, reply: pb.StoreReply) -> int:
    """How many blocks were written."""
    count = reply.written.count(1)
    core.stats.blocks_stored += count
    core.stats.bytes_stored += count * memory.kv.block_bytes * chain.ids.shape[1]
    if reply.error:
        core.stats.transfers_failed += 1
        memory.reason = reply.error
    return count


def _reply(core: Core, connection: Connection, ticket: Ticket, transfer_id: int, limit_s: float) -> Verb[pb.StoreReply]:
    """Wait for the end; where that is given up, until no copy runs any more."""
    try:
        return (yield from finish(connection, ticket, pb.StoreReply, limit_s, hurrying(connection, transfer_id)))
    except FAILURES as error:
        yield from give_up(connection, transfer_id, failure_of(error))
        raise


def store(core: Core, memory: DeviceMemory, chain: Chain, wait_s: float) -> Verb[PutResult]:
    """Store the engine's blocks, throttled ones again while `wait_s` lasts; what was stored before a failure counts.

    A call that is under way at its deadline is given up, and what it was to store with it.
    """
    final = [Outcome.MISS] * chain.hashes.length
    written = start = 0
    deadline_s = time.monotonic() + chain.deadline.left_s(wait_s)
    failure: KVStoredClientError | None = None
    try:
        while start < chain.hashes.length:
            connection = yield CONNECT
            left_s = deadline_s - time.monotonic()
            request, count = yield from _request(core, memory, connection, chain, start, left_s)
            ticket = connection.start(pb.OPERATION_STORE, request)
            reply = yield from _reply(core, connection, ticket, request.transfer_id, _answer_s(core, chain, wait_s))
            final[start : start + count] = outcomes(reply.outcomes)[:count]
            written += _count(core, memory, chain, reply)
            if reply.error:
                break
            again = first_to_retry(core, final[start : start + count])
            start += count if again is None else again
            if again is not None:
                pause_s = max(PAUSE_S, reply.retry_after_ms / 1000.0)
                if time.monotonic() + pause_s > deadline_s:
                    break
                yield Sleep(pause_s)
    except FAILURES as error:
        failure = core.failed_open(error)
    return PutResult.of(final, written, durable=chain.durable, error=failure)


# ---- by layers ----


@dataclass(frozen=True, slots=True)
class Started:
    """A store by layers that was asked for: see `layers.StoreBegun`."""

    core: Core
    memory: DeviceMemory
    chain: Chain
    connection: Connection
    ticket: Ticket
    transfer_id: int
    layers_word: int
    words: list[int]  # this, until it is given back
    wait_s: float

    def ready(self, layers: int) -> None:
        """Say that so many layers may be copied: a message that nobody waits for."""
        self.connection.post(
            pb.OPERATION_STORE_LAYERS, pb.StoreLayersRequest(transfer_id=self.transfer_id, layers=layers)
        )

    def copied(self) -> tuple[int, int]:
        """How many blocks are copied, and how many layers of them are."""
        return layers_told(self.connection, self.layers_word, self.transfer_id)

    def finish(self, *, cancel: bool) -> Verb[PutResult]:
        """Its result, once nothing of it runs any more; `cancel` ends it before all layers are copied."""
        core, connection, chain = self.core, self.connection, self.chain
        final, written = [Outcome.MISS] * chain.hashes.length, 0
        failure: KVStoredClientError | None = None
        try:
            limit_s = _answer_s(core, chain, self.wait_s)
            if cancel:
                hurrying(connection, self.transfer_id)()
                limit_s = max(limit_s, CANCEL_TIMEOUT_S)
            reply = yield from _reply(core, connection, self.ticket, self.transfer_id, limit_s)
            found = outcomes(reply.outcomes)
            final[: len(found)] = found
            written = _count(core, self.memory, chain, reply)
        except FAILURES as error:
            failure = core.failed_open(error)
        finally:  # closed while it waits, too
            give_back_words(connection, self.ticket, self.words)
        return PutResult.of(final, written, durable=chain.durable, error=failure)


def start_store(core: Core, memory: DeviceMemory, chain: Chain, wait_s: float) -> Verb[Started]:
    """Ask for a store of as many leading blocks as one call carries; its `finish` must follow."""
    connection = yield CONNECT
    if LAYERS not in connection.opened.features:
        raise Refused(FAILED_PRECONDITION, "the daemon does not know layers: update it")
    request, _ = yield from _request(core, memory, connection, chain, 0, wait_s)
    request.by_layers = True
    request.layers_word = connection.page.take_word() if connection.page is not None else 0
    ticket = connection.start(pb.OPERATION_STORE, request)
    told = (request.transfer_id, request.layers_word, [request.layers_word])
    return Started(core, memory, chain, connection, ticket, *told, wait_s)
