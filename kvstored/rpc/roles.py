"""Which role may call what: one line a method of the schema, for both transports.

`reader` reads what its tenant has, `tenant` writes too, `admin` sees and manages all tenants.
What a caller is shown is scoped by its tenant besides: a role only says whether it may ask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvstored.catalog.leases import Session

Handler = Callable[[Any, Session, Any], Any]

NOBODY: Final = ""  # no session yet: the call that makes one
READER: Final = "reader"
TENANT: Final = "tenant"
ADMIN: Final = "admin"

# The least that a caller must be. A method without a line is a KeyError when the daemon is imported.
NEEDED: Final[dict[str, str]] = {
    "OpenSession": NOBODY,
    "KeepAlive": READER,
    "CloseSession": READER,
    "OpenNamespace": READER,
    "Lookup": READER,
    "Contains": READER,
    "Reserve": TENANT,
    "Commit": TENANT,
    "Abort": TENANT,
    "Get": READER,
    "Attach": READER,
    "Release": READER,
    "Prefetch": READER,
    "PollPrefetch": READER,
    "CancelPrefetch": READER,
    "Touch": READER,
    "Delete": TENANT,
    "Status": READER,
    "RegisterMemory": READER,
    "UnregisterMemory": READER,
    "Load": READER,
    "Store": TENANT,
    "StoreLayers": TENANT,
    "CancelTransfer": READER,
    "PutInline": TENANT,
    "GetInline": READER,
    "ListNamespaces": READER,
    "ListBlocks": READER,
    "Explain": READER,
    "ExplainChain": READER,
    "ExplainNamespace": READER,
    "Verify": ADMIN,
    "Flush": ADMIN,
    "Drain": ADMIN,
    "AddTenant": ADMIN,
    "SetTenant": ADMIN,
    "RemoveTenant": ADMIN,
    "ListTenants": ADMIN,
    "AddToken": ADMIN,
    "RotateToken": ADMIN,
    "RevokeToken": ADMIN,
    "RekeyTenant": ADMIN,
    "ReadAudit": ADMIN,
    "Purge": TENANT,
    "PurgeStatus": TENANT,
    "KillSession": TENANT,
    "Wear": ADMIN,
    "BumpEpoch": TENANT,
    "ListEpochs": READER,
    "StartTrace": ADMIN,
    "StopTrace": ADMIN,
    "TraceStatus": ADMIN,
    "Policy": ADMIN,
    "SetPolicy": ADMIN,
    "Hint": TENANT,
    "ListPins": READER,
}


def check(session: Session, method: str) -> None:
    """Raises PermissionDenied where the session's role may not call the method."""
    _CHECKS[NEEDED[method]](session)


def guarded(method: str, serve: Handler) -> Handler:
    """The handler behind its check. Where any role will do that is the handler itself, so reads pay nothing."""
    needed = NEEDED[method]
    if needed in (NOBODY, READER):
        return serve
    check_role = _CHECKS[needed]

    def checked(context: Any, session: Session, request: Any) -> Any:
        check_role(session)
        return serve(context, session, request)

    return checked


def _anybody(session: Session) -> None:
    """Every role reads."""


_CHECKS: Final[dict[str, Callable[[Session], None]]] = {
    NOBODY: _anybody,
    READER: _anybody,
    TENANT: Session.check_may_write,
    ADMIN: Session.check_admin,
}
