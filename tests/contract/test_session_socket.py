"""What only the session socket has: the opening, descriptors, the end of file, frames that are none."""

import asyncio
import os
import stat

import pytest
from kvstored_proto import frames
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.rpc import session as session_module
from kvstored.testing.contract import SETTINGS
from kvstored.testing.contract_client import ACME, CallFailed, chain, get, open_namespace, reserve
from kvstored.testing.contract_transports import SocketClient, opening_request
from kvstored.testing.daemon_in_loop import eventually, serving
from kvstored.testing.frames_client import ConnectionEnded, FramesClient


@pytest.fixture
async def wire(daemon):
    client = FramesClient(str(daemon.config.server.session_socket))
    yield client
    await client.close()


def opening(**fields):
    return opening_request(ACME, **fields).SerializeToString()


async def opened(daemon, **fields):
    return await SocketClient.connect(str(daemon.config.server.session_socket), opening_request(ACME, **fields))


async def refusal(call):
    with pytest.raises(CallFailed) as failed:
        await call
    return failed.value.code


# ---- the opening ----


async def test_nothing_is_answered_before_a_session_is_open(wire):
    assert await refusal(wire.call(pb.OPERATION_STATUS)) == 16
    assert await refusal(wire.call(pb.OPERATION_OPEN_SESSION, b"\xff\xff")) == 3
    assert await refusal(wire.call(pb.OPERATION_OPEN_SESSION, opening(token="wrong"))) == 16
    assert await refusal(wire.call(pb.OPERATION_OPEN_SESSION, opening(protocol_min=9, protocol_max=9))) == 9
    await wire.call(pb.OPERATION_OPEN_SESSION, opening())
    await wire.call(pb.OPERATION_STATUS)


async def test_a_connection_has_one_session(wire):
    await wire.call(pb.OPERATION_OPEN_SESSION, opening())
    assert await refusal(wire.call(pb.OPERATION_OPEN_SESSION, opening())) == 9
    await wire.call(pb.OPERATION_STATUS)


async def test_nothing_is_sent_before_the_opening_is_answered(daemon, wire):
    first = asyncio.ensure_future(wire.call(pb.OPERATION_OPEN_SESSION, opening(staging_bytes=4 << 20)))
    second = asyncio.ensure_future(wire.call(pb.OPERATION_OPEN_SESSION, opening()))
    assert await refusal(second) == 9
    await first
    assert daemon.context.store.held()["sessions"] == 1


async def test_a_client_that_leaves_during_the_opening_holds_nothing(daemon):
    wire = FramesClient(str(daemon.config.server.session_socket))
    asking = asyncio.ensure_future(wire.call(pb.OPERATION_OPEN_SESSION, opening(staging_bytes=4 << 20)))
    await asyncio.sleep(0)
    await wire.close()
    with pytest.raises(ConnectionEnded):
        await asking
    await eventually(lambda: not daemon.context.store.parts.staging.used_bytes)


async def test_who_opens_no_session_is_sent_away(tmp_path, monkeypatch):
    async with serving(tmp_path, SETTINGS) as daemon:
        talker = FramesClient(str(daemon.config.server.session_socket))
        await talker.call(pb.OPERATION_OPEN_SESSION, opening())
        (connection,) = daemon._sessions.connections
        assert connection._handshake.cancelled(), "who has opened one is not watched any more"
        monkeypatch.setattr(session_module, "HANDSHAKE_TIMEOUT_S", 0.05)
        await FramesClient(str(daemon.config.server.session_socket)).ended
        await talker.call(pb.OPERATION_STATUS)
        await talker.close()


# ---- requests ----


async def test_requests_that_make_no_sense_are_refused_and_the_session_goes_on(wire):
    await wire.call(pb.OPERATION_OPEN_SESSION, opening())
    for operation in (0, 99, 199, 255, 65535, pb.OPERATION_SEGMENTS, pb.OPERATION_SEGMENTS_RETIRED):
        assert await refusal(wire.call(operation)) == 3
    assert await refusal(wire.call(pb.OPERATION_LOOKUP, b"\xff" * 40)) == 3
    assert await refusal(wire.call(pb.OPERATION_SEGMENTS_DROPPED, b"\xff" * 40)) == 3
    await wire.call(pb.OPERATION_STATUS)


async def test_requests_are_answered_though_they_wait_for_each_other(daemon):
    client = await opened(daemon)
    namespace = await open_namespace(client)
    blocks = chain("a", 1)
    reserved = await reserve(client, namespace, blocks)
    waiting = [asyncio.ensure_future(get(client, [namespace], blocks, wait_ms=60_000)) for _ in range(5)]
    await client.call("Abort", pb.AbortRequest(reservation_id=reserved.reservation_id))
    assert [reply.blocks for reply in await asyncio.gather(*waiting)] == [0] * 5
    await client.end()


async def test_past_its_requests_at_once_a_client_waits_but_is_served(tmp_path):
    settings = {**SETTINGS, "limits": {**SETTINGS["limits"], "requests_in_flight": 2}}
    async with serving(tmp_path, settings) as daemon:
        client, other = await opened(daemon), await opened(daemon)
        namespace = await open_namespace(client)
        blocks = chain("a", 1)
        reserved = await reserve(client, namespace, blocks)
        waiting = [asyncio.ensure_future(get(client, [namespace], blocks, wait_ms=60_000)) for _ in range(7)]
        await eventually(lambda: any(connection._tasks for connection in daemon._sessions.connections))
        await other.call("Status", pb.StatusRequest())
        connection = next(c for c in daemon._sessions.connections if c.session is not None and c._tasks)
        assert len(connection._tasks) <= 2
        daemon.context.store.writes.abort(connection.session, reserved.reservation_id, [])
        assert [reply.blocks for reply in await asyncio.gather(*waiting)] == [0] * 7
        await client.end()
        await other.end()


async def test_one_way_requests_are_served_and_not_answered(wire):
    await wire.call(pb.OPERATION_OPEN_SESSION, opening())
    await wire.send(frames.encode(pb.OPERATION_KEEP_ALIVE, 1_000_000, b"", frames.ONE_WAY))
    await wire.send(frames.encode(12345, 1_000_001, b"", frames.ONE_WAY))
    await wire.call(pb.OPERATION_STATUS)  # an answer to either would have been unexpected before this one


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 64, frames.HEADER.pack((1 << 20) + 1, 1, 0, 0, 1), frames.HEADER.pack(0, 2, 0, 3, 1)],
    ids=["noise", "too long", "descriptors that did not come"],
)
async def test_broken_frames_end_the_connection_and_what_it_held(daemon, wire, garbage):
    await wire.call(pb.OPERATION_OPEN_SESSION, opening())
    await wire.send(garbage)
    await wire.ended
    assert daemon.context.store.held()["sessions"] == 0


# ---- descriptors ----


async def test_descriptors_come_once_and_before_what_names_them(daemon):
    client = await opened(daemon)
    namespace = await open_namespace(client)
    blocks = chain("a", 20)
    await client.put(namespace, blocks)
    assert not client._wire.segments
    await get(client, [namespace], blocks)
    assert len(client._wire.segments) == 2
    await get(client, [namespace], blocks)
    await client.end()


async def test_the_staging_comes_before_the_opening_is_answered_and_is_as_large_as_told(wire):
    reply = pb.OpenSessionReply.FromString(await wire.call(pb.OPERATION_OPEN_SESSION, opening(staging_bytes=5000)))
    assert reply.staging_bytes == len(wire.staging) == 8192


async def test_no_staging_is_made_where_none_is_wanted(wire):
    reply = pb.OpenSessionReply.FromString(await wire.call(pb.OPERATION_OPEN_SESSION, opening(staging_bytes=0)))
    assert (reply.staging_bytes, wire.staging) == (0, None)


async def test_without_room_for_staging_a_session_opens_without(tmp_path):
    limits = {**SETTINGS["limits"], "staging_bytes_per_session": 1 << 20, "staging_bytes_total": 2 << 20}
    async with serving(tmp_path, {**SETTINGS, "limits": limits}) as daemon:
        clients = [await opened(daemon) for _ in range(2)]
        assert [client.opened.staging_bytes for client in clients] == [1 << 20, 0]
        for client in clients:
            await client.end()


async def test_descriptors_that_cannot_be_had_end_the_connection(daemon, monkeypatch):
    client = await opened(daemon)
    namespace = await open_namespace(client)
    await client.put(namespace, chain("a", 1))

    def refused(fd):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(session_module.os, "dup", refused)
    with pytest.raises(ConnectionEnded):
        await get(client, [namespace], chain("a", 1))
    assert daemon.context.store.held()["leases"] == 0


# ---- the end ----


async def test_closing_a_session_ends_the_connection_after_the_reply(daemon, wire):
    await wire.call(pb.OPERATION_OPEN_SESSION, opening())
    reply = pb.CloseSessionReply.FromString(await wire.call(pb.OPERATION_CLOSE_SESSION))
    assert reply.boot_id == daemon.context.boot_id
    await wire.ended
    assert daemon.context.store.held()["sessions"] == 0


async def test_sessions_are_limited(tmp_path):
    settings = {**SETTINGS, "server": {"max_sessions": 2}}
    async with serving(tmp_path, settings) as daemon:
        first, second = await opened(daemon), await opened(daemon)
        assert await refusal(opened(daemon)) == 8
        await first.end()
        third = await opened(daemon)
        await second.end()
        await third.end()


async def test_the_sockets_have_their_modes_and_go_with_the_daemon(tmp_path):
    async with serving(tmp_path, {**SETTINGS, "server": {"socket_mode": "0640"}}) as daemon:
        server = daemon.config.server
        for path in (server.session_socket, server.grpc_socket):
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o640
    assert not list(tmp_path.iterdir())
