"""What goes on record of calls, over each transport."""

import json

import grpc
import pytest
from kvstored_proto import frames
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.rpc import acts, roles
from kvstored.testing.contract import SETTINGS
from kvstored.testing.contract_client import ACME, ROOT, CallFailed, open_namespace
from kvstored.testing.contract_transports import GrpcClient, SocketClient, opening_request
from kvstored.testing.daemon_in_loop import eventually, serving, token_of
from kvstored.testing.waiting import turns


@pytest.fixture
async def daemon(tmp_path):
    async with serving(tmp_path, SETTINGS) as running:
        yield running


@pytest.fixture(params=["session", "grpc"])
def connect(request, daemon):
    server = daemon.config.server

    async def connected(request_):
        if request.param == "session":
            return await SocketClient.connect(str(server.session_socket), request_)
        return await GrpcClient.connect(grpc.aio.insecure_channel(f"unix:{server.grpc_socket}"), request_)

    return connected


async def records(daemon):
    audit = daemon.context.audit
    await audit.settled()
    lines = audit.read(1000)
    assert not any(token_of(name).encode() in line for line in lines for name in (ACME, ROOT, "nobody"))
    return [json.loads(line) for line in lines]


async def test_who_leaves_before_an_answer_is_not_refused(daemon):
    """The call has its turn when its session has ended."""
    client = await SocketClient.connect(str(daemon.config.server.session_socket), opening_request(ACME))
    namespace_id = await open_namespace(client)
    request = pb.ContainsRequest(namespace_id=namespace_id, hashes=bytes(32), hash_bytes=32)
    asked = frames.encode(pb.OPERATION_CONTAINS, 1000, request.SerializeToString(), frames.ONE_WAY)
    await client._wire.send(asked + frames.encode(pb.OPERATION_CLOSE_SESSION, 1001, b"", frames.ONE_WAY))
    await eventually(lambda: not len(daemon.context.store.parts.sessions))
    await turns()
    await client.end()
    assert await records(daemon) == []


async def test_an_act_and_how_it_ended(daemon, connect):
    client = await connect(opening_request(ROOT))
    await client.call("Drain", admin.DrainRequest())
    await client.call("Drain", admin.DrainRequest(resume=True))
    with pytest.raises(CallFailed):
        await client.call("Flush", admin.FlushRequest(wait_ms=1))
    await client.call("Verify", admin.VerifyRequest())
    await client.call("ListNamespaces", admin.ListNamespacesRequest())
    found = await records(daemon)
    assert [(r["act"], r["outcome"][:22], r.get("with")) for r in found] == [
        ("Drain", "ok", None),
        ("Drain", "ok", {"resume": True}),
        ("Flush", "there is no lower tier", {"wait_ms": 1}),
        ("Verify", "ok", None),
    ]
    assert {(r["by"]["tenant"], r["by"]["role"], r["by"]["credential"][:6]) for r in found} == {
        (ROOT, "admin", "digest")
    }
    await client.end()


async def test_who_lacks_a_role_and_who_is_nobody(daemon, connect):
    client = await connect(opening_request(ACME))
    with pytest.raises(CallFailed, match="needs the role admin"):
        await client.call("Flush", admin.FlushRequest())
    with pytest.raises(CallFailed):
        await connect(opening_request("nobody"))
    role, nobody = await records(daemon)
    assert (role["act"], role["by"]["tenant"]) == ("Flush", ACME)
    assert role["outcome"].startswith("refused: this needs the role admin")
    assert (nobody["act"], "by" in nobody) == ("OpenSession", False)
    assert nobody["outcome"].startswith("refused: the token is not known")
    await client.end()


def test_every_method_that_needs_the_role_admin_is_recorded_or_only_reads():
    for method, needed in roles.NEEDED.items():
        assert acts.is_recorded(method) == (
            method in acts.ALSO_RECORDED or (needed == roles.ADMIN and method not in acts.ONLY_READ)
        )
    assert all(acts.is_recorded(method) for method in ("Verify", "Flush", "Drain"))
    assert not acts.is_recorded("Get")


def test_neither_tokens_nor_keys_are_among_the_details():
    request = admin.ExplainRequest(hash=b"k" * 16, namespace_digest=b"d" * 16)
    assert acts.details(request) == {"namespace_digest": (b"d" * 16).hex()}


def test_tokens_in_the_wrong_place_are_not_among_the_details():
    request = admin.SetTenantRequest(name="a", fields={"tokens_sha256": "hunter2", "role": "reader"})
    assert acts.details(request) == {"name": "a", "fields": "role=reader tokens_sha256=..."}


async def test_a_token_in_place_of_its_id_is_not_on_record(daemon, connect):
    root = await connect(opening_request(ROOT))
    made = await root.call("AddToken", admin.AddTokenRequest(tenant=ACME))
    for call, request in (
        ("RevokeToken", admin.RevokeTokenRequest(token_id=made.token)),
        ("AddTenant", admin.AddTenantRequest(name=made.token)),
    ):
        with pytest.raises(CallFailed):
            await root.call(call, request)
    await root.end()
    _, _, secret = made.token.split("_", 2)  # which may have a _ in it
    assert secret
    assert secret not in json.dumps(await records(daemon))


async def test_a_log_that_cannot_be_written_stops_nothing_and_is_said(tmp_path):
    (tmp_path / "no directory").write_text("")
    settings = {**SETTINGS, "server": {"audit_log": tmp_path / "no directory" / "audit.jsonl"}}
    async with serving(tmp_path, settings) as daemon:
        client = await SocketClient.connect(str(daemon.config.server.session_socket), opening_request(ROOT))
        await client.call("Verify", admin.VerifyRequest())
        (warning,) = (await client.call("Status", pb.StatusRequest())).warnings
        assert warning.startswith("the audit log is not written")
        await client.end()
