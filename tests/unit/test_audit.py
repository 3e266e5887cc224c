"""Checking what is stored on demand: what it holds it lets go, however its caller leaves."""

import asyncio
import threading

import pytest

from kvstored.store import audit
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import BLOCK_BYTES, Node, chain


async def turns(count=10):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_check_that_is_cancelled_twice_holds_its_blocks_until_the_thread_is_done_and_no_longer():
    go = threading.Event()
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 4))
        for _ in range(node.parts.copy_threads):
            node.parts.copiers.submit(go.wait)
        try:
            checking = asyncio.create_task(audit.verify(node.parts))
            for _ in range(3):
                await turns()
                assert not checking.done(), "a thread may still read the blocks"
                assert [entry.holds for entry in space.entries.values()] == [1] * 4
                checking.cancel()
        finally:
            go.set()
        with pytest.raises(asyncio.CancelledError):
            await checking
        assert [entry.holds for entry in space.entries.values()] == [0] * 4


async def test_a_check_that_no_thread_takes_holds_nothing():
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 4))
        node.parts.copiers.shutdown()  # as when the daemon stops
        with pytest.raises(RuntimeError):
            await audit.verify(node.parts)
        assert [entry.holds for entry in space.entries.values()] == [0] * 4


async def test_a_check_counts_what_it_read_and_drops_what_is_wrong():
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 4)
        await node.put(session, space, hashes)
        node.parts.dram.view(space.entries[hashes[2]].slot, 1)[0] ^= 1
        found = await audit.verify(node.parts)
        assert (found.dram_blocks, found.size_bytes, found.corrupt, found.skipped) == (4, 4 * BLOCK_BYTES, 1, 0)
        assert list(space.entries) == [*hashes[:2], hashes[3]]


async def test_a_check_reads_under_the_digest_that_it_looked_under_though_an_epoch_begins_meanwhile():
    class Observed(MemoryTier):
        async def find(self, tenant, digest, hashes, *, prefix):
            found = await super().find(tenant, digest, hashes, prefix=prefix)
            if not read and any(found):
                await node.store.bumps.bump(space.tenant, "m")
            return found

        async def load(self, loads):
            read.extend(load.digest for load in loads)
            return await super().load(loads)

    read, below = [], Observed()
    async with Node(blocks=16, below=below) as node:
        session = await node.session()
        space = await node.space(session)
        before = space.digest
        await node.put(session, space, chain("a", 4))
        await node.parts.below.mover.flush(1.0)
        await audit.verify(node.parts)
        assert space.digest != before
        assert read == [before] * 4, "encrypted blocks would be taken for corrupt"
