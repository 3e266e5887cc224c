"""Whatever ends a session gives back all that it held, and the histogram `release_seconds` hears of it by its cause."""

import asyncio

import grpc
import pytest
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.store.release_times import Cause
from kvstored.testing.contract import SETTINGS
from kvstored.testing.contract_client import ACME, ROOT, chain, get, open_namespace, packed, reserve
from kvstored.testing.contract_purge import purged
from kvstored.testing.contract_transports import GrpcClient, SocketClient, opening_request
from kvstored.testing.daemon_in_loop import check_nothing_held, eventually, serving


async def holding(client):
    """A client that holds leases, a reservation and, where it has one, staging."""
    namespace = await open_namespace(client)
    await client.put(namespace, chain("a", 40))
    assert (await get(client, [namespace], chain("a", 40))).blocks == 40
    assert (await reserve(client, namespace, chain(f"b {client.opened.session_id.hex()}", 2))).reservation_id
    return client


async def socket_client(daemon, tenant=ACME):
    return await SocketClient.connect(str(daemon.config.server.session_socket), opening_request(tenant))


async def grpc_client(daemon):
    channel = grpc.aio.insecure_channel(f"unix:{daemon.config.server.grpc_socket}")
    return await GrpcClient.connect(channel, opening_request(ACME))


def releases(daemon):
    """How often each cause was noted."""
    return {cause: sum(latency.counts) for cause, latency in daemon.context.metrics.releases.items()}


async def check(daemon, cause, times=1):
    """It is noted once all is back, and all is back."""
    await eventually(lambda: releases(daemon).get(cause, 0) == times)
    held = daemon.context.store.held()
    assert (held["leases"], held["reservations"], held["staging_bytes"]) == (0, 0, 0)


@pytest.fixture
async def daemon(tmp_path):
    async with serving(tmp_path, SETTINGS) as running:
        yield running
        await eventually(lambda: not len(running.context.store.parts.sessions))
        check_nothing_held(running)


async def test_a_client_that_closes_its_session(daemon):
    for connect in (socket_client, grpc_client):
        client = await holding(await connect(daemon))
        await client.call("CloseSession", pb.CloseSessionRequest())
        await eventually(lambda: not len(daemon.context.store.parts.sessions))
        await client.end()
    await check(daemon, Cause.CLOSED, 2)


async def test_a_client_that_is_gone(daemon):
    client = await holding(await socket_client(daemon))
    client._wire._sock.close()
    await check(daemon, Cause.DISCONNECT)


async def test_a_client_that_is_not_heard_of(daemon):
    client = await holding(await grpc_client(daemon))
    daemon.context.store.parts.sessions.get(client.opened.session_id).last_seen_s -= 1000
    await check(daemon, Cause.TIMEOUT)


async def test_a_client_that_breaks_the_protocol(daemon):
    client = await holding(await socket_client(daemon))
    await client._wire.send(b"\xff" * 64)
    await check(daemon, Cause.ERROR)
    await client.end()


async def test_a_session_that_is_killed(daemon):
    root = await socket_client(daemon, ROOT)
    for number, connect in enumerate((socket_client, grpc_client), 1):
        client = await holding(await connect(daemon))
        (victim,) = [s for s in (await root.call("Status", pb.StatusRequest())).sessions if s.tenant == ACME]
        await root.call("KillSession", admin.KillSessionRequest(session_id=victim.id))
        await eventually(lambda number=number: releases(daemon).get(Cause.PREEMPTED) == number)
        await client.end()
    await root.end()
    await check(daemon, Cause.PREEMPTED, 2)


async def test_a_session_that_holds_what_is_purged(daemon):
    client = await holding(await socket_client(daemon))
    root = await socket_client(daemon, ROOT)
    assert (await purged(root, tenant=ACME, deadline_ms=1)).state == "complete"
    await root.end()
    await client.end()
    await check(daemon, Cause.PURGE)


async def test_a_daemon_that_stops(tmp_path):
    async with serving(tmp_path, SETTINGS) as daemon:
        client = await holding(await socket_client(daemon))
        remote = await holding(await grpc_client(daemon))
    assert releases(daemon)[Cause.SHUTDOWN] == 2
    assert not any(daemon.context.store.held().values())
    for each in (client, remote):
        with pytest.raises(Exception):  # noqa: B017, PT011
            await each.call("KeepAlive", pb.KeepAliveRequest())


async def test_a_call_that_is_cancelled(daemon, monkeypatch):
    client = await grpc_client(daemon)
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
    await check(daemon, Cause.CANCEL)
    await client.end()
