"""What only gRPC has: health, reflection, TLS, sessions without an end of file, bytes inside messages."""

import asyncio
import os
import stat

import grpc
import pytest
import xxhash
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.rpc.remote_sessions import SESSION_METADATA
from kvstored.store.outcomes import HIT
from kvstored.testing.contract import SETTINGS
from kvstored.testing.contract_client import (
    ACME,
    RIVAL,
    VIEWER,
    CallFailed,
    block,
    chain,
    contains,
    get,
    open_namespace,
    packed,
    reserve,
)
from kvstored.testing.contract_transports import (
    UNAUTHENTICATED,
    GrpcClient,
    SocketClient,
    inline_requests,
    opening_request,
)
from kvstored.testing.daemon_in_loop import check_nothing_held, eventually, serving, tenant
from tests.contract.certificates import Authority

AUTHORITY = Authority("kvstored test CA")
SERVER = AUTHORITY.issue("localhost")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def local_channel(daemon):
    return grpc.aio.insecure_channel(f"unix:{daemon.config.server.grpc_socket}")


def tls_channel(daemon, pair=None, authority=AUTHORITY):
    key, chain_ = (pair.key, pair.certificate) if pair else (None, None)
    credentials = grpc.ssl_channel_credentials(authority.certificate, key, chain_)
    return grpc.aio.secure_channel(f"localhost:{daemon.tcp_port}", credentials)


async def opened(daemon, who=ACME, **opening):
    return await GrpcClient.connect(local_channel(daemon), opening_request(who, **opening))


async def refusal(call):
    with pytest.raises((CallFailed, grpc.aio.AioRpcError)) as failed:
        await call
    return failed.value.code if isinstance(failed.value, CallFailed) else failed.value.code().value[0]


@pytest.fixture
async def daemon(tmp_path):
    async with serving(tmp_path, SETTINGS) as running:
        yield running


@pytest.fixture
async def client(daemon):
    made = await opened(daemon)
    yield made
    await made.end()
    check_nothing_held(daemon)


def with_tls(directory, **server):
    return {**SETTINGS, "server": {**SERVER.server_settings(directory), **server}}


# ---- health and reflection ----


async def test_health_is_serving_until_the_daemon_stops(tmp_path):
    async with serving(tmp_path, SETTINGS) as daemon:
        channel = local_channel(daemon)
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "kvstored.v1.KVStore", "kvstored.v1.Admin"):
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status == SERVING
        assert await refusal(stub.Check(health_pb2.HealthCheckRequest(service="other"))) == 5
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        stopping = asyncio.ensure_future(daemon.stop(flush=False))
        assert (await watch.read()).status == NOT_SERVING
        await channel.close()
        await stopping


async def reflected(channel):
    """The services that a server says it has."""
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
    (services,) = [reply.list_services_response.service async for reply in call]
    return {service.name for service in services}


async def test_reflection_is_served_on_the_unix_socket_and_not_on_tcp(tmp_path):
    async with serving(tmp_path, with_tls(tmp_path)) as daemon:
        async with local_channel(daemon) as channel:
            assert {"kvstored.v1.KVStore", "kvstored.v1.Admin"} < await reflected(channel)
        async with tls_channel(daemon) as channel:
            # UNIMPLEMENTED; INTERNAL where the server's refusal overtakes what the stream is still sending.
            assert await refusal(reflected(channel)) in (12, 13)
            stub = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING


async def test_calls_that_meet_the_end_of_their_session_take_nothing(daemon):
    """They are let in while it is open, and served when it is not any more."""
    for number in range(20):
        client = await opened(daemon)
        namespace = await open_namespace(client)
        here, new = chain("here", 2), chain(f"new {number}", 2)
        await client.put(namespace, here)
        closing = client.call("CloseSession", pb.CloseSessionRequest())
        calls = [closing, reserve(client, namespace, new), get(client, [namespace], here), client.put(namespace, new)]
        for outcome in (await asyncio.gather(*calls, return_exceptions=True))[1:]:
            assert not isinstance(outcome, BaseException) or getattr(outcome, "code", None) == UNAUTHENTICATED, outcome
        await client.end()
        await eventually(lambda: not any(daemon.context.store.held().values()))
        check_nothing_held(daemon)


# ---- who is calling ----


async def test_a_token_decides_who_calls_over_tls(tmp_path):
    async with serving(tmp_path, with_tls(tmp_path)) as daemon:
        client = await GrpcClient.connect(tls_channel(daemon), opening_request(RIVAL))
        assert client.opened.tenant == RIVAL
        await client.end()
        bearer = pb.OpenSessionRequest(protocol_min=1, protocol_max=1)
        async with tls_channel(daemon) as channel:
            metadata = (("authorization", f"Bearer token of {ACME}"),)
            reply = await GrpcClient(channel).method("OpenSession")(bearer, metadata=metadata)
            assert reply.tenant == ACME
            assert await refusal(GrpcClient(channel).method("OpenSession")(bearer)) == 16
        assert await refusal(GrpcClient.connect(tls_channel(daemon), opening_request("nobody"))) == 16


async def test_a_client_certificate_decides_who_calls(tmp_path):
    (tmp_path / "ca.pem").write_bytes(AUTHORITY.certificate)
    settings = with_tls(tmp_path, tls_client_ca=tmp_path / "ca.pem")
    settings["tenants"] = [{"name": "certified", "certificates": ["engine-1"]}, *SETTINGS["tenants"]]
    anonymous = pb.OpenSessionRequest(protocol_min=1, protocol_max=1)
    async with serving(tmp_path, settings) as daemon:
        known, unknown = AUTHORITY.issue("engine-1"), AUTHORITY.issue("engine-2")
        client = await GrpcClient.connect(tls_channel(daemon, known), anonymous)
        assert client.opened.tenant == "certified"
        await client.end()
        assert await refusal(GrpcClient.connect(tls_channel(daemon, unknown), anonymous)) == 16
        with_token = await GrpcClient.connect(tls_channel(daemon, unknown), opening_request(ACME))
        assert with_token.opened.tenant == ACME
        await with_token.end()
        stranger = Authority("another CA").issue("engine-1")
        assert await refusal(GrpcClient.connect(tls_channel(daemon, stranger), anonymous)) == 14
        assert await refusal(GrpcClient.connect(tls_channel(daemon), opening_request(ACME))) == 14


async def test_tcp_is_nothing_without_tls(tmp_path):
    async with serving(tmp_path, with_tls(tmp_path)) as daemon:
        channel = grpc.aio.insecure_channel(f"localhost:{daemon.tcp_port}")
        assert await refusal(GrpcClient.connect(channel, opening_request(ACME))) == 14


async def test_without_tokens_the_unix_socket_is_the_daemons_own_users_alone(tmp_path):
    settings = {"tenants": [{"name": "own", "uids": [os.geteuid()]}], "server": {"socket_mode": "0666"}}
    async with serving(tmp_path, settings) as daemon:
        assert stat.S_IMODE(daemon.config.server.grpc_socket.stat().st_mode) == 0o600
        client = await GrpcClient.connect(local_channel(daemon), pb.OpenSessionRequest(protocol_min=1, protocol_max=1))
        assert client.opened.tenant == "own"
        await client.end()


async def test_with_tokens_the_unix_socket_speaks_for_nobody(tmp_path):
    settings = {"tenants": [{"name": "own", "uids": [os.geteuid()]}, tenant(ACME)]}
    async with serving(tmp_path, settings) as daemon:
        anonymous = pb.OpenSessionRequest(protocol_min=1, protocol_max=1)
        assert await refusal(GrpcClient.connect(local_channel(daemon), anonymous)) == 16
        assert await refusal(opened(daemon, "nobody")) == 16
        await (await opened(daemon)).end()


async def test_calls_without_a_session_are_refused(daemon, client):
    for metadata in ((), ((SESSION_METADATA, b""),), ((SESSION_METADATA, bytes(16)),), (("kvstored-session", "x"),)):
        for method, request in (("Status", pb.StatusRequest()), ("PutInline", inline_requests(1, chain("a", 1)))):
            assert await refusal(client.method(method)(request, metadata=metadata)) == 16
        request = pb.GetInlineRequest(namespace_id=1, **packed(chain("a", 1)))
        assert await refusal(client.method("GetInline")(request, metadata=metadata).read()) == 16


async def test_the_id_of_a_session_on_the_other_transport_is_no_session_here(daemon, client):
    other = await SocketClient.connect(str(daemon.config.server.session_socket), opening_request(ACME))
    metadata = ((SESSION_METADATA, other.opened.session_id),)
    assert await refusal(client.method("Status")(pb.StatusRequest(), metadata=metadata)) == 16
    await other.end()


async def test_a_closed_session_is_no_session(client):
    await client.call("CloseSession", pb.CloseSessionRequest())
    assert await refusal(client.call("Status", pb.StatusRequest())) == 16
    client._ended = True
    await client._channel.close()


# ---- sessions without an end of file ----


async def test_an_idle_session_ends_and_gives_back_what_it_held(tmp_path):
    async with serving(tmp_path, {**SETTINGS, "server": {"idle_timeout_s": 600}}) as daemon:
        idle, busy = await opened(daemon), await opened(daemon)
        assert idle.opened.idle_timeout_ms == 600_000
        namespace = await open_namespace(idle)
        await idle.put(namespace, chain("a", 1))
        await get(idle, [namespace], chain("a", 1))
        await reserve(idle, namespace, chain("b", 1))
        theirs = await open_namespace(busy)
        reserved = await reserve(busy, theirs, chain("c", 1))
        # One long call is not idleness, however long it takes.
        waiting = asyncio.ensure_future(get(busy, [theirs], chain("c", 1), wait_ms=60_000))
        await eventually(lambda: daemon._grpc._sessions._calls)
        sessions = {session.session_id: session for session in daemon.context.store.parts.sessions}
        for session in sessions.values():
            session.last_seen_s -= 1000
        await eventually(lambda: daemon.context.store.held()["sessions"] == 1)
        assert daemon.context.store.held()["leases"] == 0
        assert await contains(busy, theirs, chain("b", 1)) == bytes([0])
        assert await refusal(idle.call("KeepAlive", pb.KeepAliveRequest())) == 16
        daemon.context.store.writes.abort(sessions[busy.opened.session_id], reserved.reservation_id, [])
        assert (await waiting).blocks == 0
        await busy.call("KeepAlive", pb.KeepAliveRequest())
        await busy.end()


async def test_calls_of_one_session_at_once_are_limited(tmp_path):
    limits = {**SETTINGS["limits"], "requests_in_flight": 2}
    async with serving(tmp_path, {**SETTINGS, "limits": limits}) as daemon:
        client = await opened(daemon)
        namespace = await open_namespace(client)
        reserved = await reserve(client, namespace, chain("a", 1))
        waiting = [asyncio.ensure_future(get(client, [namespace], chain("a", 1), wait_ms=60_000)) for _ in range(3)]
        done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert [task.exception().code for task in done] == [8]
        daemon.context.store.writes.abort(session_of(daemon), reserved.reservation_id, [])
        assert [reply.blocks for reply in await asyncio.gather(*pending)] == [0, 0]
        await client.end()


def session_of(daemon):
    (session,) = daemon.context.store.parts.sessions
    return session


# ---- clients that leave ----


async def test_what_a_get_took_for_a_client_that_left_is_given_back(daemon, client):
    namespace = await open_namespace(client)
    reserved = await reserve(client, namespace, chain("a", 1))
    request = pb.GetRequest(namespace_ids=[namespace], wait_ms=60_000, **packed(chain("a", 1)))
    call = client.method("Get")(request, metadata=client._metadata)
    await asyncio.sleep(0.1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    writer = await SocketClient.connect(str(daemon.config.server.session_socket), opening_request(ACME))
    theirs = await open_namespace(writer)
    await client.call("Abort", pb.AbortRequest(reservation_id=reserved.reservation_id))
    assert await writer.put(theirs, chain("a", 1)) == bytes([HIT])
    await writer.end()
    await eventually(lambda: not daemon.context.store.held()["leases"])


async def test_a_get_whose_client_left_while_it_was_served_holds_nothing(daemon, client, monkeypatch):
    namespace = await open_namespace(client)
    await client.put(namespace, chain("a", 1))
    reads, started, go_on = daemon.context.store.reads, asyncio.Event(), asyncio.Event()
    real = reads.get

    async def slow(*args):
        started.set()
        await go_on.wait()
        return real(*args)

    monkeypatch.setattr(reads, "get", slow)
    request = pb.GetRequest(namespace_ids=[namespace], **packed(chain("a", 1)))
    call = client.method("Get")(request, metadata=client._metadata)
    await started.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await client.call("KeepAlive", pb.KeepAliveRequest())
    go_on.set()
    await eventually(lambda: daemon.context.store.parts.stats[ACME].blocks_hit == 1)
    await eventually(lambda: not daemon.context.store.held()["leases"])


async def test_the_lease_of_a_read_whose_client_left_ends(daemon, client):
    namespace = await open_namespace(client)
    blocks = chain("a", 6, 900_000)
    for each in blocks:
        await client.put(namespace, [each])
    request = pb.GetInlineRequest(namespace_id=namespace, **packed(blocks))
    call = client.method("GetInline")(request, metadata=client._metadata)
    await call.read()
    assert daemon.context.store.held()["leases"] == 1
    call.cancel()
    await eventually(lambda: not daemon.context.store.held()["leases"])


async def test_a_read_ends_where_its_session_does(daemon, client):
    namespace = await open_namespace(client)
    blocks = chain("a", 6, 900_000)
    for each in blocks:
        await client.put(namespace, [each])
    call = client.method("GetInline")(
        pb.GetInlineRequest(namespace_id=namespace, **packed(blocks)), metadata=client._metadata
    )
    first = await call.read()
    assert first.chunk == blocks[0].data
    daemon.context.store.end_session(session_of(daemon))

    async def the_rest():
        while (part := await call.read()) is not grpc.aio.EOF:
            assert part.chunk == blocks[part.index].data

    assert await refusal(the_rest()) == 5
    client._ended = True
    await client._channel.close()


# ---- bytes inside messages ----


async def test_large_blocks_travel_in_chunks(tmp_path):
    dram = {"capacity_bytes": 16 << 20, "segment_bytes": 8 << 20, "huge_pages": "never", "lock": "never"}
    async with serving(tmp_path, {**SETTINGS, "dram": dram}) as daemon:
        client = await opened(daemon)
        namespace = await open_namespace(client)
        large = block("large", (3 << 20) + 5)
        assert await client.put(namespace, [large, block("small", 1)]) == bytes([HIT, HIT])
        request = pb.GetInlineRequest(namespace_id=namespace, **packed([large, block("small", 1)]))
        parts = [part async for part in client.method("GetInline")(request, metadata=client._metadata)]
        assert [(part.index, len(part.chunk)) for part in parts] == [(0, 1 << 20)] * 3 + [(0, 5), (1, 1)]
        assert b"".join(part.chunk for part in parts[:4]) == large.data
        hashes = [part.content_hash for part in parts]
        assert hashes == [b"", b"", b"", xxhash.xxh3_128_digest(large.data), xxhash.xxh3_128_digest(parts[4].chunk)]
        await client.end()


def header(size_bytes=10, hash_=bytes(32), namespace_id=1):
    return pb.PutInlineRequest(header=pb.PutInlineHeader(namespace_id=namespace_id, hash=hash_, size_bytes=size_bytes))


def piece(data):
    return pb.PutInlineRequest(chunk=data)


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([piece(b"x")], 3),
        ([header(), piece(b"x" * 11)], 3),
        ([header(), piece(b"x" * 9)], 3),
        ([header(), piece(b"x" * 9), header()], 3),
        ([header(), piece(b"")], 3),
        ([header(), piece(b"x" * 10), piece(b"")], 3),
        ([header()], 3),
        ([header(0)], 3),
        ([header((16 << 20) + 1)], 3),
        ([header(2 << 20), piece(bytes((1 << 20) + 1))], 3),
        ([header(hash_=b"short"), piece(b"x" * 10)], 3),
        ([header(hash_=bytes(65)), piece(b"x" * 10)], 3),
        ([header(namespace_id=7), piece(b"x" * 10)], 5),
    ],
)
async def test_a_stream_that_makes_no_sense_is_refused_and_the_session_goes_on(client, messages, code):
    namespace = await open_namespace(client)
    assert namespace == 1
    assert await refusal(client.method("PutInline")(iter(messages), metadata=client._metadata)) == code
    assert await client.put(namespace, chain("a", 2)) == bytes([HIT, HIT])


async def test_no_blocks_in_a_stream_are_no_outcomes(client):
    reply = await client.method("PutInline")(iter([]), metadata=client._metadata)
    assert reply.outcomes == b""


async def test_a_reader_reads_inline_and_does_not_write(daemon):
    viewer = await opened(daemon, VIEWER)
    namespace = await open_namespace(viewer)
    assert await refusal(viewer.put(namespace, chain("a", 1))) == 7
    assert await viewer.read(namespace, [chain("a", 1)[0].hash]) == []
    await viewer.end()


async def test_a_message_over_the_limit_is_refused_and_the_session_goes_on(client):
    namespace = await open_namespace(client)
    request = pb.LookupRequest(namespace_ids=[namespace], hashes=bytes(5 << 20), hash_bytes=32)
    assert await refusal(client.call("Lookup", request)) == 8
    await client.call("KeepAlive", pb.KeepAliveRequest())


# ---- the socket ----


async def test_a_second_daemon_does_not_take_the_first_ones_sockets(tmp_path):
    (tmp_path / "second").mkdir()
    async with serving(tmp_path, SETTINGS) as first:
        taken = first.config.server.grpc_socket
        with pytest.raises(OSError, match="another process serves"):
            async with serving(tmp_path / "second", {**SETTINGS, "server": {"grpc_socket": taken}}):
                pass
        assert taken.exists()
        client = await opened(first)
        await client.end()


async def test_a_tcp_port_in_use_is_said(tmp_path):
    (tmp_path / "second").mkdir()
    async with serving(tmp_path, with_tls(tmp_path)) as first:
        settings = with_tls(tmp_path / "second", tcp_address=f"localhost:{first.tcp_port}")
        settings["server"] |= {k: v for k, v in SERVER.server_settings(tmp_path).items() if k != "tcp_address"}
        with pytest.raises(OSError, match=f"cannot listen on localhost:{first.tcp_port}"):
            async with serving(tmp_path / "second", settings):
                pass
