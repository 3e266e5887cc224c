"""Blocks that a device writes are hashed while it writes the next ones; what fails is drained first."""

import asyncio
import threading

import pytest
import xxhash

from kvstored.device import memory
from kvstored.store import hashes_behind
from kvstored.store.hashes_behind import HashesBehind
from kvstored.testing.node import BLOCK_BYTES, Node, chain, payload


def content_hashes(count):
    return [xxhash.xxh3_128_digest(payload(hash_)) for hash_ in chain("a", count)]


@pytest.fixture
async def written(monkeypatch):
    """A node's parts, and entries of blocks that lie in its slots."""
    monkeypatch.setattr(hashes_behind, "BEHIND_BYTES", 2 * BLOCK_BYTES)
    async with Node(blocks=16) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 6))
        yield node.parts, [space.entries[hash_] for hash_ in chain("a", 6)]


async def test_hashing_goes_on_while_the_rest_is_written_and_each_block_is_hashed_once(written, monkeypatch):
    parts, entries = written
    real, pieces = memory.hash_many, []

    def hash_many(places):
        pieces.append(len(list(places)))
        return real(places)

    monkeypatch.setattr(memory, "hash_many", hash_many)
    behind = HashesBehind(parts, entries)
    assert behind.worthwhile
    behind.prepare()
    behind.copied(2)
    await behind.drained()
    assert pieces == [2], "the device has not said that it is done"
    behind.copied(2)
    behind.copied(5)
    hashes = await behind.all()
    assert sorted(pieces) == [1, 2, 3]
    assert hashes == content_hashes(6)


async def test_few_bytes_are_hashed_when_all_are_written(written):
    parts, entries = written
    behind = HashesBehind(parts, entries[:2])
    assert not behind.worthwhile
    behind.prepare()
    assert await behind.all() == content_hashes(2)


async def test_what_failed_is_let_go_of_when_no_thread_reads_it(written, monkeypatch):
    parts, entries = written
    go_on, real = threading.Event(), memory.hash_many

    def hash_many(places):
        go_on.wait(60)
        return real(places)

    monkeypatch.setattr(memory, "hash_many", hash_many)
    behind = HashesBehind(parts, entries)
    behind.prepare()
    behind.copied(4)
    draining = asyncio.ensure_future(behind.drained())
    await asyncio.sleep(0)
    assert not draining.done()
    go_on.set()
    await draining
