"""The run that a space remembers is never another than the one that it would find."""

import random

import pytest

from kvstored.catalog import spaces
from kvstored.errors import InvalidArgument
from kvstored.store.outcomes import HIT
from kvstored.testing.node import Node, chain


async def opened(node, *blocks):
    session = await node.session()
    space = await node.space(session)
    for hashes in blocks:
        await node.put(session, space, hashes)
    return session, space


def held(node, session, space, hashes):
    got = node.store.reads.get(session, [space], hashes, 0.0)
    for lease in got.leases:
        node.store.reads.release(session, [lease.lease_id])
    return got


async def test_a_get_after_its_look_up_takes_what_that_found():
    async with Node() as node:
        session, space = await opened(node, chain("a", 4))
        hashes = tuple(chain("a", 4))
        assert node.store.reads.lookup([space], hashes).ready_blocks == 4
        found = space.known.entries
        first, second = held(node, session, space, hashes), held(node, session, space, hashes)
        assert first.leases[0].entries is second.leases[0].entries is found
        assert list(first.leases[0].slots) == [space.entries[hash_].slot for hash_ in hashes]
        assert (first.next, first.blocks) == (HIT, 4)


async def test_a_block_that_goes_is_not_found_any_more():
    async with Node() as node:
        session, space = await opened(node, chain("a", 4))
        hashes = tuple(chain("a", 4))
        assert held(node, session, space, hashes).blocks == 4
        await node.store.writes.delete(session, space, [hashes[2]])
        assert held(node, session, space, hashes).blocks == 2
        await node.put(session, space, chain("a", 4))
        assert held(node, session, space, hashes).blocks == 4


async def test_blocks_of_a_past_epoch_are_not_found_any_more():
    async with Node() as node:
        session, space = await opened(node, chain("a", 4))
        hashes = tuple(chain("a", 4))
        assert held(node, session, space, hashes).blocks == 4
        await node.store.bumps.bump(space.tenant, "m")
        assert held(node, session, space, hashes).blocks == 0


async def test_a_list_that_has_become_another_is_looked_at_again():
    async with Node() as node:
        _, space = await opened(node, chain("a", 2), chain("b", 2))
        hashes = chain("a", 2)
        assert [entry.hash for entry in space.ready_run(hashes)] == hashes
        hashes[:] = chain("b", 2)
        assert [entry.hash for entry in space.ready_run(hashes)] == hashes


async def test_whatever_happens_a_run_is_what_looking_at_each_block_finds():
    dice = random.Random(1)
    async with Node(16) as node:
        session, space = await opened(node)
        chains = [tuple(chain(name, 6)) for name in "abcd"]
        for _ in range(300):
            hashes, some = dice.choice(chains), dice.choice(chains)
            await node.put(session, space, list(hashes[: dice.randrange(1, 7)]))
            if dice.random() < 0.3:
                await node.store.writes.delete(session, space, [dice.choice(some)])
            for asked in chains:
                there = list(space.ready_run(asked))
                assert there == space.ready_run(list(asked)) == space.ready_run(asked)
                assert there == [space.entries[hash_] for hash_ in asked[: len(there)]]
                assert len(there) == len(asked) or asked[len(there)] not in space.entries


async def test_a_session_that_asks_for_the_same_again_asks_with_the_same_hashes():
    async with Node() as node:
        session = await node.session()
        for nothing in range(2):
            with pytest.raises(InvalidArgument):
                session.hashes_asked(b"", 16 * nothing)
        packed = b"".join(chain("a", 4))
        hashes = session.hashes_asked(packed, 16)
        assert hashes == tuple(chain("a", 4))
        assert session.hashes_asked(packed, 16) is hashes
        assert session.hashes_asked(packed, 32) == (packed[:32], packed[32:])
        assert session.hashes_asked(packed[:32], 16) == hashes[:2]


async def test_no_more_is_remembered_than_is_stored_or_a_session_would_ask_for_again(monkeypatch):
    async with Node() as node:
        session, space = await opened(node, chain("a", 4))
        assert node.store.reads.lookup([space], tuple(chain("a", 1)) * 5).ready_blocks == 5
        assert space.known is None
        monkeypatch.setattr(spaces, "KNOWN_BLOCKS_MAX", 3)
        assert held(node, session, space, tuple(chain("a", 4))).blocks == 4
        assert space.known is None
