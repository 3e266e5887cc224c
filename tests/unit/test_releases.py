"""Releases that clients post in their session pages: when they are seen, and what a bad page does."""

import asyncio
import gc
import os

import pytest
from kvstored_proto.page import RING_WORDS, Poster

from kvstored.catalog.leases import Caller
from kvstored.store import endings, releases
from kvstored.store.outcomes import HIT, RESERVED, THROTTLED
from kvstored.store.parts import Limits
from kvstored.testing import process_figures
from kvstored.testing.daemon_in_loop import eventually
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import BLOCK_BYTES, STAGING_BYTES, Node, chain


class Paged:
    """A session with a page, and the client's half of it."""

    def __init__(self, node, session):
        self.node = node
        self.session = session
        self.poster = Poster(session.page.memory)

    @classmethod
    async def open(cls, node, tenant="alice", *, create_group=False, join_group=b""):
        caller = Caller(tenant, "tenant", "session")
        session = await node.store.open_session(
            caller, staging_bytes=STAGING_BYTES, create_group=create_group, join_group=join_group, page=True
        )
        return cls(node, session)

    async def lease(self, space, hashes):
        held = await self.node.get(self.session, space, hashes)
        return [lease.lease_id for lease in held.leases]

    def post(self, lease_ids):
        assert self.poster.post(lease_ids)

    @property
    def leases(self):
        return len(self.session.group.leases)


@pytest.fixture(autouse=True)
def seldom_looked_at(monkeypatch):
    """What is posted is found by who looks for it, not by a timer in the midst of a slow test."""
    gc.collect()  # what earlier tests left gives back its descriptors now
    monkeypatch.setattr(releases, "LOOK_EVERY_S", 3600.0)


@pytest.fixture
async def node():
    async with Node() as made:
        yield made


@pytest.fixture
async def client(node):
    return await Paged.open(node)


async def stored(client, name, count):
    space = await client.node.space(client.session)
    hashes = chain(name, count)
    assert await client.node.put(client.session, space, hashes) == bytes([RESERVED]) * count
    return space, hashes


# ---- what is taken ----


async def test_a_posted_lease_ends_and_its_blocks_are_touched(client):
    space, hashes = await stored(client, "a", 3)
    client.post(await client.lease(space, hashes))
    assert client.leases == 1
    assert client.node.store.releases.take(client.session)
    assert client.leases == 0
    assert not any(entry.holds for entry in space.entries.values())
    order = client.node.parts.catalog.order("alice", BLOCK_BYTES)
    assert next(iter(order)).hash == hashes[-1]


async def test_ids_that_the_group_does_not_hold_are_passed_over(client):
    space, hashes = await stored(client, "a", 1)
    mine = await client.lease(space, hashes)
    other = await Paged.open(client.node)
    other.post([*mine, 0, 12345, (1 << 63) - 1])
    client.node.store.releases.take_all()
    assert client.leases == 1
    client.post(mine * 2)
    client.node.store.releases.take_all()
    assert client.leases == 0


async def test_a_page_that_makes_no_sense_is_counted_told_once_and_used_again(client):
    space, hashes = await stored(client, "a", 1)
    ids = await client.lease(space, hashes)
    told = []
    client.node.store.releases.on_corrupt = told.append
    words = client.session.page.memory.cast("Q")
    for head in (RING_WORDS + 1, 5 * RING_WORDS):
        words[1] = head
        assert client.node.store.releases.take(client.session)
    assert (client.node.counters["session_pages_corrupt"], told) == (2, [client.session])
    assert client.leases == 1
    client.post(ids)
    client.node.store.releases.take(client.session)
    assert client.leases == 0
    words.release()


async def test_many_releases_take_several_turns_and_no_session_waits_for_ever(client, monkeypatch):
    monkeypatch.setattr(releases, "BLOCKS_PER_TURN", 16)
    space, hashes = await stored(client, "a", 8)
    busy, quiet = client, await Paged.open(client.node)
    quiet.post(await quiet.lease(await client.node.space(quiet.session), hashes))
    busy.post([(await busy.lease(space, hashes))[0] for _ in range(6)])
    posted = client.node.store.releases
    posted._look()
    assert (busy.leases, quiet.leases) == (4, 1)
    await asyncio.sleep(0)
    assert (busy.leases, quiet.leases) == (3, 0)
    assert not posted.take(busy.session)
    assert busy.leases == 1
    assert posted.take(busy.session)
    assert not posted.take_any()


async def test_a_page_full_of_strange_ids_hides_nobodys_releases(client, monkeypatch):
    monkeypatch.setattr(releases, "BLOCKS_PER_TURN", 16)
    quiet = await Paged.open(client.node)
    client.post([1 << 40] * RING_WORDS)
    quiet.post(await quiet.lease(*await stored(quiet, "a", 1)))
    assert client.node.store.releases.take_any()
    assert quiet.leases == 0


async def test_a_client_that_posts_on_and_on_cannot_keep_its_session_from_ending(client, monkeypatch):
    reads = client.node.store.reads
    release = reads.release

    def posting_on(session, lease_ids):
        client.post(lease_ids)
        return release(session, lease_ids)

    monkeypatch.setattr(reads, "release", posting_on)
    client.post([1 << 40] * 5)
    client.node.store.releases.take_all()
    client.node.store.end_session(client.session)
    assert client.session.ended


# ---- when ----


async def test_room_is_made_of_what_was_posted(client):
    space, hashes = await stored(client, "a", 16)
    client.post(await client.lease(space, hashes))
    other = await Paged.open(client.node)
    other_space = await client.node.space(other.session, "other")
    assert await client.node.put(other.session, other_space, chain("b", 16)) == bytes([RESERVED]) * 16


async def test_a_get_at_the_limit_of_leases_counts_no_posted_ones():
    async with Node(limits=Limits(STAGING_BYTES, 2, 16, 16 * BLOCK_BYTES, 60.0, 60.0)) as node:
        client = await Paged.open(node)
        space, hashes = await stored(client, "a", 1)
        first = await client.lease(space, hashes)
        await client.lease(space, hashes)
        assert (await node.get(client.session, space, hashes)).next == THROTTLED
        client.post(first)
        assert (await node.get(client.session, space, hashes)).next == HIT


async def test_a_get_at_the_limit_of_held_bytes_counts_no_posted_ones():
    async with Node(limits=Limits(STAGING_BYTES, 64, 16, 2 * BLOCK_BYTES, 60.0, 60.0)) as node:
        client = await Paged.open(node)
        space, hashes = await stored(client, "a", 2)
        _, more = await stored(client, "b", 2)
        first = await client.lease(space, hashes)
        assert (await node.get(client.session, space, more)).next == THROTTLED
        client.post(first)
        assert (await node.get(client.session, space, more)).blocks == 2


async def test_a_get_that_looks_below_ends_the_callers_own_releases_first():
    async with Node(below=MemoryTier()) as node:
        client, other = await Paged.open(node), await Paged.open(node)
        space, hashes = await stored(client, "a", 1)
        client.post(await client.lease(space, hashes))
        assert not await other.lease(await node.space(other.session), chain("absent", 1))
        assert client.leases == 1
        assert not await client.lease(space, chain("absent", 1))
        assert client.leases == 0


async def test_an_idle_clients_releases_are_seen_and_then_nobody_looks_any_more(client, monkeypatch):
    monkeypatch.setattr(releases, "LOOK_EVERY_S", 0.01)
    space, hashes = await stored(client, "a", 1)
    held = await client.node.get(client.session, space, hashes)
    client.node.store.expose(client.session, held.leases)
    posted = client.node.store.releases
    await asyncio.sleep(0.03)
    assert posted._next_look is not None, "it looks again while a lease is held"
    client.post([lease.lease_id for lease in held.leases])
    await eventually(lambda: not client.leases)
    await eventually(lambda: posted._next_look is None)


async def test_the_last_releases_of_a_session_end_though_its_group_lives_on(node):
    first = await Paged.open(node, create_group=True)
    second = await Paged.open(node, join_group=first.session.group.group_id)
    space, hashes = await stored(first, "a", 1)
    first.post(await first.lease(space, hashes))
    node.store.end_session(first.session)
    assert second.leases == 0


async def test_a_worker_releases_what_its_scheduler_took(node):
    scheduler = await Paged.open(node, create_group=True)
    worker = await Paged.open(node, join_group=scheduler.session.group.group_id)
    space, hashes = await stored(scheduler, "a", 1)
    worker.post(await scheduler.lease(space, hashes))
    node.store.releases.take_all()
    assert scheduler.leases == 0


# ---- without ----


async def test_without_memory_for_a_page_a_session_goes_without(node, monkeypatch):
    def refused(*_, **__):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("kvstored.device.memory.os.memfd_create", refused)
        caller = Caller("alice", "tenant", "session")
        session = await node.store.open_session(caller, staging_bytes=0, create_group=False, join_group=b"", page=True)
    assert session.page is None
    assert node.counters["session_pages_refused"] == 1
    assert node.store.releases.take(session)
    node.store.releases.watch()
    assert node.store.releases._next_look is None


async def test_pages_go_with_their_sessions(node):
    before = descriptors()
    clients = [await Paged.open(node) for _ in range(3)]
    assert descriptors() > before
    for client in clients:
        client.poster._words.release()
        node.store.end_session(client.session)
    assert descriptors() == before


def descriptors():
    return sum("kvstored-session-page" in link for link in process_figures.descriptors(os.getpid()))


# ---- much at once ----


async def test_what_a_dead_client_held_comes_back_in_turns_or_when_somebody_needs_it(client, monkeypatch):
    monkeypatch.setattr(endings, "BLOCKS_PER_TURN", 8)
    node = client.node
    space, hashes = await stored(client, "a", 8)
    for _ in range(5):
        await client.lease(space, hashes)
    entry = space.entries[hashes[0]]
    node.store.end_session(client.session)
    assert entry.holds == 4
    await asyncio.sleep(0)
    assert entry.holds == 3
    other = await node.session()
    fresh = chain("b", 16)
    assert list(await node.put(other, await node.space(other), fresh)) == [RESERVED] * 16


async def test_a_clients_next_call_waits_until_its_own_large_releases_are_done(client, monkeypatch):
    monkeypatch.setattr(endings, "BLOCKS_PER_TURN", 8)
    store = client.node.store
    space, hashes = await stored(client, "a", 8)
    other = await client.node.session()
    store.reads.release(client.session, [(await client.lease(space, hashes))[0] for _ in range(3)])
    assert not store.releases.take(client.session)
    assert store.releases.take(other)
    for _ in range(2):
        await asyncio.sleep(0)
    assert store.releases.take(client.session)
    assert not space.entries[hashes[0]].holds
