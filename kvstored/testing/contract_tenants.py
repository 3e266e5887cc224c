"""The contract of tenants and tokens that an admin changes while the daemon serves; see `contract`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.rpc.admin_tenants import SERVED
from kvstored.store.outcomes import HIT, NO_ROOM
from kvstored.testing.contract_client import (
    ACME,
    RIVAL,
    ROOT,
    VIEWER,
    CallFailed,
    Client,
    Transport,
    chain,
    hashes_of,
    open_namespace,
)
from kvstored.testing.daemon_in_loop import POLL_S

UNAUTHENTICATED, PERMISSION_DENIED, NOT_FOUND, FAILED_PRECONDITION = 16, 7, 5, 9
NEW = "new"
WAIT_S = 60.0


async def token_for(root: Client, tenant: str, **wishes: Any) -> admin.TokenReply:
    """A token that the daemon makes."""
    reply: admin.TokenReply = await root.call("AddToken", admin.AddTokenRequest(tenant=tenant, **wishes))
    return reply


async def tenants_of(root: Client) -> dict[str, admin.TenantInfo]:
    """What is listed, by name."""
    reply: admin.ListTenantsReply = await root.call("ListTenants", admin.ListTenantsRequest())
    return {info.name: info for info in reply.tenants}


async def wait_for(root: Client, condition: Callable[[dict[str, admin.TenantInfo]], bool]) -> None:
    """Wait until the list of tenants is so. Raises TimeoutError."""
    for _ in range(int(WAIT_S / POLL_S)):
        if condition(await tenants_of(root)):
            return
        await asyncio.sleep(POLL_S)
    raise TimeoutError(f"not so within {WAIT_S:g} s")


class TenantContract:
    """Inherit, and provide the fixtures `transport` and `deep_transport`."""

    async def test_a_tenant_is_made_used_and_removed_with_all_that_it_had(self, deep_transport: Transport) -> None:
        root, rival = await deep_transport.connect(ROOT), await deep_transport.connect(RIVAL)
        blocks = chain("mine", 4)
        await rival.put(await open_namespace(rival), blocks)
        await root.call("AddTenant", admin.AddTenantRequest(name=NEW, fields={"dram_limit_bytes": "1GiB"}))
        token = (await token_for(root, NEW, label="ci")).token
        client = await deep_transport.connect(NEW, token=token)
        assert (client.opened.tenant, client.opened.role) == (NEW, "tenant")
        await client.put(await open_namespace(client), blocks)
        await root.call("Flush", admin.FlushRequest())
        info = (await tenants_of(root))[NEW]
        assert (info.state, info.sessions, info.tokens[0].label) == ("active", 1, "ci")
        assert (json.loads(info.fields["dram_limit_bytes"]), info.origins["dram_limit_bytes"]) == (1 << 30, "admin")
        removed = await root.call("RemoveTenant", admin.RemoveTenantRequest(name=NEW))
        assert removed.sessions_ended == 1
        with pytest.raises(CallFailed, match="16: the token is not known"):
            await deep_transport.connect(NEW, token=token)
        await wait_for(root, lambda tenants: NEW not in tenants)
        listed = {
            t.name: (t.dram_blocks, t.nvme_blocks) for t in (await root.call("Status", pb.StatusRequest())).tenants
        }
        assert listed.get(NEW, (0, 0)) == (0, 0)
        assert listed[RIVAL] == (4, 4)
        namespaces = (await root.call("ListNamespaces", admin.ListNamespacesRequest())).namespaces
        assert {space.tenant for space in namespaces} == {RIVAL}
        await root.call("AddTenant", admin.AddTenantRequest(name=NEW))
        again = await deep_transport.connect(NEW, token=(await token_for(root, NEW)).token)
        assert await again.read(await open_namespace(again), hashes_of(blocks)) == []
        assert len(await rival.read(await open_namespace(rival), hashes_of(blocks))) == 4

    async def test_a_change_reaches_what_depends_on_it_at_once(self, transport: Transport) -> None:
        root, acme = await transport.connect(ROOT), await transport.connect(ACME)
        namespace = await open_namespace(acme)
        assert await acme.put(namespace, chain("before", 1)) == bytes([HIT])
        await root.call("SetTenant", admin.SetTenantRequest(name=ACME, fields={"dram_limit_bytes": "0"}))
        assert await acme.put(namespace, chain("after", 1)) == bytes([NO_ROOM])
        await root.call("SetTenant", admin.SetTenantRequest(name=ACME, reset=["dram_limit_bytes"]))
        assert await acme.put(namespace, chain("after", 1)) == bytes([HIT])
        await root.call("SetTenant", admin.SetTenantRequest(name=ACME, fields={"role": "reader"}))
        assert (await tenants_of(root))[ACME].sessions == 0
        assert (await transport.connect(ACME)).opened.role == "reader"

    async def test_two_tokens_count_side_by_side_until_one_is_revoked(self, transport: Transport) -> None:
        root = await transport.connect(ROOT)
        old = await token_for(root, ACME)
        before = await transport.connect(ACME, token=old.token)
        new = await root.call("RotateToken", admin.RotateTokenRequest(token_id=old.info.id, grace_s=3600))
        during = [await transport.connect(ACME, token=token) for token in (old.token, new.token)]
        blocks = chain("a", 1)
        await before.put(await open_namespace(before), blocks)
        for client in during:
            assert len(await client.read(await open_namespace(client), hashes_of(blocks))) == 1
        ended = await root.call("RevokeToken", admin.RevokeTokenRequest(token_id=old.info.id))
        assert ended.sessions_ended == 2
        with pytest.raises(CallFailed, match=str(UNAUTHENTICATED)):
            await transport.connect(ACME, token=old.token)
        assert len(await during[1].read(await open_namespace(during[1]), hashes_of(blocks))) == 1

    async def test_a_session_ends_with_the_time_of_its_token(self, transport: Transport) -> None:
        root = await transport.connect(ROOT)
        for lifetime_s in (0.3, 3.0, 30.0):  # long enough to connect, however busy the machine is
            token = (await token_for(root, ACME, expires_in_s=lifetime_s)).token
            with contextlib.suppress(CallFailed):
                await transport.connect(ACME, token=token)
                break
        else:
            pytest.fail("a token that has not expired opens a session")
        await wait_for(root, lambda tenants: not tenants[ACME].sessions)
        with pytest.raises(CallFailed, match="16: the token has expired"):
            await transport.connect(ACME, token=token)
        assert all(info.expired for info in (await tenants_of(root))[ACME].tokens)

    @pytest.mark.parametrize("tenant", [ACME, VIEWER])
    async def test_it_all_needs_the_role_admin_and_nothing_is_told(self, transport: Transport, tenant: str) -> None:
        client = await transport.connect(tenant)
        for method, (request, _) in SERVED.items():
            for filled in (request(), _naming(request, RIVAL), _naming(request, "nobody")):
                with pytest.raises(CallFailed) as refused:
                    await client.call(method, filled)
                assert refused.value.code == PERMISSION_DENIED
                assert refused.value.message == f"this needs the role admin; the caller's is {client.opened.role}"

    async def test_what_is_not_there_and_what_would_lock_everybody_out_is_refused(self, transport: Transport) -> None:
        root = await transport.connect(ROOT)
        for method, request, code in (
            ("AddTenant", admin.AddTenantRequest(name=ACME), FAILED_PRECONDITION),
            ("RemoveTenant", admin.RemoveTenantRequest(name=ROOT), FAILED_PRECONDITION),
            ("RemoveTenant", admin.RemoveTenantRequest(name="nobody"), NOT_FOUND),
            ("RotateToken", admin.RotateTokenRequest(token_id="nobody's"), NOT_FOUND),
            ("RevokeToken", admin.RevokeTokenRequest(token_id="nobody's"), NOT_FOUND),
            ("ListTenants", admin.ListTenantsRequest(name="nobody"), NOT_FOUND),
        ):
            with pytest.raises(CallFailed) as refused:
                await root.call(method, request)
            assert refused.value.code == code

    async def test_two_admins_at_once_lose_nothing_of_each_other(self, transport: Transport) -> None:
        admins = [await transport.connect(ROOT), await transport.connect(ROOT)]
        names = [f"t{number}" for number in range(8)]
        adding = [
            admins[number % 2].call("AddTenant", admin.AddTenantRequest(name=name))
            for number, name in enumerate([*names, *names])
        ]
        results = await asyncio.gather(*adding, return_exceptions=True)
        assert sum(isinstance(result, CallFailed) for result in results) == len(names)
        assert set(names) <= (await tenants_of(admins[0])).keys()

    async def test_the_audit_log_tells_who_did_it_and_no_secret(self, transport: Transport) -> None:
        root = await transport.connect(ROOT, client_name="by hand")
        reply = await token_for(root, ACME)
        await root.call("RevokeToken", admin.RevokeTokenRequest(token_id=reply.info.id))
        lines = list((await root.call("ReadAudit", admin.ReadAuditRequest(limit=2))).lines)
        assert not any(reply.token in line or reply.token[-43:] in line for line in lines)
        added, revoked = (json.loads(line) for line in lines)
        assert (added["act"], added["by"]["client"], added["with"]) == ("AddToken", "by hand", {"tenant": ACME})
        assert (revoked["act"], revoked["with"]) == ("RevokeToken", {"token_id": reply.info.id})
        later = await root.call("ReadAudit", admin.ReadAuditRequest(after=added["seq"]))
        assert list(later.lines) == lines[1:]


def _naming(request: type[Any], name: str) -> Any:
    """The request with every text field set to a name."""
    fields = request.DESCRIPTOR.fields
    return request(**{f.name: name for f in fields if f.type == f.TYPE_STRING and f.name != "reset"})
