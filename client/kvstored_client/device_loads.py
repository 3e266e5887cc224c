"""Loads by the daemon's device worker (`cuda_ipc`), once for both clients; see `device_verbs`."""

from __future__ import annotations

from dataclasses import dataclass

from kvstored_proto.layout import Indices
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored_client.connection import Connection
from kvstored_client.core import Core
from kvstored_client.device_verbs import (
    LAYERS,
    DeviceMemory,
    give_back_words,
    give_up,
    hurrying,
    layers_told,
    number_of,
    packed_ids,
)
from kvstored_client.effects import CONNECT, Verb, finish
from kvstored_client.errors import FAILED_PRECONDITION, FAILURES, Refused, failure_of
from kvstored_client.keys import Packed
from kvstored_client.layers import How
from kvstored_client.namespace import Namespace
from kvstored_client.paged import PagedKV
from kvstored_client.tickets import Ticket
from kvstored_client.verbs import leading, milliseconds, namespace_ids


@dataclass(frozen=True, slots=True)
class Started:
    """A load that was asked for, and where it is told that it has ended: see `layers.LoadBegun`."""

    core: Core
    memory: DeviceMemory
    connection: Connection
    ticket: Ticket
    transfer_id: int
    word: int
    layers_word: int
    words: list[int]  # both, until they are given back
    blocks: int
    block_bytes: int
    wait_s: float

    def ended(self) -> bool:
        """Whether no copy of it runs any more: a look into memory, no system call while it runs."""
        page = self.connection.page
        if page is None or self.connection.error is not None:
            return True
        if not self.word:  # all words are in use
            self.connection.poke()
            return self.ticket.done
        return page.ended(self.word, self.transfer_id)

    def arrived(self) -> tuple[int, int]:
        """How many blocks it brings, and how many layers of them are in place."""
        return layers_told(self.connection, self.layers_word, self.transfer_id)

    def finish(self) -> Verb[int]:
        """How many leading blocks were copied; waits for the end."""
        core, connection = self.core, self.connection
        hurry = hurrying(connection, self.transfer_id)
        try:
            reply = yield from finish(connection, self.ticket, pb.LoadReply, core.timeout_s(self.wait_s), hurry)
        except FAILURES as error:
            yield from give_up(connection, self.transfer_id, failure_of(error))
            raise
        finally:  # closed while it waits, too
            give_back_words(connection, self.ticket, self.words)
        core.stats.blocks_delivered += reply.blocks
        core.stats.bytes_delivered += reply.blocks * self.block_bytes
        core.stats.throttled += reply.next == pb.OUTCOME_THROTTLED
        if reply.error:
            core.stats.transfers_failed += 1
            self.memory.reason = reply.error
        return reply.blocks


def start_load(
    core: Core, memory: DeviceMemory, namespace: Namespace, hashes: Packed, ids: Indices, wait_s: float, how: How
) -> Verb[Started]:
    """Ask for a load, of as many leading blocks as one call carries; its `finish` must follow."""
    connection = yield CONNECT
    if not how.plain and LAYERS not in connection.opened.features:
        raise Refused(FAILED_PRECONDITION, "the daemon knows neither layers nor deadlines: update it")
    number = yield from number_of(connection, memory, core.timeout_s())
    (namespace_id,) = yield from namespace_ids(core, connection, [namespace])
    part = leading(connection, hashes)
    first, end = memory.kv.check_layers(how.layers)
    page = connection.page
    request = pb.LoadRequest(
        registration_id=number,
        namespace_id=namespace_id,
        hashes=part.data,
        hash_bytes=part.hash_bytes,
        block_ids=packed_ids(ids[: part.length]),
        wait_ms=milliseconds(wait_s),
        transfer_id=next(core.transfers),
        done_word=page.take_word() if page is not None else 0,
        layers_word=page.take_word() if page is not None and how.by_layer else 0,
        deadline_ms=how.deadline.milliseconds_left,
    )
    if how.layers is not None:
        request.first_layer, request.layers = first, end - first
    ticket = connection.start(pb.OPERATION_LOAD, request)
    return Started(
        core,
        memory,
        connection,
        ticket,
        request.transfer_id,
        request.done_word,
        request.layers_word,
        [request.done_word, request.layers_word],
        part.length,
        _layer_bytes(memory.kv, first, end) * ids.shape[1],
        wait_s,
    )


def _layer_bytes(kv: PagedKV, first: int, end: int) -> int:
    """What these layers have of a block."""
    if (first, end) == (0, kv.layers):
        return kv.block_bytes
    counts = kv.layer_fragments
    return int(kv.layout.sizes[sum(counts[:first]) : sum(counts[:end])].sum())


def load(
    core: Core, memory: DeviceMemory, namespace: Namespace, hashes: Packed, ids: Indices, wait_s: float, how: How
) -> Verb[int]:
    """How many leading blocks were copied to the engine's."""
    delivered = 0
    while delivered < hashes.length:
        rest = hashes.part(delivered, hashes.length)
        started = yield from start_load(core, memory, namespace, rest, ids[delivered:], wait_s, how)
        came = yield from started.finish()
        delivered += came
        if came < started.blocks:
            break
    return delivered
