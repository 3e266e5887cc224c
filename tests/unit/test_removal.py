"""One way to take blocks away, in pieces and from every tier, whoever holds them."""

import asyncio

from kvstored.catalog.catalog import DEAD, READY
from kvstored.catalog.history import Reason
from kvstored.store.outcomes import MISS
from kvstored.store.removal import Removals, Why
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import BLOCK_BYTES, Node, chain
from kvstored.testing.waiting import turns

WHY = Why(Reason.PURGED, "by a test")


async def test_everything_of_a_space_goes_from_both_tiers_and_nothing_of_others():
    async with Node(blocks=16, below=MemoryTier()) as node:
        session = await node.session()
        space, other = await node.space(session), await node.space(session, "other")
        await node.put(session, space, chain("a", 6))
        await node.parts.below.mover.flush(1.0)
        await node.put(session, space, chain("b", 2))
        await node.put(session, other, chain("c", 2))
        heard = []
        removed = await Removals(node.parts).remove_all(space, WHY, on_piece=heard.append)
        assert (removed.blocks, removed.dram_blocks, removed.nvme_blocks) == (8, 8, 6)
        assert (removed.dram_bytes, removed.nvme_bytes) == (8 * BLOCK_BYTES, 6 * BLOCK_BYTES)
        assert sum(piece.blocks for piece in heard) == 8
        assert not space.entries
        assert not node.lower.blocks
        assert len(other.entries) == 2
        assert node.parts.history.why(space, chain("a", 1)[0]).reason == "purged"


async def test_a_removal_takes_what_is_chosen():
    async with Node(blocks=16, below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 4))
        only = chain("a", 1)
        await Removals(node.parts).remove_all(space, WHY, chosen=lambda block: getattr(block, "hash", b"") in only)
        assert space.entries.keys() == set(chain("a", 4)[1:])


async def test_the_slot_of_a_leased_block_comes_back_with_its_last_lease():
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 2))
        held = await node.get(session, space, chain("a", 2))
        entry = held.leases[0].entries[0]
        removed = await Removals(node.parts).remove_all(space, WHY)
        assert removed.leased_blocks == 2
        assert entry.state == DEAD
        assert (await node.get(session, space, chain("a", 2))).next == MISS
        assert node.parts.dram.usage().blocks == 2
        node.store.reads.release(session, [held.leases[0].lease_id])
        assert node.parts.dram.usage().blocks == 0


async def test_what_is_being_written_goes_too_or_stays_as_is_asked():
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 2)
        kept = await node.reserve(session, space, hashes)
        await Removals(node.parts).remove(space, hashes, WHY)
        assert await node.commit(session, kept, hashes) == b"\x01\x01"
        gone = await node.reserve(session, space, chain("b", 2))
        await Removals(node.parts).remove(space, chain("b", 2), WHY, writing=True)
        assert await node.commit(session, gone, chain("b", 2)) == bytes([MISS, MISS])
        assert [entry.state for entry in space.entries.values()] == [READY, READY]


async def test_what_no_key_reaches_goes_without_a_note_of_the_delete():
    async with Node(blocks=16, below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 4))
        await node.parts.below.mover.flush(1.0)
        deleted = []
        really = node.lower.delete

        async def delete(tenant, digest, hashes):
            deleted.extend(hashes)
            return await really(tenant, digest, hashes)

        node.lower.delete = delete
        removed = await Removals(node.parts).remove_all(space, WHY, lasting=False)
        assert (removed.dram_blocks, removed.nvme_blocks) == (4, 4)
        assert not deleted
        assert not node.lower.blocks


async def test_what_came_up_while_it_was_taken_away_goes_too():
    async with Node(blocks=16, below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 4))
        await node.parts.below.mover.flush(1.0)
        for entry in list(space.entries.values()):
            node.parts.room.forget(entry)
        node.lower.gate.clear()
        getting = asyncio.create_task(node.get(session, space, chain("a", 4), wait_s=60))
        await turns()
        await Removals(node.parts).remove_all(space, WHY)
        node.lower.gate.set()
        assert (await getting).blocks == 0
        assert not space.entries
