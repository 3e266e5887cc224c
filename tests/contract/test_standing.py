"""Changes of tenants at moments that only the inside of a daemon tells."""

import asyncio
import os
import stat

import grpc
import pytest
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.testing.contract import SETTINGS
from kvstored.testing.contract_client import ACME, ROOT, CallFailed
from kvstored.testing.contract_transports import GrpcClient, SocketClient, opening_request
from kvstored.testing.daemon_in_loop import check_nothing_held, serving

ANONYMOUS = pb.OpenSessionRequest(protocol_min=1, protocol_max=1)


async def on_socket(daemon, request):
    return await SocketClient.connect(str(daemon.config.server.session_socket), request)


async def on_grpc(daemon, request):
    return await GrpcClient.connect(grpc.aio.insecure_channel(f"unix:{daemon.config.server.grpc_socket}"), request)


async def test_a_token_that_is_revoked_while_its_session_is_opened_opens_none(tmp_path, monkeypatch):
    async with serving(tmp_path, SETTINGS) as daemon:
        root = await on_socket(daemon, opening_request(ROOT))
        made = await root.call("AddToken", admin.AddTokenRequest(tenant=ACME))
        pool = daemon.context.store.parts.staging
        create, waits, go_on = pool.create, asyncio.Event(), asyncio.Event()

        async def slow(*arguments):
            waits.set()
            await go_on.wait()
            return await create(*arguments)

        monkeypatch.setattr(pool, "create", slow)
        opening = asyncio.create_task(on_socket(daemon, opening_request(ACME, token=made.token)))
        await asyncio.wait_for(waits.wait(), 60)
        revoked = await root.call("RevokeToken", admin.RevokeTokenRequest(token_id=made.info.id))
        assert revoked.sessions_ended == 1
        go_on.set()
        with pytest.raises(CallFailed, match="16: what was shown does not count any more"):
            await opening
        await root.end()
        check_nothing_held(daemon)


async def test_with_the_first_token_the_grpc_socket_speaks_for_nobody_and_never_again(tmp_path):
    settings = {
        "tenants": [{"name": "own", "uids": [os.geteuid()], "role": "admin"}],
        "server": {"socket_mode": "0666"},
    }
    async with serving(tmp_path, settings) as daemon:
        path = daemon.config.server.grpc_socket
        before = await on_grpc(daemon, ANONYMOUS)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        made = await before.call("AddToken", admin.AddTokenRequest(tenant="own"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        by_token = await on_grpc(daemon, opening_request("own", token=made.token))
        await before.call("RevokeToken", admin.RevokeTokenRequest(token_id=made.info.id))
        with pytest.raises(CallFailed, match="16: "):
            await on_grpc(daemon, ANONYMOUS)
        with pytest.raises(CallFailed, match="16: no such session"):
            await by_token.call("Status", pb.StatusRequest())
        assert (await before.call("Status", pb.StatusRequest())).state == "serving"
        await before.end()
        await by_token.end()


async def test_an_answer_to_an_act_comes_after_its_line(tmp_path):
    async with serving(tmp_path, SETTINGS) as daemon:
        root = await on_socket(daemon, opening_request(ROOT))
        for number in range(3):
            await root.call("AddTenant", admin.AddTenantRequest(name=f"t{number}"))
            assert f'"t{number}"'.encode() in daemon.context.audit.read(1)[0]
        await root.end()


async def test_an_identity_that_is_taken_away_ends_its_own_sessions_only(tmp_path):
    settings = {"tenants": [*SETTINGS["tenants"], {"name": "two", "uids": [os.geteuid()]}]}
    async with serving(tmp_path, settings) as daemon:
        root = await on_socket(daemon, opening_request(ROOT))
        by_uid = await on_socket(daemon, pb.OpenSessionRequest(protocol_min=1, protocol_max=1))
        made = await root.call("AddToken", admin.AddTokenRequest(tenant="two"))
        by_token = await on_socket(daemon, opening_request("two", token=made.token))
        await root.call("SetTenant", admin.SetTenantRequest(name="two", fields={"uids": ""}))
        (left,) = [s for s in daemon.context.store.parts.sessions if s.caller.tenant == "two"]
        assert left.caller.credential == f"token {made.info.id}"
        assert (await by_token.call("Status", pb.StatusRequest())).state == "serving"
        for client in (root, by_uid, by_token):
            await client.end()
