"""The admin operations on tenants and tokens, and reading the audit log. All of them need the role admin."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

from google.protobuf.message import Message
from kvstored_proto.v1 import admin_pb2 as pb

from kvstored.catalog.leases import Session
from kvstored.config.schema import Tenant
from kvstored.errors import FailedPrecondition, NotFound
from kvstored.rpc.context import Context
from kvstored.rpc.identity import DIGEST_SHOWN
from kvstored.rpc.paging import ANSWER_BYTES_MAX, ITEM_BYTES, Page, after
from kvstored.tenancy.audit_log import RECORDS_PER_READ_MAX
from kvstored.tenancy.tokens import Token

AUDIT_LINES: Final = 100


# ---- tenants ----


async def _add_tenant(context: Context, session: Session, request: pb.AddTenantRequest) -> Message:
    tenant = await context.changes.add(request.name, request.fields)
    return pb.TenantReply(boot_id=context.boot_id, tenant=_active(context, tenant))


async def _set_tenant(context: Context, session: Session, request: pb.SetTenantRequest) -> Message:
    tenant = await context.changes.set(request.name, request.fields, request.reset)
    return pb.TenantReply(boot_id=context.boot_id, tenant=_active(context, tenant))


async def _remove_tenant(context: Context, session: Session, request: pb.RemoveTenantRequest) -> Message:
    counters = context.store.parts.counters
    before = counters["sessions_disowned"]
    await context.changes.remove(request.name)
    context.departures.begin(request.name)
    return pb.RemoveTenantReply(boot_id=context.boot_id, sessions_ended=counters["sessions_disowned"] - before)


def _list_tenants(context: Context, session: Session, request: pb.ListTenantsRequest) -> Message:
    tenants = context.store.parts.tenants
    removed = [name for name, change in tenants.changes.tenants.items() if change.removed]
    states = {name: "removed" for name in removed if name in tenants.configured}
    states |= dict.fromkeys(tenants.changes.leaving, "leaving")
    wanted = [name for name in {**states, **dict.fromkeys(tenants.names)} if request.name in ("", name)]
    if request.name and not wanted:
        raise NotFound(f"there is no tenant {request.name!r}: `kvstorectl tenant ls` shows them")
    page: Page[pb.TenantInfo] = Page(request.limit)
    for key, name in after(wanted, str.encode, request.cursor):
        tenant = tenants.get(name)
        info = pb.TenantInfo(name=name, state=states[name]) if tenant is None else _active(context, tenant)
        if not page.add(key, info):
            break
    return pb.ListTenantsReply(boot_id=context.boot_id, tenants=page.items, cursor=page.cursor)


def _active(context: Context, tenant: Tenant) -> pb.TenantInfo:
    parts = context.store.parts
    values = tenant.model_dump(mode="json", exclude={"name"})
    values["tokens_sha256"] = [f"{digest[:DIGEST_SHOWN]}..." for digest in tenant.tokens_sha256]
    return pb.TenantInfo(
        name=tenant.name,
        state="active",
        fields={key: json.dumps(value) for key, value in values.items()},
        origins={key: parts.tenants.origin(tenant.name, key) for key in values},
        tokens=[_token_info(context, token) for token in parts.tenants.tokens if token.tenant == tenant.name],
        sessions=sum(session.caller.tenant == tenant.name for session in parts.sessions),
    )


# ---- tokens ----


async def _add_token(context: Context, session: Session, request: pb.AddTokenRequest) -> Message:
    token, text = await context.changes.add_token(request.tenant, request.expires_in_s, request.label)
    return pb.TokenReply(boot_id=context.boot_id, info=_token_info(context, token), token=text)


async def _rotate_token(context: Context, session: Session, request: pb.RotateTokenRequest) -> Message:
    token, text = await context.changes.rotate(request.token_id, request.grace_s, request.expires_in_s)
    return pb.TokenReply(boot_id=context.boot_id, info=_token_info(context, token), token=text)


async def _revoke_token(context: Context, session: Session, request: pb.RevokeTokenRequest) -> Message:
    counters = context.store.parts.counters
    before = counters["sessions_disowned"]
    await context.changes.revoke(request.token_id)
    return pb.RevokeTokenReply(boot_id=context.boot_id, sessions_ended=counters["sessions_disowned"] - before)


def _token_info(context: Context, token: Token) -> pb.TokenInfo:
    return pb.TokenInfo(
        id=token.token_id,
        tenant=token.tenant,
        label=token.label,
        created_s=token.created_s,
        expires_s=token.expires_s,
        expired=token.expired(context.clock.wall()),
    )


# ---- keys ----


async def _rekey_tenant(context: Context, session: Session, request: pb.RekeyTenantRequest) -> Message:
    if request.tenant not in context.store.parts.tenants:
        raise NotFound(f"there is no tenant {request.tenant!r}: `kvstorectl tenant ls` shows them")
    if context.keys is None:
        raise FailedPrecondition("there is no lower tier whose blocks could be encrypted: set nvme.paths")
    return pb.RekeyTenantReply(boot_id=context.boot_id, keys=await context.keys.rekey(request.tenant))


# ---- the audit log ----


async def _read_audit(context: Context, session: Session, request: pb.ReadAuditRequest) -> Message:
    limit = min(request.limit or AUDIT_LINES, RECORDS_PER_READ_MAX)
    await context.audit.settled()
    found = await asyncio.to_thread(context.audit.read, limit, request.after)
    lines: list[str] = []
    left_bytes = ANSWER_BYTES_MAX
    for line in reversed(found):
        text = line.decode(errors="replace")  # of a damaged line three bytes for one
        left_bytes -= len(text.encode()) + ITEM_BYTES
        if left_bytes < 0:
            break
        lines.append(text)
    return pb.ReadAuditReply(boot_id=context.boot_id, lines=reversed(lines))


SERVED: Final[dict[str, tuple[type[Message], Callable[[Context, Session, Any], Message | Awaitable[Message]]]]] = {
    "AddTenant": (pb.AddTenantRequest, _add_tenant),
    "SetTenant": (pb.SetTenantRequest, _set_tenant),
    "RemoveTenant": (pb.RemoveTenantRequest, _remove_tenant),
    "ListTenants": (pb.ListTenantsRequest, _list_tenants),
    "AddToken": (pb.AddTokenRequest, _add_token),
    "RotateToken": (pb.RotateTokenRequest, _rotate_token),
    "RevokeToken": (pb.RevokeTokenRequest, _revoke_token),
    "RekeyTenant": (pb.RekeyTenantRequest, _rekey_tenant),
    "ReadAudit": (pb.ReadAuditRequest, _read_audit),
}
