"""The sessions of gRPC clients: opened, found by the id in each call's metadata, expired when idle."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Final

import grpc
from google.protobuf.message import Message
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.errors import FailedPrecondition, LimitExceeded, Unauthenticated
from kvstored.leases import Session
from kvstored.rpc.context import Context
from kvstored.rpc.opening import open_session

SESSION_METADATA: Final = "kvstored-session-bin"
EXPIRY_STEP_S: Final = 1.0
Call = grpc.aio.ServicerContext[Any, Any]


class RemoteSessions:
    """A gRPC session has no end of file: it ends by CloseSession, or when no call came for `idle_timeout_s`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._own: set[Session] = set()
        self._calls: Counter[Session] = Counter()

    async def open(self, request: pb.OpenSessionRequest, call: Call) -> Message:
        """Serve OpenSession. Raises Unauthenticated, or FailedPrecondition where the daemon is about to end."""
        if self._context.state == "stopping":
            raise FailedPrecondition("the daemon is stopping and takes no new sessions")
        identity = self._context.identity
        # A socket that several users can reach proves nobody's identity: then a token must.
        local = call.peer().startswith("unix:") and not identity.has_tokens
        token = request.token or _bearer(call)
        caller = identity.of_grpc(token, _common_name(call), request.client_name, local=local)
        session, reply = await open_session(self._context, caller, request)
        self._own.add(session)
        return reply

    def enter(self, call: Call) -> Session:
        """The session whose id a call carries; it does not expire until `leave`.

        Raises Unauthenticated, or LimitExceeded past the session's number of calls at once.
        """
        session_id = dict(call.invocation_metadata() or ()).get(SESSION_METADATA, b"")
        session = self._context.store.parts.sessions.get(session_id if isinstance(session_id, bytes) else b"")
        if session is None or session not in self._own:
            raise Unauthenticated(f"no such session: call OpenSession and send its session_id as {SESSION_METADATA}")
        limit = self._context.config.limits.requests_in_flight
        if self._calls[session] >= limit:
            raise LimitExceeded(f"{limit} calls of this session are not answered yet: wait for some")
        self._calls[session] += 1
        return session

    def leave(self, session: Session) -> None:
        """A call has done its work."""
        session.last_seen_s = self._context.clock.monotonic()
        self._calls[session] -= 1
        if not self._calls[session]:
            del self._calls[session]

    async def expire(self) -> None:
        """End sessions that were not heard of; runs until cancelled."""
        idle_s = self._context.config.server.idle_timeout_s
        while True:
            await asyncio.sleep(min(EXPIRY_STEP_S, idle_s / 4))
            oldest_s = self._context.clock.monotonic() - idle_s
            for session in [s for s in self._own if s.last_seen_s < oldest_s and s not in self._calls]:
                self._context.store.end_session(session)
            self._own = {session for session in self._own if not session.ended}

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
    return names[0].decode(errors="replace") if names else ""
