"""gRPC: the same operations on a Unix socket and, with TLS, on TCP; health and reflection beside them.

Bytes travel inline here, in chunks of at most 1 MiB.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from kvstored_proto.v1 import admin_pb2_grpc, kvstored_pb2_grpc

from kvstored.rpc.context import Context
from kvstored.rpc.fair_share import FairShare
from kvstored.rpc.listener import clear_stale
from kvstored.rpc.public_streams import STREAMS_MAX, BoundedHealth, BoundedReflection
from kvstored.rpc.remote_sessions import RemoteSessions, calls_max
from kvstored.rpc.servicers import AdminServicer, KVStoreServicer

MESSAGE_BYTES_MAX: Final = 4 << 20
SERVICES: Final = ("kvstored.v1.KVStore", "kvstored.v1.Admin")
ANONYMOUS_CALLS: Final = STREAMS_MAX + 64  # beyond those of sessions: public streams, and calls that are short
PING_INTERVAL_MS: Final = 30_000  # a peer that vanished without a word is noticed while a call of it runs
PING_TIMEOUT_MS: Final = 10_000


class GrpcServer:
    """The gRPC listeners."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sessions = RemoteSessions(context)
        self._servers: list[grpc.aio.Server] = []
        self._streams = FairShare(STREAMS_MAX)
        self._health = BoundedHealth(self._streams)
        self._expiry: asyncio.Task[None] | None = None
        self._socket: Path | None = None
        self.tcp_port = 0

    async def start(self) -> None:
        """Listen where the configuration says; raises OSError where that is impossible."""
        server = self._context.config.server
        await self.set_serving(False)
        if server.grpc_socket is not None:
            await self._start_local(server.grpc_socket)
        if server.tcp_address is not None:
            await self._start_tcp(server.tcp_address)
        self._expiry = asyncio.create_task(self._sessions.expire())

    async def _start_local(self, path: Path) -> None:
        # Without tokens whoever can connect is taken for the daemon's own user: so nobody else can.
        mode = self._context.config.server.socket_mode_bits if self._context.identity.has_tokens else 0o600
        server = self._server()
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(  # type: ignore[no-untyped-call]
            BoundedReflection(self._streams, names), server
        )
        clear_stale(path)
        old = os.umask(0o177)
        try:
            _listening(lambda: server.add_insecure_port(f"unix:{path}"), str(path))
        finally:
            os.umask(old)
        self._socket = path
        os.chmod(path, mode)
        await server.start()
        self._context.store.parts.tenants.watch(self._tenants_changed)

    def _tenants_changed(self, _name: str) -> None:
        """With the first token the socket speaks for nobody any more (see `Identity`), so others may reach it."""
        if self._socket is not None and self._context.identity.has_tokens:
            with suppress(OSError):
                os.chmod(self._socket, self._context.config.server.socket_mode_bits)

    async def _start_tcp(self, address: str) -> None:
        config = self._context.config.server
        assert config.tls_key is not None, "checked with the configuration"
        assert config.tls_certificate is not None, "checked with the configuration"
        ca = config.tls_client_ca.read_bytes() if config.tls_client_ca else None
        credentials = grpc.ssl_server_credentials(
            [(config.tls_key.read_bytes(), config.tls_certificate.read_bytes())],
            root_certificates=ca,
            # gRPC asks for certificates always or never; a token beside one decides (see `Identity.of_grpc`).
            require_client_auth=ca is not None,
        )
        server = self._server()
        self.tcp_port = _listening(lambda: server.add_secure_port(address, credentials), address)
        await server.start()

    def _server(self) -> grpc.aio.Server:
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
                ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", PING_INTERVAL_MS),
                ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
            ],
            maximum_concurrent_rpcs=calls_max(self._context) + ANONYMOUS_CALLS,
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
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)


def _listening(add_port: Callable[[], int], address: str) -> int:
    """The port that was bound. Raises OSError: gRPC itself has other ways to say that it was not."""
    try:
        port = add_port()
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error
    if not port:
        raise OSError(f"cannot listen on {address}")
    return port
