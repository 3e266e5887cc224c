"""Memory of a GPU that the daemon's device worker opens (`cuda_ipc`), once for both clients (see `effects`).

While a transfer is under way the engine's blocks are the worker's. A verb that gives up says so to
the daemon and comes back when the daemon has answered that no copy runs any more.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from kvstored_proto import frames
from kvstored_proto.layout import Indices
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored_client.connection import Connection
from kvstored_client.core import Core
from kvstored_client.cuda_export import PROBE_BYTES, Chunk, Exporter, NotExportable
from kvstored_client.effects import LOST_PAUSE_S, Sleep, Verb, call
from kvstored_client.errors import FAILED_PRECONDITION, FAILURES, KVStoredClientError, Refused, Timeout, Unavailable
from kvstored_client.paged import PagedKV
from kvstored_client.tickets import Ticket

GPU: Final = "gpu"  # the feature
DESCRIPTORS: Final = "gpu_descriptors"  # likewise
LAYERS: Final = "transfer_layers"  # the feature: ranges of layers, layers that are told, deadlines
CANCEL_TIMEOUT_S: Final = 30.0  # a daemon kills a worker that hangs sooner
REGISTER_TIMEOUT_S: Final = 30.0  # where it is asked for: a worker may have to start
PAUSE_S: Final = 0.005  # before a store is tried again
ASK_AGAIN_S: Final = 60.0  # a memory that the daemon could not open
PROBES: Final = 3  # the engine may write to these bytes between the two looks at them
_own_numbers: Final = itertools.count(1)


class DeviceMemory:
    """An engine's paged memory on a GPU, and under which number the session of a connection knows it."""

    def __init__(self, kv: PagedKV) -> None:
        self.kv = kv
        self.reason = ""  # why it cannot be used, or what failed last
        self.connection: Connection | None = None
        self.number = 0
        self.ended = False  # it may be the engine's alone again
        # Where the daemon cannot open it: with which session that was so, and when it is asked again.
        self.refused_by: Connection | None = None
        self.ask_again_at_s = 0.0
        self.own_number = next(_own_numbers)
        self.sends_descriptors = True  # the daemon takes some
        self.chunks: dict[int, Chunk] = {}  # of the description that is being made
        self._exporter: Exporter | None = None

    def description(self) -> pb.RegisterMemoryRequest:
        """What the daemon needs to open it. Raises NotExportable."""
        if self._exporter is None:
            self._exporter = Exporter()
        exporter = self._exporter
        request = pb.RegisterMemoryRequest(blocks=self.kv.layout.blocks, memory_number=self.own_number)
        for tensor in self.kv.tensors:
            _, uuid = exporter.device_of(tensor.address)
            if request.device_uuid not in (b"", uuid):
                raise NotExportable("the tensors are on several devices: register those of each by themselves")
            request.device_uuid = uuid
            length = min(PROBE_BYTES, tensor.span_bytes)
            starts = (tensor.address, tensor.address + tensor.span_bytes - length)
            probe, last = (exporter.read(start, length) for start in starts)
            region = request.regions.add(size_bytes=tensor.span_bytes, probe=probe, probe_end=last)
            if exporter.has_handles(tensor.address):
                found = exporter.allocation_of(tensor.address)
                region.ipc_handle, region.offset = found.handle, tensor.address - found.base
            elif self.sends_descriptors:
                exporter.chunks_of(tensor.address, tensor.span_bytes, self.chunks)
            else:
                raise NotExportable("the allocator's memory has no IPC handles, and the daemon takes no descriptors")
        self._place_in_chunks(request)
        for number, offset, stride, size in self.kv.layout.fragments:
            request.fragments.add(region=number, offset=offset, stride=stride, size_bytes=size)
        request.layer_fragments.extend(self.kv.layer_fragments)
        return request

    def _place_in_chunks(self, request: pb.RegisterMemoryRequest) -> None:
        """Where regions without a handle start in the chunks, which follow one another as their addresses do."""
        starts: dict[int, int] = {}
        total = 0
        for base in sorted(self.chunks):
            starts[base] = total
            request.chunk_bytes.append(self.chunks[base].size_bytes)
            total += self.chunks[base].size_bytes
        for tensor, region in zip(self.kv.tensors, request.regions, strict=True):
            if not region.ipc_handle:
                base = max(each for each in starts if each <= tensor.address)
                region.offset = starts[base] + tensor.address - base

    def take_descriptors(self) -> list[int]:
        """Those of the last description's chunks, in their order, which are the caller's now."""
        chunks, self.chunks = self.chunks, {}
        return [chunks[base].fd for base in sorted(chunks)]


def number_of(connection: Connection, memory: DeviceMemory, timeout_s: float) -> Verb[int]:
    """The number of the memory in this session, registered where it is not yet. Raises Refused."""
    if memory.connection is connection and memory.number:
        return memory.number
    if memory.ended:
        raise Unavailable("this memory is not registered any more")
    if GPU not in connection.opened.features:
        memory.reason = "the daemon does not use GPUs"
        raise Refused(FAILED_PRECONDITION, memory.reason)
    memory.sends_descriptors = DESCRIPTORS in connection.opened.features
    for _ in range(PROBES):
        try:
            request = memory.description()
            # Before the request, and by the same socket: they are there when it is served.
            _offer(connection, memory)
        except NotExportable as error:
            frames.close_all(memory.take_descriptors())
            request = pb.RegisterMemoryRequest(not_exportable=str(error)[:400], memory_number=memory.own_number)
        memory.reason = "it is being registered"
        reply = yield from call(
            *(connection, pb.OPERATION_REGISTER_MEMORY, request, pb.RegisterMemoryReply, timeout_s),
            partial(_registered, memory, connection),  # late: the next call finds it
        )
        _registered(memory, connection, reply.SerializeToString())
        if memory.ended:
            raise Unavailable("this memory is not registered any more")
        if reply.registration_id:
            return reply.registration_id
        if "bytes differ" not in reply.reason:
            break
    memory.reason = request.not_exportable or memory.reason
    raise Refused(FAILED_PRECONDITION, memory.reason)


def _offer(connection: Connection, memory: DeviceMemory) -> None:
    fds, message = memory.take_descriptors(), pb.OfferDescriptors(memory_number=memory.own_number)
    for start in range(0, len(fds), frames.MAX_FDS_PER_FRAME):
        part = tuple(fds[start : start + frames.MAX_FDS_PER_FRAME])
        connection.give(pb.OPERATION_OFFER_DESCRIPTORS, message, part)


def _registered(memory: DeviceMemory, connection: Connection, body: bytes) -> None:
    reply = pb.RegisterMemoryReply.FromString(body)
    if memory.ended:  # meanwhile
        if reply.registration_id:
            request = pb.UnregisterMemoryRequest(registration_id=reply.registration_id)
            connection.post(pb.OPERATION_UNREGISTER_MEMORY, request)
        return
    memory.reason = reply.reason
    memory.ask_again_at_s = time.monotonic() + (reply.retry_after_ms / 1000.0 or ASK_AGAIN_S)
    if reply.registration_id:
        memory.connection, memory.number = connection, reply.registration_id


def unregister(core: Core, memory: DeviceMemory) -> Verb[None]:
    """When this ends the daemon neither uses nor holds the memory; where it ended itself, it is not held either."""
    memory.ended = True
    connection, number = memory.connection, memory.number
    memory.connection, memory.number = None, 0
    if connection is None or not number:
        return
    if connection.alive():
        request = pb.UnregisterMemoryRequest(registration_id=number)
        operation, reply_type = pb.OPERATION_UNREGISTER_MEMORY, pb.UnregisterMemoryReply
        try:
            yield from call(connection, operation, request, reply_type, CANCEL_TIMEOUT_S, hurry=_as_it_goes)
            return
        except Refused:  # it is not registered
            return
        except FAILURES as error:
            core.failed_open(error)
    # A worker may copy on until it has ended, as its daemon has.
    since_s = connection.ended_at_s if connection.error is not None else time.monotonic()
    yield Sleep(max(0.0, since_s + LOST_PAUSE_S - time.monotonic()), whole=True)


def layers_told(connection: Connection, word: int, transfer_id: int) -> tuple[int, int]:
    """How many blocks a transfer by layers is about, and how many layers of them are copied; 0 where nothing tells."""
    page = connection.page
    return page.layers(word, transfer_id) if page is not None and word else (0, 0)


def packed_ids(ids: Indices) -> bytes:
    """Block ids as they travel."""
    return ids.astype("<u4").tobytes()


def give_back_words(connection: Connection, ticket: Ticket, words: list[int]) -> None:
    """Let others have the words of a transfer once the daemon writes to them no more: its reply is here, or comes late.

    Nothing happens a second time.
    """
    page = connection.page

    def settled() -> None:
        while words and page is not None:
            page.give_back_word(words.pop())

    ticket.settled = settled
    if ticket.done:
        settled()


def hurrying(connection: Connection, transfer_id: int) -> Callable[[], None]:
    """Asks the daemon to end a transfer soon, for `effects.Finish`."""
    request = pb.CancelTransferRequest(transfer_id=transfer_id)
    return partial(connection.post, pb.OPERATION_CANCEL_TRANSFER, request)


def give_up(connection: Connection, transfer_id: int, error: KVStoredClientError) -> Verb[None]:
    """Come back when no copy runs any more, as far as that can be known."""
    if isinstance(error, Refused):
        return  # the daemon has answered
    if isinstance(error, Timeout) and connection.alive():
        request = pb.CancelTransferRequest(transfer_id=transfer_id)
        operation, reply_type = pb.OPERATION_CANCEL_TRANSFER, pb.CancelTransferReply
        try:
            yield from call(connection, operation, request, reply_type, CANCEL_TIMEOUT_S, hurry=_as_it_goes)
            return
        except KVStoredClientError:
            pass
    yield Sleep(LOST_PAUSE_S, whole=True)


def _as_it_goes() -> None:
    """For `effects.Finish`, where nothing makes it sooner: who is cancelled waits all the same."""
