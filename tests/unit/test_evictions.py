"""The record of what recycling evicted: there after a restart, exact, bounded, and unharmed by damage."""

from types import SimpleNamespace

import pytest
from kvstored_proto.v1 import admin_pb2 as pb

from kvstored.device.file import ALIGN_BYTES, FileDevice
from kvstored.explain.explain import explain
from kvstored.rpc import explaining
from kvstored.testing.contract_lower_tier import DIGEST, OTHER_DIGEST, Blocks, block_hash
from kvstored.testing.faulty import FakeDevice
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import Node, chain
from kvstored.testing.waiting import PATIENCE_S
from kvstored.tiers import evictions
from kvstored.tiers.evictions import Evictions, pack_entry, unpack_entries
from tests.unit.test_nvme import Harness, names, store


@pytest.fixture
def blocks():
    made = Blocks()
    yield made
    made.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "evictions"


def keys(prefix, count):
    return [f"{prefix} {i}".encode() for i in range(count)]


def test_what_was_noted_is_known_to_another_that_opens_the_file(path):
    Evictions(FileDevice(), path).note(keys("a", 3), 100.0)
    Evictions(FileDevice(), path).note(keys("b", 1000), 200.5)
    found = Evictions(FileDevice(), path)
    assert [found.evicted_s(key) for key in keys("a", 4)] == [100.0, 100.0, 100.0, None]
    assert {found.evicted_s(key) for key in keys("b", 1000)} == {200.5}


def test_the_last_time_counts(path):
    found = Evictions(FileDevice(), path)
    for wall_s in (1.0, 2.0, 3.0):
        found.note(keys("a", 1), wall_s)
    assert found.evicted_s(keys("a", 1)[0]) == 3.0


def test_without_a_file_and_without_keys_nothing_is_known_and_nothing_written(path):
    found = Evictions(FileDevice(), path)
    found.note([], 1.0)
    assert found.evicted_s(b"a") is None
    assert not path.exists()


def test_the_file_stays_below_its_limit_and_forgets_the_oldest(path, monkeypatch):
    monkeypatch.setattr(evictions, "FILE_BYTES_MAX", 8 * ALIGN_BYTES)
    found = Evictions(FileDevice(), path)
    for number in range(20):
        found.note(keys(number, 10), float(number))
        assert path.stat().st_size <= 8 * ALIGN_BYTES
    assert found.evicted_s(keys(0, 1)[0]) is None
    assert [found.evicted_s(keys(number, 1)[0]) for number in range(17, 20)] == [17.0, 18.0, 19.0]


def test_an_entry_that_is_torn_or_damaged_is_passed_over_and_the_others_are_not(path):
    entries = [pack_entry(keys(name, 600), float(at)) for at, name in enumerate("abc")]
    whole = b"".join(entries)
    for at in (0, 5, 9, len(entries[0]) + 3, len(entries[0]) + 4800, len(whole) - len(entries[2]) + 4000):
        flipped = bytearray(whole)
        flipped[at] ^= 0x40
        assert len(list(unpack_entries(bytes(flipped)))) == 2
    assert len(list(unpack_entries(whole[:-ALIGN_BYTES]))) == 2
    path.write_bytes(whole[: len(entries[0]) + 100])  # a kill in the middle of a write
    found = Evictions(FileDevice(), path)
    found.note(keys("d", 1), 9.0)
    assert [found.evicted_s(keys(name, 1)[0]) for name in "abd"] == [0.0, None, 9.0]


def test_a_hash_is_found_at_its_place_only():
    first, second = (next(unpack_entries(pack_entry([key], 0.0))).hashes for key in (b"x", b"y"))
    across = first[4:] + second[:4]
    assert evictions._holds(first + second, second)
    assert not evictions._holds(first + second, across)


async def test_after_a_restart_the_tier_knows_what_it_evicted_and_only_that(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 7))
        await store(harness, blocks, names("b", 7))
        await harness.tier.delete("t", DIGEST, [block_hash("a0")])
        await store(harness, blocks, names("c", 21))
        evicted = {hash_ for _, _, hash_ in harness.evicted}
        assert evicted
        assert block_hash("a0") not in evicted
        await harness.restart()
        for name in [*names("a", 7), *names("b", 7), *names("c", 21)]:
            known = await harness.tier.evicted_s(DIGEST, block_hash(name)) is not None
            assert known == (block_hash(name) in evicted), name
            assert await harness.tier.evicted_s(OTHER_DIGEST, block_hash(name)) is None


async def test_a_record_that_cannot_be_written_or_read_stops_nothing(tmp_path, blocks):
    device = FakeDevice(1)
    async with Harness(tmp_path, device) as harness:
        (tmp_path / "drive0" / "evictions").mkdir()
        for prefix in "abcd":
            assert all(await store(harness, blocks, names(prefix, 14)))
        assert harness.evicted
        assert await harness.tier.evicted_s(DIGEST, harness.evicted[0][2]) is None
        assert harness.tier.health == "ok"


async def test_explain_tells_what_an_earlier_daemon_evicted():
    (hash_,) = chain("gone", 1)
    async with Node(blocks=4, below=MemoryTier()) as node:
        space = await node.space(await node.session())
        assert (await explain(node.parts, [space], space, hash_)).verdict == "never_stored"
        node.lower.evictions[space.digest, hash_] = 1_700_000_000.0
        answer = await explain(node.parts, [space], space, hash_)
    assert answer.verdict == "evicted"
    assert "2023-11-14T22:13:20" in answer.detail


async def test_explain_tells_of_an_epoch_bump_while_its_blocks_are_still_there():
    (hash_,) = chain("old", 1)
    async with Node(blocks=4, below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, [hash_])
        catalog = node.parts.catalog
        catalog.digest_of = lambda namespace: b"next" + namespace.digest[4:]
        old = catalog.retire(space)
        answer = await explain(node.parts, [space], space, hash_)
        assert (answer.verdict, answer.entries) == ("epoch", [])
        assert (await explain(node.parts, [space], space, chain("new", 1)[0])).verdict == "never_stored"
        for entry in list(old.entries.values()):
            node.parts.room.forget(entry)


async def test_explain_finds_a_block_that_goes_down_while_the_index_is_asked(monkeypatch):
    (hash_,) = chain("down", 1)
    async with Node(blocks=4, below=MemoryTier()) as node:
        session = await node.session()
        space, find = await node.space(session), node.lower.find
        await node.put(session, space, [hash_])

        async def moved_behind_it(*asked, **how):
            found = await find(*asked, **how)
            if space.entries:
                await node.parts.below.mover.flush(PATIENCE_S)
                node.parts.room.evict(list(space.entries.values()), "for a test")
            return found

        monkeypatch.setattr(node.lower, "find", moved_behind_it)
        answer = await explain(node.parts, [space], space, hash_)
        assert (answer.verdict, answer.entries) == ("hit", [])
        assert [where for where, _ in answer.records] == [space]


async def test_an_answer_lists_no_block_that_has_left_its_slot_by_then(monkeypatch):
    hashes = chain("a", 2)
    async with Node(blocks=4) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, hashes)
        gone, there = (space.entries[hash_] for hash_ in hashes)
        node.parts.room.forget(gone)

        async def explained(*_):
            return explaining.Answer("hit", "it is in DRAM", [gone, there], [])

        monkeypatch.setattr(explaining, "explain", explained)
        context = SimpleNamespace(store=node.store, boot_id=1)
        reply = await explaining._explain(context, session, pb.ExplainRequest(hash=hashes[1]))
        assert [block.hash for block in reply.blocks] == hashes[1:]
