"""The clients that the contract of the data operations runs on: none but the store, the session socket, gRPC."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Self

import grpc
import xxhash
from google.protobuf import message_factory
from google.protobuf.message import Message
from kvstored_proto import frames
from kvstored_proto.v1 import admin_pb2, admin_pb2_grpc, kvstored_pb2_grpc
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.catalog.leases import Session
from kvstored.device import memory
from kvstored.errors import KVStoredError
from kvstored.rpc.context import Context
from kvstored.rpc.errors import describe
from kvstored.rpc.inline import CHUNK_BYTES_MAX
from kvstored.rpc.opening import open_session
from kvstored.rpc.operations import OPERATIONS, number_of
from kvstored.rpc.remote_sessions import SESSION_METADATA
from kvstored.store.outcomes import RESERVED
from kvstored.testing.contract_client import Block, CallFailed, commit, get, release, reserve, unpack
from kvstored.testing.daemon_in_loop import token_of
from kvstored.testing.frames_client import FramesClient

WAIT_MS: Final = 60_000
UNAUTHENTICATED: Final = 16


def opening_request(tenant: str, **opening: Any) -> pb.OpenSessionRequest:
    """A session of a tenant, by its token, with the fields given."""
    defaults = {"protocol_min": frames.PROTOCOL_MIN, "protocol_max": frames.PROTOCOL_MAX, "staging_bytes": 1 << 20}
    return pb.OpenSessionRequest(**{"token": token_of(tenant), **defaults, **opening})


class SharedMemoryClient:
    """Puts through staging and reads from slots; a subclass says how to call and where the memory is."""

    opened: pb.OpenSessionReply
    shares_memory = True

    async def call(self, method: str, request: Message) -> Any:
        """See `Client`."""
        raise NotImplementedError

    def stage(self, offset: int, data: bytes) -> None:
        """See `Client`."""
        raise NotImplementedError

    def slot_data(self, slot: int, size_bytes: int) -> bytes:
        """See `Client`."""
        raise NotImplementedError

    async def end(self) -> None:
        """See `Client`."""
        raise NotImplementedError

    async def put(
        self, namespace_id: int, blocks: Sequence[Block], parent: bytes = b"", hints: pb.PutHints | None = None
    ) -> bytes:
        """See `Client`; one block is in staging at a time."""
        reserved = await reserve(self, namespace_id, blocks, parent, WAIT_MS, hints=hints)
        outcomes = bytearray(reserved.outcomes)
        for index, outcome in enumerate(reserved.outcomes):
            if outcome == RESERVED:
                outcomes[index : index + 1] = await commit(self, reserved.reservation_id, blocks, [index])
        return bytes(outcomes)

    async def read(self, namespace_id: int, hashes: Sequence[bytes]) -> list[bytes]:
        """See `Client`."""
        reply = await get(self, [namespace_id], [Block(hash_, b"") for hash_ in hashes], wait_ms=WAIT_MS)
        found = []
        for lease in reply.leases:
            for head in unpack(lease):
                found.append(self.slot_data(head.slot, head.size_bytes))
                assert xxhash.xxh3_128_digest(found[-1]) == head.content_hash, "the bytes are what was stored"
        await release(self, reply)
        return found


class DirectClient(SharedMemoryClient):
    """Calls the operations on the store, with no transport between."""

    def __init__(self, context: Context, session: Session, opened: pb.OpenSessionReply) -> None:
        self.opened = opened
        self._context = context
        self._session = session

    @classmethod
    async def connect(cls, context: Context, request: pb.OpenSessionRequest) -> Self:
        """A session that takes part as one of the session socket's would. Raises CallFailed."""
        try:
            caller = context.identity.of_peer(-1, 0, request.token, request.client_name)
            session, opened = await open_session(context, caller, request)
        except KVStoredError as error:
            raise CallFailed(*describe(error)) from error
        assert isinstance(opened, pb.OpenSessionReply)
        return cls(context, session, opened)

    async def call(self, method: str, request: Message) -> Any:
        """See `Client`."""
        try:
            reply = OPERATIONS[number_of(method)].serve(self._context, self._session, request)
            message: Any = reply if isinstance(reply, Message) else await reply
        except KVStoredError as error:
            raise CallFailed(*describe(error)) from error
        assert message.boot_id == self.opened.boot_id
        return message

    def stage(self, offset: int, data: bytes) -> None:
        """See `Client`."""
        assert self._session.staging is not None
        address = self._session.staging.address_of(offset, len(data))
        memory.view(address, len(data), writable=True)[:] = data

    def slot_data(self, slot: int, size_bytes: int) -> bytes:
        """See `Client`."""
        return bytes(self._context.store.parts.dram.view(slot, size_bytes))

    async def end(self) -> None:
        """See `Client`."""
        self._context.store.end_session(self._session)


class SocketClient(SharedMemoryClient):
    """Speaks frames on the session socket."""

    def __init__(self, wire: FramesClient) -> None:
        self._wire = wire

    @classmethod
    async def connect(cls, path: str, request: pb.OpenSessionRequest) -> Self:
        """Open a session. Raises CallFailed."""
        client = cls(FramesClient(path))
        try:
            client.opened = pb.OpenSessionReply.FromString(
                await client._wire.call(pb.OPERATION_OPEN_SESSION, request.SerializeToString())
            )
        except BaseException:
            await client.end()
            raise
        return client

    async def call(self, method: str, request: Message) -> Any:
        """See `Client`."""
        body = await self._wire.call(number_of(method), request.SerializeToString())
        message = _reply_type(method).FromString(body)
        assert message.boot_id == self.opened.boot_id
        return message

    def stage(self, offset: int, data: bytes) -> None:
        """See `Client`."""
        staging = self._wire.staging
        assert staging is not None
        staging[offset : offset + len(data)] = data

    def slot_data(self, slot: int, size_bytes: int) -> bytes:
        """See `Client`."""
        step = -(-size_bytes // frames.SLOT_ALIGN_BYTES) * frames.SLOT_ALIGN_BYTES
        start = (slot & ((1 << frames.SLOT_INDEX_BITS) - 1)) * step
        return self._wire.segments[slot >> frames.SLOT_INDEX_BITS][start : start + size_bytes]

    async def end(self) -> None:
        """See `Client`."""
        await self._wire.close()


class GrpcClient:
    """Speaks gRPC; bytes travel in messages."""

    opened: pb.OpenSessionReply
    shares_memory = False

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stubs: tuple[Any, ...] = (
            kvstored_pb2_grpc.KVStoreStub(channel),  # type: ignore[no-untyped-call]
            admin_pb2_grpc.AdminStub(channel),  # type: ignore[no-untyped-call]
        )
        self._metadata: tuple[tuple[str, bytes], ...] = ()
        self._ended = False

    @classmethod
    async def connect(cls, channel: grpc.aio.Channel, request: pb.OpenSessionRequest) -> Self:
        """Open a session. Raises CallFailed."""
        client = cls(channel)
        try:
            client.opened = await client._run("OpenSession", request)
        except BaseException:
            await channel.close()
            raise
        client._metadata = ((SESSION_METADATA, client.opened.session_id),)
        return client

    def method(self, name: str) -> Any:
        """The callable of a method."""
        return next(getattr(stub, name) for stub in self._stubs if hasattr(stub, name))

    async def _run(self, method: str, argument: object) -> Any:
        try:
            return await self.method(method)(argument, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise CallFailed(error.code().value[0], error.details() or "") from error

    async def call(self, method: str, request: Message) -> Any:
        """See `Client`."""
        message = await self._run(method, request)
        assert message.boot_id == self.opened.boot_id
        return message

    async def put(
        self, namespace_id: int, blocks: Sequence[Block], parent: bytes = b"", hints: pb.PutHints | None = None
    ) -> bytes:
        """See `Client`."""
        reply = await self._run("PutInline", inline_requests(namespace_id, blocks, parent, hints))
        assert reply.boot_id == self.opened.boot_id
        outcomes: bytes = reply.outcomes
        return outcomes

    async def read(self, namespace_id: int, hashes: Sequence[bytes]) -> list[bytes]:
        """See `Client`."""
        request = pb.GetInlineRequest(
            namespace_id=namespace_id, hashes=b"".join(hashes), hash_bytes=len(hashes[0]), wait_ms=WAIT_MS
        )
        found: list[bytes] = []
        try:
            async for part in self.method("GetInline")(request, metadata=self._metadata):
                assert part.boot_id == self.opened.boot_id
                if part.index == len(found):
                    found.append(b"")
                found[part.index] += part.chunk
                if part.content_hash:
                    assert len(found[part.index]) == part.size_bytes
                    assert xxhash.xxh3_128_digest(found[part.index]) == part.content_hash
        except grpc.aio.AioRpcError as error:
            raise CallFailed(error.code().value[0], error.details() or "") from error
        return found

    def stage(self, offset: int, data: bytes) -> None:
        """See `Client`."""
        raise AssertionError("gRPC shares no memory")

    def slot_data(self, slot: int, size_bytes: int) -> bytes:
        """See `Client`."""
        raise AssertionError("gRPC shares no memory")

    async def end(self) -> None:
        """See `Client`."""
        if not self._ended:
            self._ended = True
            try:
                await self._run("CloseSession", pb.CloseSessionRequest())
            except CallFailed as error:
                if error.code != UNAUTHENTICATED:  # the daemon has ended it
                    raise
            await self._channel.close()


def inline_requests(
    namespace_id: int, blocks: Sequence[Block], parent: bytes = b"", hints: pb.PutHints | None = None
) -> Iterator[pb.PutInlineRequest]:
    """The messages that put a chain."""
    for hash_, data in blocks:
        header = pb.PutInlineHeader(
            namespace_id=namespace_id, hash=hash_, parent=parent, size_bytes=len(data), hints=hints
        )
        yield pb.PutInlineRequest(header=header)
        for start in range(0, len(data), CHUNK_BYTES_MAX):
            yield pb.PutInlineRequest(chunk=data[start : start + CHUNK_BYTES_MAX])
        parent = hash_


def _reply_type(method: str) -> Any:
    for service in (pb.DESCRIPTOR.services_by_name["KVStore"], admin_pb2.DESCRIPTOR.services_by_name["Admin"]):
        if method in service.methods_by_name:
            return message_factory.GetMessageClass(service.methods_by_name[method].output_type)
    raise KeyError(method)
