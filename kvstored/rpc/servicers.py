"""The gRPC services: every operation of the table as a method, and the two that stream bytes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Final, NoReturn

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from kvstored_proto.v1 import admin_pb2, admin_pb2_grpc, kvstored_pb2_grpc
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.catalog.leases import Session
from kvstored.errors import KVStoredError, Unauthenticated
from kvstored.reporting.logs import get_logger
from kvstored.rpc import acts, inline, roles
from kvstored.rpc.context import Context
from kvstored.rpc.errors import INTERNAL, describe
from kvstored.rpc.fair_share import FairShare
from kvstored.rpc.operations import OPERATIONS, Operation, number_of
from kvstored.rpc.remote_sessions import Call, RemoteSessions, caller_of, peer_of
from kvstored.rpc.uncancelled import leave_alone, to_its_end
from kvstored.store.release_times import Cause, Releasing

# Methods that are not in the table of operations: one makes the session, two stream bytes.
SPECIAL: Final = frozenset({"OpenSession", "PutInline", "GetInline"})
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}

_log = get_logger("grpc")


class KVStoreServicer(kvstored_pb2_grpc.KVStoreServicer):
    """The data service."""

    def __init__(self, context: Context, sessions: RemoteSessions) -> None:
        self._context = context
        self._sessions = sessions
        self._incoming = FairShare(inline.MEMORY_BYTES_MAX)
        _fill(self, pb.DESCRIPTOR.services_by_name["KVStore"], context, sessions)

    async def OpenSession(self, request: pb.OpenSessionRequest, call: Call) -> Message:
        """See the schema."""
        return await _answer(self._context, call, "OpenSession", self._sessions.open(request, call))

    async def PutInline(self, requests: AsyncIterator[pb.PutInlineRequest], call: Call) -> Message:
        """See the schema."""
        return await _answer(self._context, call, "PutInline", self._put_inline(requests, call))

    async def _put_inline(self, requests: AsyncIterator[pb.PutInlineRequest], call: Call) -> Message:
        session = self._sessions.enter(call)
        try:
            roles.check(session, "PutInline")
            return await inline.put(self._context, session, requests, self._incoming)
        finally:
            self._sessions.leave(session)

    async def GetInline(self, request: pb.GetInlineRequest, call: Call) -> AsyncIterator[pb.GetInlineReply]:
        """See the schema."""
        started = time.perf_counter()
        try:
            session = self._sessions.enter(call)
            try:
                async with aclosing(inline.get(self._context, session, request)) as replies:
                    async for reply in replies:
                        yield reply
            finally:
                self._sessions.leave(session)
        except Exception as error:
            await _abort(self._context, call, "GetInline", error)
        self._context.metrics.observe("GetInline", time.perf_counter() - started)


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """The admin service."""

    def __init__(self, context: Context, sessions: RemoteSessions) -> None:
        _fill(self, admin_pb2.DESCRIPTOR.services_by_name["Admin"], context, sessions)


def _fill(servicer: object, service: ServiceDescriptor, context: Context, sessions: RemoteSessions) -> None:
    for method in service.methods:
        if method.name not in SPECIAL:
            setattr(servicer, method.name, _unary(context, sessions, OPERATIONS[number_of(method.name)]))


def _unary(
    context: Context, sessions: RemoteSessions, operation: Operation
) -> Callable[[Message, Call], Awaitable[Message]]:
    async def work(request: Message, call: Call) -> Message:
        return await served(context, sessions.enter(call), operation, request, sessions.leave)

    async def method(request: Message, call: Call) -> Message:
        return await _answer(context, call, operation.name, work(request, call))

    return method


async def served(
    context: Context, session: Session, operation: Operation, request: Message, leave: Callable[[Session], object]
) -> Message:
    """One call of a session, to its end though its client leaves: then what it took is given back. `leave` it after.

    It begins in a turn of its own, and is refused where the session has ended by then.
    """
    releasing: list[Releasing] = []

    async def serve() -> Message:
        try:
            session.check_open()
            reply = operation.serve(context, session, request)
            return reply if isinstance(reply, Message) else await reply
        finally:
            leave(session)

    def left() -> None:
        releasing.append(context.store.release_times.begin(Cause.CANCEL))

    def undo(reply: Message) -> None:
        _undo(context, session, operation.name, reply)
        releasing[0].ended()

    return await to_its_end(serve(), undo, left)


def _undo(context: Context, session: Session, operation: str, reply: Message) -> None:
    """Give back what was taken for a caller who left before the reply."""
    with suppress(KVStoredError):  # all was given back already when the session ended meanwhile
        if operation == "Get" and isinstance(reply, pb.GetReply):
            context.store.reads.release(session, [lease.lease_id for lease in reply.leases])
        elif isinstance(reply, pb.ReserveReply) and reply.reservation_id:
            context.store.writes.abort(session, reply.reservation_id, [])
        elif isinstance(reply, pb.PrefetchReply) and reply.prefetch_id:
            leave_alone(context.store.prefetches.cancel(session, reply.prefetch_id))
        elif isinstance(reply, pb.RegisterMemoryReply) and reply.registration_id:
            assert context.store.transfers is not None, "it registered something"
            leave_alone(context.store.transfers.unregister(session, reply.registration_id))


async def _answer(context: Context, call: Call, name: str, work: Awaitable[Message]) -> Message:
    """Run one call: its latency is noted, and an error becomes its status."""
    started = time.perf_counter()
    try:
        reply = await work
    except Exception as error:
        await _abort(context, call, name, error)
    context.metrics.observe(name, time.perf_counter() - started)
    return reply


async def _abort(context: Context, call: Call, name: str, error: Exception) -> NoReturn:
    if not isinstance(error, KVStoredError):
        _log.error("call failed", exc_info=error)
    # Who is not known is not who the session belongs to that it named.
    caller = None if isinstance(error, Unauthenticated) else caller_of(context, call)
    acts.refusal(context.audit, name, peer_of(call), error, caller)
    code, message = describe(error)
    await call.abort(_CODES.get(code, _CODES[INTERNAL]), message)
    raise AssertionError("abort raises")
