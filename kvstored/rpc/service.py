"""gRPC: the same operations on a Unix socket and, with TLS, on TCP; health and reflection beside them.

A gRPC session has no end of file: its id travels as metadata with each call, and it ends by
CloseSession or when it was not heard of for `idle_timeout_s`. Bytes travel inline here, in
chunks of at most 1 MiB.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from kvstored_proto.v1 import admin_pb2, admin_pb2_grpc, kvstored_pb2_grpc
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.errors import KVStoredError, Unauthenticated
from kvstored.leases import Session
from kvstored.logs import get_logger
from kvstored.rpc import inline
from kvstored.rpc.context import Context
from kvstored.rpc.errors import INTERNAL, describe
from kvstored.rpc.operations import OPERATIONS, Operation, number_of, open_session

SESSION_METADATA: Final = "kvstored-session-bin"
MESSAGE_BYTES_MAX: Final = 4 << 20
SERVICES: Final = ("kvstored.v1.KVStore", "kvstored.v1.Admin")
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}

_log = get_logger("grpc")
Call = grpc.aio.ServicerContext[Any, Any]


class Sessions:
    """Opens, finds and expires the sessions of gRPC clients."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._own: set[Session] = set()

    def of(self, call: Call) -> Session:
        """The session whose id the call carries. Raises Unauthenticated."""
        metadata = dict(call.invocation_metadata() or ())
        session_id = metadata.get(SESSION_METADATA, b"")
        session = self._context.store.parts.sessions.get(session_id if isinstance(session_id, bytes) else b"")
        if session is None or session not in self._own:
            raise Unauthenticated(f"no such session: call OpenSession and send its session_id as {SESSION_METADATA}")
        session.last_seen_s = self._context.clock.monotonic()
        return session

    async def open(self, request: pb.OpenSessionRequest, call: Call) -> Message:
        """Serve OpenSession."""
        # A socket that several users can reach proves nobody's identity: then a token must.
        tokens = any(tenant.tokens_sha256 for tenant in self._context.config.tenants)
        local = call.peer().startswith("unix:") and not tokens
        caller = self._context.identity.of_grpc(
            request.token or _bearer(call), _common_name(call), request.client_name, local=local
        )
        session, reply = await open_session(self._context, caller, request)
        self._own.add(session)
        return reply

    async def expire(self) -> None:
        """End sessions that were not heard of; runs until cancelled."""
        idle_s = self._context.config.server.idle_timeout_s
        while True:
            await asyncio.sleep(min(1.0, idle_s / 4))
            oldest_s = self._context.clock.monotonic() - idle_s
            for session in list(self._own):
                if session.last_seen_s < oldest_s:
                    self._context.store.end_session(session)
                if session.ended:
                    self._own.discard(session)

    def close(self) -> None:
        """End all of them."""
        for session in self._own:
            self._context.store.end_session(session)
        self._own.clear()


def _bearer(call: Call) -> str:
    value = dict(call.invocation_metadata() or ()).get("authorization", "")
    return value.removeprefix("Bearer ") if isinstance(value, str) else ""


def _common_name(call: Call) -> str:
    names = list(call.auth_context().get("x509_common_name", ()))
    return names[0].decode() if names else ""


async def _guarded(context: Context, call: Call, name: str, work: Callable[[], Awaitable[Message]]) -> Message:
    """Run one call: its latency is noted, and an error becomes its status."""
    started = time.perf_counter()
    try:
        reply = await work()
    except Exception as error:
        await _abort(call, error)
        raise AssertionError("abort raises") from error
    context.metrics.observe(name, time.perf_counter() - started)
    return reply


async def _abort(call: Call, error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, KVStoredError):
        _log.error("call failed", exc_info=error)
    code, message = describe(error)
    await call.abort(_CODES.get(code, _CODES[INTERNAL]), message)


def _unary(context: Context, sessions: Sessions, operation: Operation) -> Callable[[Message, Call], Awaitable[Message]]:
    async def serve(request: Message, call: Call) -> Message:
        async def work() -> Message:
            reply = operation.serve(context, sessions.of(call), request)
            return reply if isinstance(reply, Message) else await reply

        return await _guarded(context, call, operation.name, work)

    return serve


class KVStoreServicer(kvstored_pb2_grpc.KVStoreServicer):
    """The data service: every operation of the table, and the two that stream bytes."""

    def __init__(self, context: Context, sessions: Sessions) -> None:
        self._context = context
        self._sessions = sessions
        _fill(self, "KVStore", context, sessions)

    async def OpenSession(self, request: pb.OpenSessionRequest, call: Call) -> Message:
        """See the schema."""
        return await _guarded(self._context, call, "OpenSession", lambda: self._sessions.open(request, call))

    async def PutInline(self, requests: AsyncIterator[pb.PutInlineRequest], call: Call) -> Message:
        """See the schema."""

        async def work() -> Message:
            return await inline.put(self._context, self._sessions.of(call), requests)

        return await _guarded(self._context, call, "PutInline", work)

    async def GetInline(self, request: pb.GetInlineRequest, call: Call) -> AsyncIterator[pb.GetInlineReply]:
        """See the schema."""
        try:
            async for reply in inline.get(self._context, self._sessions.of(call), request):
                yield reply
        except Exception as error:
            await _abort(call, error)


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """The admin service."""

    def __init__(self, context: Context, sessions: Sessions) -> None:
        _fill(self, "Admin", context, sessions)


def _fill(servicer: object, service: str, context: Context, sessions: Sessions) -> None:
    schema = pb if service == "KVStore" else admin_pb2
    for method in schema.DESCRIPTOR.services_by_name[service].methods:
        if method.name not in ("OpenSession", "PutInline", "GetInline"):
            setattr(servicer, method.name, _unary(context, sessions, OPERATIONS[number_of(method.name)]))


def _clear(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)


class GrpcServer:
    """The gRPC listeners."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sessions = Sessions(context)
        self._servers: list[grpc.aio.Server] = []
        self._health = health.aio.HealthServicer()
        self._expiry: asyncio.Task[None] | None = None
        self.tcp_port = 0
        self._tokens = any(tenant.tokens_sha256 for tenant in context.config.tenants)

    async def start(self) -> None:
        """Listen where the configuration says; raises OSError where that is impossible."""
        server = self._context.config.server
        if server.grpc_socket is not None:
            await self._start_local(server.grpc_socket)
        if server.tcp_address is not None:
            await self._start_tcp(server.tcp_address)
        self._expiry = asyncio.create_task(self._sessions.expire())

    async def _start_local(self, path: Path) -> None:
        # Without tokens whoever can connect is taken for the daemon's own user: so nobody else can.
        mode = self._context.config.server.socket_mode_bits if self._tokens else 0o600
        server = self._server()
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        old = os.umask(0o177)
        try:
            _clear(path)
            server.add_insecure_port(f"unix:{path}")
            await server.start()
        finally:
            os.umask(old)
        os.chmod(path, mode)

    async def _start_tcp(self, address: str) -> None:
        config = self._context.config.server
        assert config.tls_key is not None, "checked with the configuration"
        assert config.tls_certificate is not None, "checked with the configuration"
        ca = config.tls_client_ca.read_bytes() if config.tls_client_ca else None
        credentials = grpc.ssl_server_credentials(
            [(config.tls_key.read_bytes(), config.tls_certificate.read_bytes())],
            root_certificates=ca,
            # With tokens configured a client without certificate may still come in and show one.
            require_client_auth=ca is not None and not self._tokens,
        )
        server = self._server()
        self.tcp_port = server.add_secure_port(address, credentials)
        await server.start()

    def _server(self) -> grpc.aio.Server:
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
                ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=4 * self._context.config.server.max_sessions,
        )
        kvstored_pb2_grpc.add_KVStoreServicer_to_server(  # type: ignore[no-untyped-call]
            KVStoreServicer(self._context, self._sessions), server
        )
        admin_pb2_grpc.add_AdminServicer_to_server(  # type: ignore[no-untyped-call]
            AdminServicer(self._context, self._sessions), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self._servers.append(server)
        return server

    async def set_serving(self, serving: bool) -> None:
        """What the health service answers, for the daemon and for each service."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *SERVICES):
            await self._health.set(name, status)

    async def close(self, grace_s: float) -> None:
        """Stop listening, let calls end, end the sessions."""
        if self._expiry is not None:
            self._expiry.cancel()
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))
        self._sessions.close()
        path = self._context.config.server.grpc_socket
        if path is not None:
            _clear(path)
