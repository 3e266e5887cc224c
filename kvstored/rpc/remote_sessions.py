"""The sessions of gRPC clients: opened, found by the id in each call's metadata, expired when idle."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Final

import grpc
from google.protobuf.message import Message
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.catalog.leases import Caller, Session
from kvstored.errors import FailedPrecondition, LimitExceeded, Unauthenticated
from kvstored.rpc.context import Context
from kvstored.rpc.fair_share import FairShare
from kvstored.rpc.opening import open_session
from kvstored.store.release_times import Cause

SESSION_METADATA: Final = "kvstored-session-bin"
EXPIRY_STEP_S: Final = 1.0
Call = grpc.aio.ServicerContext[Any, Any]


class RemoteSessions:
    """A gRPC session has no end of file: it ends by CloseSession, or when no call came for `idle_timeout_s`.

    Its id is a secret like a token. It is good only where the session was opened: by the same kind of socket,
    with the same client certificate, and beside no token of another tenant.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._own: dict[Session, tuple[bool, str]] = {}  # with where it was opened
        self._calls: Counter[Session] = Counter()
        self._share = FairShare(calls_max(context))  # of all calls, by tenant

    async def open(self, request: pb.OpenSessionRequest, call: Call) -> Message:
        """Serve OpenSession. Raises Unauthenticated, or FailedPrecondition where the daemon is about to end."""
        if self._context.state == "stopping":
            raise FailedPrecondition("the daemon is stopping and takes no new sessions")
        identity = self._context.identity
        # A socket that several users can reach proves nobody's identity: then a token must.
        unix, certificate = where = _where(call)
        token = request.token or _bearer(call)
        caller = identity.of_grpc(token, certificate, request.client_name, local=unix and not identity.has_tokens)
        session, reply = await open_session(self._context, caller, request)
        self._own[session] = where
        return reply

    def enter(self, call: Call) -> Session:
        """The session whose id a call carries; it does not expire until `leave`.

        Raises Unauthenticated, or LimitExceeded past the session's number of calls at once, or its tenant's part
        of all calls: streams may be held open for as long as their clients like.
        """
        session = _session(self._context, call)
        if session is None or self._own.get(session) != _where(call) or not self._owns(session, _bearer(call)):
            raise Unauthenticated(f"no such session: call OpenSession and send its session_id as {SESSION_METADATA}")
        limit = self._context.config.limits.requests_in_flight
        if self._calls[session] >= limit:
            raise LimitExceeded(f"{limit} calls of this session are not answered yet: wait for some")
        if not self._share.take(session.caller.tenant, alone=len(self._context.store.parts.tenants) <= 1):
            raise LimitExceeded("too many calls of this tenant are not answered yet: wait for some")
        self._calls[session] += 1
        return session

    def _owns(self, session: Session, token: str) -> bool:
        """Whether a token sent beside a session's id, where one is, names the session's tenant."""
        if not token:
            return True
        try:
            return self._context.identity.of_grpc(token, "", "", local=False).tenant == session.caller.tenant
        except Unauthenticated:  # said of the session, or the answer would tell that its id is right
            return False

    def leave(self, session: Session) -> None:
        """A call has done its work."""
        session.last_seen_s = self._context.clock.monotonic()
        self._share.leave(session.caller.tenant)
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
                self._context.store.end_session(session, Cause.TIMEOUT)
            self._own = {session: where for session, where in self._own.items() if not session.ended}

    def close(self) -> None:
        """End all of them."""
        for session in self._own:
            self._context.store.end_session(session, Cause.SHUTDOWN)
        self._own.clear()


def calls_max(context: Context) -> int:
    """How many calls the sessions of all tenants may have under way."""
    return 4 * context.config.server.max_sessions


def _session(context: Context, call: Call) -> Session | None:
    session_id = dict(call.invocation_metadata() or ()).get(SESSION_METADATA, b"")
    return context.store.parts.sessions.get(session_id if isinstance(session_id, bytes) else b"")


def caller_of(context: Context, call: Call) -> Caller | None:
    """Who a call's session belongs to; None where it names none that is open."""
    session = _session(context, call)
    return session.caller if session is not None else None


def peer_of(call: Call) -> str:
    """Where a call comes from, without the port: all that one host does counts together."""
    peer = call.peer()
    return "the gRPC socket" if peer.startswith("unix:") else peer.rpartition(":")[0]


def _where(call: Call) -> tuple[bool, str]:
    """By which way a call came: whether by the Unix socket, and the name of its client certificate."""
    return call.peer().startswith("unix:"), _common_name(call)


def _bearer(call: Call) -> str:
    value = dict(call.invocation_metadata() or ()).get("authorization", "")
    return value.removeprefix("Bearer ") if isinstance(value, str) else ""


def _common_name(call: Call) -> str:
    names = list(call.auth_context().get("x509_common_name", ()))
    return names[0].decode(errors="replace") if names else ""
