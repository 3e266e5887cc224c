"""Admin acts and refusals, on their way into the audit log: who, what, with what, and how it ended.

Every method that needs the role admin is recorded, unless it only reads; so an act that is added cannot be
forgotten. What it was done with is taken from the request's own fields.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from google.protobuf.message import Message

from kvstored.catalog.leases import Caller, Session
from kvstored.errors import KVStoredError, PermissionDenied, SessionEnded, Unauthenticated
from kvstored.rpc import roles
from kvstored.tenancy.audit_log import AuditLog, Detail

Handler = Callable[[Any, Session, Any], Any]

ONLY_READ: Final = frozenset(
    {"ListTenants", "ReadAudit", "Policy", "TraceStatus", "Wear"}
)  # although they need the role admin
ALSO_RECORDED: Final = frozenset({"BumpEpoch", "Purge", "KillSession"})  # although a tenant may do it
_SECRET: Final = frozenset({"token", "hash", "hashes", "parent"})
_MAY_BE_SECRET: Final = frozenset({"tokens_sha256"})  # settings in which people put the token itself
_SHOWN_BYTES: Final = 16


def is_recorded(method: str) -> bool:
    """Whether a call of the method goes on record."""
    return method in ALSO_RECORDED or (roles.NEEDED[method] == roles.ADMIN and method not in ONLY_READ)


def recorded(method: str, serve: Handler) -> Handler:
    """The handler, and a line in the audit log when it has ended; where nothing is recorded the handler itself."""
    if not is_recorded(method):
        return serve

    def noted(context: Any, session: Session, request: Message) -> Any:
        try:
            reply = serve(context, session, request)
        except Exception as error:
            _note(context.audit, method, session, request, error)
            raise
        if isinstance(reply, Message):
            _note(context.audit, method, session, request)
            return reply
        return later(context, session, request, reply)

    async def later(context: Any, session: Session, request: Message, work: Awaitable[Message]) -> Message:
        error: Exception | None = None
        try:
            return await work
        except Exception as raised:
            error = raised
            raise
        finally:
            _note(context.audit, method, session, request, error)
            await context.audit.settled()  # whoever reads the answer may rely on the line

    return noted


def _note(audit: AuditLog, method: str, session: Session, request: Message, error: Exception | None = None) -> None:
    outcome = "ok" if error is None else str(error) if isinstance(error, KVStoredError) else "internal error"
    audit.record(method, session.caller, outcome=outcome, **details(request))


def details(request: Message) -> dict[str, Detail]:
    """The fields that are set, as short text; neither tokens nor keys."""
    return {field.name: _shown(value) for field, value in request.ListFields() if field.name not in _SECRET}


def _shown(value: Any) -> Detail:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value[:_SHOWN_BYTES].hex()
    if isinstance(value, Message):
        return " ".join(f"{name}={shown}" for name, shown in details(value).items())
    if hasattr(value, "items"):
        return " ".join(f"{k}={'...' if k in _MAY_BE_SECRET else _shown(item)}" for k, item in sorted(value.items()))
    return " ".join(str(_shown(item)) for item in value[:_SHOWN_BYTES])


def refusal(audit: AuditLog, method: str, peer: str, error: BaseException, caller: Caller | None) -> None:
    """Put a refusal on record, if the error is one."""
    if isinstance(error, SessionEnded):  # its client has left, and was refused nothing
        return
    if isinstance(error, PermissionDenied):
        audit.refused(method, peer, str(error), caller)
    elif isinstance(error, Unauthenticated):  # what it named need not be its own
        audit.refused(method, peer, str(error))
