"""Wiping: what is deleted or free leaves no byte, in memory and in files, and nothing comes back."""

import pytest

from kvstored.device import memory
from kvstored.testing.contract_lower_tier import OTHER_DIGEST, Blocks, content, find, ignored
from kvstored.testing.faulty import FakeDevice, Faults
from kvstored.tiers.formats import State
from kvstored.tiers.wiping import gaps
from tests.unit.test_dram import KIB, MIB, opened
from tests.unit.test_nvme import EXTENT_BYTES, Harness, names, store
from tests.unit.test_rebuild import data_file, delete, loaded, ruin

PATTERN = b"a planted pattern"


@pytest.fixture
def blocks():
    made = Blocks()
    yield made
    made.close()


def everything(directory):
    """All bytes of all extents."""
    return b"".join(file.read_bytes() for file in sorted(directory.glob("drive*/extents/*.ext")))


def leaves(directory, chosen, size=16384):
    """Which of the blocks have bytes left anywhere."""
    there = everything(directory)
    return {name for name in chosen if content(name, size)[:64] in there}


# ---- files ----


def test_gaps_are_what_no_range_covers():
    assert gaps([], 8) == [(0, 8)]
    assert gaps([(4, 6), (0, 2), (1, 3)], 8) == [(3, 4), (6, 8)]
    assert gaps([(0, 8)], 8) == []
    assert gaps([(6, 12)], 8) == [(0, 6)]


async def test_an_index_made_anew_brings_nothing_back(tmp_path, blocks):
    gone, kept = names("gone", 6), names("kept", 6)
    async with Harness(tmp_path) as harness:
        for pair in zip(gone, kept, strict=True):
            await store(harness, blocks, pair)
        await delete(harness, gone)
        assert (await harness.tier.wipe(["t"], ignored)).left == []
    ruin(data_file(tmp_path))
    async with Harness(tmp_path) as harness:
        # Of the extent that was never sealed the index alone knew.
        assert await loaded(harness, blocks, gone + kept) <= set(kept)
    assert leaves(tmp_path, gone) == set()


async def test_a_wiped_extent_is_free_and_takes_blocks_of_anybody(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        for i in range(4):
            await store(harness, blocks, names(f"gone{i} ", 6))
        gone = [name for i in range(4) for name in names(f"gone{i} ", 6)]
        await delete(harness, gone)
        await harness.tier.wipe(["t"], ignored)
        usage = harness.tier.usage()
        assert (usage.free_bytes, usage.dead_bytes) == (4 * EXTENT_BYTES, 0)
        assert set(everything(tmp_path)) == {0}
        assert await store(harness, blocks, names("other", 6), "u", digest=OTHER_DIGEST) == [True] * 6


async def test_another_tenant_writes_on_in_the_extent_that_it_has_open(tmp_path, blocks):
    async with Harness(tmp_path, capacity_bytes=2 * EXTENT_BYTES) as harness:
        old = names("old", 14)
        for pair in zip(old[::2], old[1::2], strict=True):
            await store(harness, blocks, pair)
        await store(harness, blocks, ["first"], "u", digest=OTHER_DIGEST)  # over the beginning of what was there
        assert len(leaves(tmp_path, old)) == 13
        await delete(harness, old)
        await harness.tier.wipe(["t"], ignored)
        assert leaves(tmp_path, old) == set()
        await store(harness, blocks, ["second"], "u", digest=OTHER_DIGEST)
        assert await loaded(harness, blocks, ["first", "second"], "u", OTHER_DIGEST) == {"first", "second"}
        first, second = await find(harness, "u", ["first", "second"], OTHER_DIGEST)
        assert first.location.extent == second.location.extent
        assert second.location.offset == 16384


async def test_a_damaged_footer_costs_no_block_that_is_alive(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        chosen = names("a", 12)
        for name in chosen:
            await store(harness, blocks, [name])
        (sealed,) = [e for e in map(harness.tier._volumes[0].table.get, (1, 2)) if e.state is State.SEALED]
        with (tmp_path / "drive0" / "extents" / f"{sealed.number:08d}.ext").open("r+b") as file:
            file.seek(EXTENT_BYTES - 4096)
            file.write(b"\xff" * 4096)
        await delete(harness, chosen[:3])
        assert (await harness.tier.wipe(["t"], ignored)).left == []
        assert await loaded(harness, blocks, chosen) == set(chosen[3:])
    assert leaves(tmp_path, chosen[:3]) == set()


async def test_what_a_device_refuses_to_overwrite_is_said_to_be_left(tmp_path, blocks):
    device = FakeDevice(1, Faults())
    async with Harness(tmp_path, device) as harness:
        await store(harness, blocks, names("a", 3))
        await delete(harness, names("a", 3)[:1])
        device.faults = Faults(write_error=1.0)
        (left,) = (await harness.tier.wipe(["t"], ignored)).left
        assert "extent 1" in left
        device.faults = Faults()
        await harness.tier.look_after()
        assert (await harness.tier.wipe(["t"], ignored)).left == []
        assert leaves(tmp_path, names("a", 3)) == set(names("a", 3)[1:])


async def test_what_was_wiped_is_not_written_again_and_again(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        for i in range(4):
            await store(harness, blocks, names(f"{i} ", 6), "u", digest=OTHER_DIGEST)
        await harness.restart()  # what its extents held before is not known any more
        assert (await harness.tier.wipe(["t"], ignored)).size_bytes > 0
        assert (await harness.tier.wipe(["t"], ignored)).size_bytes == 0


async def test_progress_is_told_extent_by_extent(tmp_path, blocks):
    async with Harness(tmp_path, paths=2) as harness:
        for i in range(4):
            await store(harness, blocks, names(f"{i} ", 6))
        told = []
        wiped = await harness.tier.wipe(["t"], lambda *step: told.append(step))
        extents = len(list(tmp_path.glob("drive*/extents/*.ext")))
        assert [(done, steps) for done, steps, _ in told] == [(i + 1, extents) for i in range(extents)]
        assert told[-1][2] == wiped.size_bytes


# ---- memory ----


def plant(tier, slots):
    for slot in slots:
        tier.view(slot, tier.class_of(slot))[: len(PATTERN)] = PATTERN


def memory_of(tier):
    return b"".join(bytes(memory.view(s.address, s.size_bytes)) for s in tier.segments())


async def test_free_slots_are_wiped_and_those_in_use_are_not():
    async with opened() as tier:
        slots = tier.allocate("t", 16 * KIB, 40)
        others = tier.allocate("u", 16 * KIB, 3)
        plant(tier, slots + others)
        for slot in slots[::2] + others[:1]:
            tier.free(slot)
        wiped = []
        assert await tier.wipe_free("t", wiped.append) == sum(wiped) == 20 * 16 * KIB
        assert memory_of(tier).count(PATTERN) == 20 + 3
        assert tier.usage().blocks == 20 + 2
        for slot in slots[1::2] + others[1:]:
            tier.free(slot)


@pytest.mark.parametrize("sizes", [(16 * KIB, 256 * KIB), (64 * KIB, 4 * KIB), (4 * KIB, 60 * KIB)])
async def test_what_an_earlier_division_left_is_wiped(sizes):
    async with opened(MIB, MIB) as tier:
        slots = tier.allocate("t", sizes[0], 1000)
        plant(tier, slots)
        for slot in slots:
            tier.free(slot)
        (again,) = tier.allocate("t", sizes[1], 1)
        await tier.wipe_free("t", lambda size: None)
        tier.free(again)
        assert PATTERN not in memory_of(tier)[sizes[1] :]


async def test_a_segment_that_goes_while_another_is_wiped_is_passed_over(monkeypatch):
    async with opened(2 * MIB, MIB) as tier:
        first = tier.allocate("t", 16 * KIB, 64)
        last = tier.allocate("t", 16 * KIB, 1)
        plant(tier, first + last)
        for slot in first + last:
            tier.free(slot)
        (leaving,) = {segment.segment_id for segment in tier.segments("t")} - {first[0] >> 20}
        zero = tier.zero

        async def meanwhile(slots):
            if tier.in_service(leaving):
                tier.retire(leaving)
                await tier.dispose(leaving)
            await zero(slots)

        monkeypatch.setattr(tier, "zero", meanwhile)
        seen = []
        await tier.wipe_free("t", lambda size: None, lambda segment_id: seen.extend(tier.occupants(segment_id)))
        assert not seen
        assert PATTERN not in memory_of(tier)


async def test_what_is_taken_to_be_wiped_counts_for_no_limit(monkeypatch):
    async with opened() as tier:
        slots = tier.allocate("t", 16 * KIB, 8)
        for slot in slots[3:]:
            tier.free(slot)
        zero, meanwhile = tier.zero, []

        async def looked_at(slots):
            meanwhile.append((tier.used_bytes_of("t"), tier.used_bytes_by_tenant()["t"], len(slots)))
            tier.audit()
            await zero(slots)

        monkeypatch.setattr(tier, "zero", looked_at)
        await tier.wipe_free("t", lambda size: None)
        assert meanwhile == [(3 * 16 * KIB, 3 * 16 * KIB, 5)]
        assert tier.used_bytes_of("t") == 3 * 16 * KIB
        for slot in slots[:3]:
            tier.free(slot)


async def test_slots_can_be_taken_while_others_are_wiped(monkeypatch):
    monkeypatch.setattr("kvstored.tiers.dram.WIPE_BYTES", 32 * KIB)
    async with opened() as tier:
        slots = tier.allocate("t", 16 * KIB, 16)
        plant(tier, slots)
        for slot in slots:
            tier.free(slot)
        fresh = []

        def put(size):
            fresh.extend(tier.allocate("t", 16 * KIB, 1))
            plant(tier, fresh[-1:])

        await tier.wipe_free("t", put)
        assert memory_of(tier).count(PATTERN) == len(fresh)
        for slot in fresh:
            tier.free(slot)
