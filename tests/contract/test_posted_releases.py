"""The session page on the session socket: who gets one, and that what is posted in it is what a frame would do."""

import pytest
from kvstored_proto.page import FEATURE, PAGE_BYTES, RING_WORDS, Poster
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.errors import DeviceError
from kvstored.store import releases
from kvstored.testing.contract_client import chain, get, open_namespace


@pytest.fixture
async def client(connect):
    return await connect(features=[FEATURE])


def post(client, replies):
    with memoryview(client._wire.page) as page:
        poster = Poster(page)
        assert poster.post([lease.lease_id for reply in replies for lease in reply.leases])
        poster._words.release()


async def stored(client, name, count):
    namespace = await open_namespace(client)
    blocks = chain(name, count)
    await client.put(namespace, blocks)
    return namespace, blocks


def leases(daemon):
    return daemon.context.store.held()["leases"]


# ---- who gets one ----


async def test_a_page_comes_before_the_opening_is_answered_to_who_asks_for_it(client):
    assert list(client.opened.features) == [FEATURE]
    assert len(client._wire.page) == PAGE_BYTES


async def test_who_does_not_ask_for_a_page_is_sent_none_and_releases_by_frame(daemon, connect):
    client = await connect(features=["groups"])
    assert list(client.opened.features) == ["groups"]
    assert client._wire.page is None
    namespace, blocks = await stored(client, "a", 2)
    reply = await get(client, [namespace], blocks)
    released = await client.call("Release", pb.ReleaseRequest(lease_ids=[reply.leases[0].lease_id]))
    assert (released.released, leases(daemon)) == (1, 0)


async def test_without_memory_for_a_page_a_session_opens_without_the_feature(connect, monkeypatch):
    def refused():
        raise DeviceError("no memory")

    monkeypatch.setattr(releases, "SessionPage", refused)
    client = await connect(features=[FEATURE, "groups"])
    assert list(client.opened.features) == ["groups"]
    assert client._wire.page is None


async def test_no_two_sessions_share_a_page(connect):
    first, second = await connect(features=[FEATURE]), await connect(features=[FEATURE])
    first._wire.page[-4:] = b"mine"
    assert second._wire.page[-4:] == bytes(4)


async def test_a_page_that_its_client_keeps_shows_and_takes_nothing_after_the_end(daemon, connect):
    client = await connect(features=[FEATURE])
    client._wire.page[-4:] = b"mine"
    with memoryview(client._wire.page) as kept:
        daemon.context.store.end_session(next(iter(daemon.context.store.parts.sessions)))
        assert bytes(kept) == bytes(PAGE_BYTES)


# ---- what is posted ----


@pytest.mark.parametrize("method", ["KeepAlive", "Contains", "Status", "Release"])
async def test_whatever_follows_finds_the_posted_releases_done(daemon, client, method):
    namespace, blocks = await stored(client, "a", 3)
    replies = [await get(client, [namespace], blocks) for _ in range(5)]
    requests = {
        "KeepAlive": pb.KeepAliveRequest(),
        "Contains": pb.ContainsRequest(namespace_id=namespace, hashes=blocks[0].hash, hash_bytes=len(blocks[0].hash)),
        "Status": pb.StatusRequest(),
        "Release": pb.ReleaseRequest(lease_ids=[replies[4].leases[0].lease_id]),
    }
    post(client, replies[:4])
    await client.call(method, requests[method])
    assert leases(daemon) == (0 if method == "Release" else 1)
    await client.call("Release", pb.ReleaseRequest(lease_ids=[replies[4].leases[0].lease_id]))


async def test_releases_by_page_and_by_frame_mix(daemon, client):
    namespace, blocks = await stored(client, "a", 1)
    replies = [await get(client, [namespace], blocks) for _ in range(4)]
    post(client, replies[:2])
    by_frame = pb.ReleaseRequest(lease_ids=[reply.leases[0].lease_id for reply in replies])
    assert (await client.call("Release", by_frame)).released == 2
    assert leases(daemon) == 0


async def test_another_clients_status_knows_of_what_was_just_posted(daemon, connect, client):
    other = await connect(features=[])
    namespace, blocks = await stored(client, "a", 1)
    reply = await get(client, [namespace], blocks)
    post(client, [reply])
    status = await other.call("Status", pb.StatusRequest())
    assert [session.leases for session in status.sessions] == [0, 0]


async def test_a_page_full_of_nonsense_costs_its_session_the_page_only(daemon, connect, client):
    namespace, blocks = await stored(client, "a", 2)
    reply = await get(client, [namespace], blocks)
    bystander = await connect(features=[FEATURE])
    kept = await get(bystander, [await open_namespace(bystander)], blocks)
    for head in (RING_WORDS, 5 * RING_WORDS, (1 << 64) - 1, 0):
        client._wire.page[8:] = head.to_bytes(8, "little") + b"\xff" * (PAGE_BYTES - 16)
        await client.call("KeepAlive", pb.KeepAliveRequest())
    assert daemon.context.store.parts.counters["session_pages_corrupt"]
    assert leases(daemon) == 2
    for one, held in ((client, reply), (bystander, kept)):
        released = await one.call("Release", pb.ReleaseRequest(lease_ids=[held.leases[0].lease_id]))
        assert released.released == 1
