"""What every tier below DRAM must do, as tests that a tier's own test module inherits.

A subclass provides the fixture `harness`: a `LowerTierHarness` whose tier is open and empty, and
which closes it afterwards. After each step the account must be balanced.
"""

from __future__ import annotations

import hashlib
import mmap
import random
from collections.abc import Sequence
from typing import Protocol

import xxhash

from kvstored.device.file import AlignedBuffer
from kvstored.keys import slot_bytes
from kvstored.tiers.base import Load, LowerTier, Record, Store

DIGEST = bytes(range(16))
OTHER_DIGEST = bytes(range(16, 32))


class LowerTierHarness(Protocol):
    """A tier under test and what the tests need to know of it."""

    tier: LowerTier
    evicted: list[tuple[str, bytes, bytes]]
    """Tenant, digest and hash of every record that the tier said it evicted."""

    async def restart(self) -> None:
        """Close the tier in order and open it again."""
        ...

    def damage(self, record: Record) -> None:
        """Change a byte of the block behind the tier's back."""
        ...

    def audit(self) -> None:
        """AssertionError where the tier's account is wrong."""
        ...

    def holds(self, data: bytes) -> bool:
        """Whether these bytes lie anywhere in what the tier keeps, dead or alive."""
        ...


class Blocks:
    """Blocks in aligned memory: deterministic bytes by name, and room to load into."""

    def __init__(self, size_bytes: int = 4 << 20) -> None:
        self._buffer = AlignedBuffer(size_bytes)
        self._used = 0

    def close(self) -> None:
        """Give the memory back."""
        self._buffer.close()

    def reset(self) -> None:
        """Use the memory again from its start."""
        self._used = 0

    def store(self, name: str, size_bytes: int, digest: bytes = DIGEST) -> Store:
        """A block that is a function of its name and size."""
        data = content(name, size_bytes)
        address = self._take(size_bytes, data)
        hash_ = block_hash(name)
        return Store(digest, hash_, block_hash("parent of " + name), address, size_bytes, xxhash.xxh3_128_digest(data))

    def load(self, name: str, record: Record, digest: bytes = DIGEST) -> Load:
        """Room for a block; it holds garbage until it is loaded."""
        garbage = b"\xa5" * record.size_bytes
        return Load(digest, block_hash(name), record, self._take(record.size_bytes, garbage))

    def bytes_at(self, address: int, size_bytes: int) -> bytes:
        """What the memory holds."""
        return self._buffer.get(address - self._buffer.address, size_bytes)

    def _take(self, size_bytes: int, data: bytes) -> int:
        offset, self._used = self._used, self._used + slot_bytes(size_bytes)
        assert self._used <= self._buffer.size_bytes, "the test needs more memory"
        assert offset % mmap.PAGESIZE == 0
        self._buffer.set(offset, data)
        return self._buffer.address + offset


def block_hash(name: str) -> bytes:
    """The block hash that goes with a name."""
    return hashlib.sha256(name.encode()).digest()


def content(name: str, size_bytes: int) -> bytes:
    """The bytes that go with a name."""
    return random.Random(name).randbytes(size_bytes)


class LowerTierContract:
    """Inherit, and provide the fixtures `harness` and `blocks`."""

    async def test_what_was_stored_loads_with_the_same_bytes(self, harness: LowerTierHarness, blocks: Blocks) -> None:
        sizes = {"a": 1, "b": 4095, "c": 4096, "d": 16384, "e": 100_001, "f": 4097}
        stores = [blocks.store(name, size) for name, size in sizes.items()]
        assert await harness.tier.store("t", stores) == [True] * 6
        harness.audit()
        found = await load_all(harness, blocks, "t", list(sizes))
        assert found == {name: content(name, size) for name, size in sizes.items()}

    async def test_what_is_forgotten_is_gone_if_it_is_unchanged(
        self, harness: LowerTierHarness, blocks: Blocks
    ) -> None:
        tier = harness.tier
        await tier.store("t", [blocks.store(name, 5000) for name in "abc"])
        a, b, _ = await find(harness, "t", ["a", "b", "c"])
        assert a is not None
        assert b is not None
        await tier.delete("t", DIGEST, [block_hash("b")])
        await tier.store("t", [blocks.store("b", 5000)])
        assert await tier.forget(DIGEST, [(block_hash("a"), a), (block_hash("b"), b)]) == (1, slot_bytes(5000))
        assert [record is not None for record in await find(harness, "t", ["a", "b", "c"])] == [False, True, True]
        harness.audit()

    async def test_a_record_tells_what_was_stored(self, harness: LowerTierHarness, blocks: Blocks) -> None:
        store = blocks.store("a", 5000)
        await harness.tier.store("t", [store])
        record = (await find(harness, "t", ["a"]))[0]
        assert record is not None
        assert (record.size_bytes, record.content_hash, record.parent) == (5000, store.content_hash, store.parent)

    async def test_a_prefix_ends_before_the_first_miss(self, harness: LowerTierHarness, blocks: Blocks) -> None:
        await harness.tier.store("t", [blocks.store(name, 4096) for name in ("a", "b", "d")])
        assert len(await find(harness, "t", ["a", "b", "c", "d"], prefix=True)) == 2
        assert [r is not None for r in await find(harness, "t", ["a", "b", "c", "d"])] == [True, True, False, True]

    async def test_a_block_stored_again_takes_no_more_room(self, harness: LowerTierHarness, blocks: Blocks) -> None:
        await harness.tier.store("t", [blocks.store("a", 4096)])
        before = harness.tier.usage()
        assert await harness.tier.store("t", [blocks.store("a", 4096)] * 2) == [True, True]
        assert harness.tier.usage() == before

    async def test_a_block_twice_in_one_call_is_stored_once(self, harness: LowerTierHarness, blocks: Blocks) -> None:
        assert await harness.tier.store("t", [blocks.store("a", 4096)] * 3) == [True] * 3
        assert harness.tier.usage().blocks == 1

    async def test_no_tenant_finds_or_deletes_what_another_stored(
        self, harness: LowerTierHarness, blocks: Blocks
    ) -> None:
        await harness.tier.store("t", [blocks.store("a", 4096)])
        assert await find(harness, "u", ["a"]) == [None]
        assert await harness.tier.delete("u", DIGEST, [block_hash("a")]) == 0
        assert await find(harness, "t", ["a"]) != [None]

    async def test_usage_is_told_by_tenant(self, harness: LowerTierHarness, blocks: Blocks) -> None:
        await harness.tier.store("t", [blocks.store("a", 4096), blocks.store("b", 4097)])
        await harness.tier.store("u", [blocks.store("c", 1, OTHER_DIGEST)])
        assert harness.tier.tenant_usage() == {"t": (3 * 4096, 2), "u": (4096, 1)}
        assert harness.tier.usage().used_bytes == 4 * 4096
        harness.audit()

    async def test_a_deleted_block_is_gone_and_can_be_stored_again(
        self, harness: LowerTierHarness, blocks: Blocks
    ) -> None:
        await harness.tier.store("t", [blocks.store("a", 4096), blocks.store("b", 4096)])
        assert await harness.tier.delete("t", DIGEST, [block_hash("a"), block_hash("never stored")]) == 1
        assert [r is not None for r in await find(harness, "t", ["a", "b"])] == [False, True]
        harness.audit()
        assert await harness.tier.store("t", [blocks.store("a", 4096)]) == [True]
        assert await load_all(harness, blocks, "t", ["a"]) == {"a": content("a", 4096)}

    async def test_blocks_and_their_account_survive_a_restart(self, harness: LowerTierHarness, blocks: Blocks) -> None:
        await harness.tier.store("t", [blocks.store(name, 9000) for name in "abc"])
        await harness.tier.store("u", [blocks.store("d", 4096, OTHER_DIGEST)])
        await harness.tier.delete("t", DIGEST, [block_hash("b")])
        before = harness.tier.usage(), harness.tier.tenant_usage()
        await harness.restart()
        assert (harness.tier.usage(), harness.tier.tenant_usage()) == before
        assert set(await load_all(harness, blocks, "t", list("abc"))) == {"a", "c"}
        assert await load_all(harness, blocks, "u", ["d"], OTHER_DIGEST) == {"d": content("d", 4096)}

    async def test_a_damaged_block_is_no_hit_and_is_dropped(self, harness: LowerTierHarness, blocks: Blocks) -> None:
        await harness.tier.store("t", [blocks.store(name, 8192) for name in "abc"])
        record = (await find(harness, "t", ["b"]))[0]
        assert record is not None
        harness.damage(record)
        assert set(await load_all(harness, blocks, "t", list("abc"))) == {"a", "c"}
        assert [r is not None for r in await find(harness, "t", list("abc"))] == [True, False, True]
        assert harness.tier.counters()["load_corrupt_blocks"] == 1
        harness.audit()

    async def test_a_full_tier_makes_room_and_says_what_it_evicted(
        self, harness: LowerTierHarness, blocks: Blocks
    ) -> None:
        names = await overflow(harness, blocks, "t")
        found = await find(harness, "t", names)
        gone = {(DIGEST, block_hash(name)) for name, record in zip(names, found, strict=True) if record is None}
        assert gone
        assert gone == {(digest, hash_) for _, digest, hash_ in harness.evicted}
        assert found[-1] is not None

    async def test_pinned_blocks_outlast_an_overflow(self, harness: LowerTierHarness, blocks: Blocks) -> None:
        await harness.tier.store("t", [blocks.store("kept", 4096)])
        pinned = [r for r in await harness.tier.find("t", DIGEST, [block_hash("kept")], prefix=False) if r]
        await overflow(harness, blocks, "t")
        blocks.reset()
        load = blocks.load("kept", pinned[0])
        assert await harness.tier.load([load]) == [True]
        assert blocks.bytes_at(load.address, 4096) == content("kept", 4096)
        harness.tier.unpin(pinned)
        await overflow(harness, blocks, "t", "later")
        assert await find(harness, "t", ["kept"]) == [None]

    async def test_a_record_from_before_an_overflow_does_not_load(
        self, harness: LowerTierHarness, blocks: Blocks
    ) -> None:
        await harness.tier.store("t", [blocks.store("a", 4096)])
        stale = (await find(harness, "t", ["a"]))[0]
        assert stale is not None
        await overflow(harness, blocks, "t")
        blocks.reset()
        assert await harness.tier.load([blocks.load("a", stale)]) == [False]

    async def test_a_block_larger_than_the_tier_is_not_stored(self, harness: LowerTierHarness, blocks: Blocks) -> None:
        size = harness.tier.usage().capacity_bytes
        store = Store(DIGEST, block_hash("huge"), b"", blocks.store("a", 1).address, size, bytes(16))
        assert await harness.tier.store("t", [store]) == [False]
        harness.audit()

    async def test_a_wipe_leaves_no_byte_of_what_was_deleted(self, harness: LowerTierHarness, blocks: Blocks) -> None:
        await harness.tier.store("t", [blocks.store(name, 9000) for name in "abc"])
        await harness.tier.store("u", [blocks.store("d", 9000, OTHER_DIGEST)])
        await harness.tier.delete("t", DIGEST, [block_hash(name) for name in "abc"])
        assert (await harness.tier.wipe(["t"], ignored)).left == []
        assert not any(harness.holds(content(name, 9000)[:4096]) for name in "abc")
        assert await load_all(harness, blocks, "u", ["d"], OTHER_DIGEST) == {"d": content("d", 9000)}
        harness.audit()
        await harness.restart()
        assert await find(harness, "t", list("abc")) == [None] * 3

    async def test_a_wipe_spares_what_is_alive(self, harness: LowerTierHarness, blocks: Blocks) -> None:
        names = [f"{i}" for i in range(12)]
        await harness.tier.store("t", [blocks.store(name, 9000) for name in names])
        await harness.tier.delete("t", DIGEST, [block_hash(name) for name in names[::2]])
        assert (await harness.tier.wipe(["t"], ignored)).left == []
        assert not any(harness.holds(content(name, 9000)[:4096]) for name in names[::2])
        assert await load_all(harness, blocks, "t", names) == {name: content(name, 9000) for name in names[1::2]}
        await harness.tier.store("t", [blocks.store(name, 9000) for name in names[::2]])
        await harness.restart()
        assert set(await load_all(harness, blocks, "t", names)) == set(names)
        harness.audit()

    async def test_a_wipe_finds_what_was_evicted_and_not_yet_written_over(
        self, harness: LowerTierHarness, blocks: Blocks
    ) -> None:
        names = await overflow(harness, blocks, "t")
        others = [f"other {i}" for i in range(6)]
        blocks.reset()
        await harness.tier.store("u", [blocks.store(name, 9000, OTHER_DIGEST) for name in others])
        await harness.tier.delete("t", DIGEST, [block_hash(name) for name in names])
        assert (await harness.tier.wipe(["t"], ignored)).left == []
        assert not any(harness.holds(content(name, 16384)[:4096]) for name in names)
        kept = await load_all(harness, blocks, "u", others, OTHER_DIGEST)
        assert kept == {name: content(name, 9000) for name in others}
        await overflow(harness, blocks, "u", "later")  # what was wiped takes blocks again


def ignored(done: int, steps: int, size_bytes: int) -> None:
    """Progress that nobody looks at."""


async def find(
    harness: LowerTierHarness, tenant: str, names: Sequence[str], digest: bytes = DIGEST, *, prefix: bool = False
) -> list[Record | None]:
    """Look blocks up by name, without keeping them pinned."""
    records = await harness.tier.find(tenant, digest, [block_hash(name) for name in names], prefix=prefix)
    harness.tier.unpin([record for record in records if record is not None])
    return records


async def load_all(
    harness: LowerTierHarness, blocks: Blocks, tenant: str, names: Sequence[str], digest: bytes = DIGEST
) -> dict[str, bytes]:
    """The bytes of those blocks that are found and load."""
    blocks.reset()
    records = await harness.tier.find(tenant, digest, [block_hash(name) for name in names], prefix=False)
    loads = {n: blocks.load(n, r, digest) for n, r in zip(names, records, strict=True) if r is not None}
    loaded = await harness.tier.load(list(loads.values()))
    harness.tier.unpin([load.record for load in loads.values()])
    hits = [name for name, hit in zip(loads, loaded, strict=True) if hit]
    return {name: blocks.bytes_at(loads[name].address, loads[name].record.size_bytes) for name in hits}


async def overflow(harness: LowerTierHarness, blocks: Blocks, tenant: str, name: str = "more") -> list[str]:
    """Store twice the tier's capacity in small batches; every one finds room."""
    size = 16384
    names = [f"{name} {i}" for i in range(2 * harness.tier.usage().capacity_bytes // size)]
    for i in range(0, len(names), 4):
        blocks.reset()
        stored = await harness.tier.store(tenant, [blocks.store(n, size) for n in names[i : i + 4]])
        assert all(stored), f"no room for {names[i]}"
        harness.audit()
    return names
