import asyncio
import mmap
import os
import random
import threading
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from kvstored_proto.frames import HEAD, slot_runs

from kvstored.device import memory
from kvstored.device.memory import Mapping
from kvstored.errors import ConfigError, DeviceError
from kvstored.testing.waiting import PATIENCE_S, turns
from kvstored.tiers import dram, provision
from kvstored.tiers.dram import DramConfig, DramTier
from kvstored.tiers.provision import segment_sizes
from tests.descriptors import descriptors

KIB, MIB = 1 << 10, 1 << 20


@asynccontextmanager
async def opened(capacity_bytes=MIB, segment_bytes=256 * KIB, **settings):
    tier = DramTier(DramConfig(capacity_bytes, segment_bytes, **settings))
    await tier.open()
    try:
        yield tier
        tier.audit()
    finally:
        await tier.close()


def segments_of(slots):
    return {slot >> 20 for slot in slots}


# ---- sizes and memory ----


def test_capacity_is_used_to_the_last_slot():
    sizes = segment_sizes(DramConfig(163_840_000))
    assert sizes == [64 * MIB, 64 * MIB, 163_840_000 - 128 * MIB]
    assert sum(size // (16 * KIB) for size in sizes) == 10_000


def test_big_tiers_have_few_segments():
    sizes = segment_sizes(DramConfig(1 << 40))
    assert len(sizes) == 512
    assert all(size % (2 * MIB) == 0 for size in sizes)
    assert max(segment_sizes(DramConfig(1 << 43))) == 4 << 30


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DramConfig(100), "dram.capacity_bytes is 100: it must be at least 4096"),
        (DramConfig(MIB, 5000), "dram.segment_bytes is 5000"),
        (DramConfig(MIB, -4096), "dram.segment_bytes is -4096"),
        (DramConfig(100 << 40), "make it smaller"),
        (DramConfig(1 << 40, 8 << 30), "dram.segment_bytes is 8589934592"),
        (DramConfig(1 << 40, MIB), "1048576 segments"),
    ],
)
def test_wrong_sizes_name_the_setting_and_what_would_be_right(config, message):
    with pytest.raises(ConfigError, match=message):
        DramTier(config)


async def test_all_memory_is_there_before_the_tier_is_open():
    async with opened(MIB + 8 * KIB) as tier:
        assert [s.size_bytes for s in tier.segments()] == [256 * KIB] * 4 + [8 * KIB]
        for segment in tier.segments():
            assert os.fstat(tier.segment_fd(segment.segment_id)).st_blocks * 512 == segment.size_bytes


async def test_more_memory_than_the_machine_has_is_refused_before_it_is_touched(monkeypatch):
    monkeypatch.setattr(provision, "available_bytes", lambda: MIB - 1)
    with pytest.raises(ConfigError, match=r"dram.capacity_bytes is 1048576: this machine has 1048575 bytes"):
        await DramTier(DramConfig(MIB)).open()


async def test_what_is_required_and_refused_is_fatal_and_names_setting_and_remedy(monkeypatch):
    monkeypatch.setattr(Mapping, "lock", lambda self: False)
    monkeypatch.setattr(Mapping, "_map_reserved_pages", lambda self, name: False)
    monkeypatch.setattr(memory, "_transparent_pages_allowed", lambda: False)
    monkeypatch.setattr(Mapping, "_collapse", lambda self, size: False)
    before = descriptors()
    with pytest.raises(ConfigError, match=r"dram\.require_lock.*LimitMEMLOCK"):
        await DramTier(DramConfig(MIB, 256 * KIB, lock="require")).open()
    with pytest.raises(ConfigError, match=r"dram\.require_huge_pages.*nr_hugepages"):
        await DramTier(DramConfig(4 * MIB, 2 * MIB, huge_pages="require")).open()
    assert descriptors() == before


async def test_what_is_wished_and_refused_is_a_warning(monkeypatch):
    monkeypatch.setattr(Mapping, "lock", lambda self: False)
    monkeypatch.setattr(Mapping, "_map_reserved_pages", lambda self, name: False)
    monkeypatch.setattr(memory, "_transparent_pages_allowed", lambda: False)
    monkeypatch.setattr(Mapping, "_collapse", lambda self, size: False)
    async with opened(4 * MIB, 2 * MIB) as tier:
        assert len(tier.warnings) == 2
        assert tier.properties()["locked"] == "no"
        assert tier.properties()["pages"] == "4k"
    async with opened(4 * MIB, 2 * MIB, lock="never", huge_pages="never") as tier:
        assert tier.warnings == []


async def test_locked_memory_is_reported(monkeypatch):
    answers = iter([True, False])
    monkeypatch.setattr(Mapping, "lock", lambda self: next(answers))
    async with opened(512 * KIB) as tier:
        assert tier.properties()["locked"] == "partly"


async def test_one_segment_that_cannot_be_made_takes_the_others_with_it(monkeypatch):
    populate, calls = Mapping.populate, []

    def third_fails(self):
        calls.append(self)
        if len(calls) == 3:
            raise DeviceError("no memory")
        populate(self)

    monkeypatch.setattr(Mapping, "populate", third_fails)
    with pytest.raises(DeviceError, match="no memory"):
        await DramTier(DramConfig(MIB, 256 * KIB)).open()
    assert [mapping.fd for mapping in calls] == [-1] * 4


# ---- slots ----


async def test_a_puts_slots_lie_side_by_side():
    async with opened() as tier:
        slots = tier.allocate("a", 16 * KIB, 16)
        addresses = [tier.address(slot) for slot in slots]
        assert addresses == [addresses[0] + i * 16 * KIB for i in range(16)]
        assert [tier.place(slot) for slot in slots] == [(slots[0] >> 20, i * 16 * KIB) for i in range(16)]


async def test_slots_are_multiples_of_4_kib_and_nothing_overlaps():
    async with opened() as tier:
        slots = tier.allocate("a", 5000, 20) + tier.allocate("b", 5000, 20) + tier.allocate("a", 4096, 20)
        spans = sorted((tier.address(slot), tier.class_of(slot)) for slot in slots)
        assert {size for _, size in spans} == {4096, 8192}
        assert all(start + size <= following for (start, size), (following, _) in pairwise(spans))


async def test_a_segment_serves_one_tenant_and_one_slot_size():
    async with opened() as tier:
        groups = [tier.allocate("a", 4096, 3), tier.allocate("b", 4096, 3), tier.allocate("a", 8192, 3)]
        assert len(set.union(*map(segments_of, groups))) == 3


async def test_freed_slots_are_used_again_in_ascending_order():
    async with opened(256 * KIB) as tier:
        slots = tier.allocate("a", 4096, 64)
        for slot in random.Random(1).sample(slots, 10):
            tier.free(slot)
        again = tier.allocate("a", 4096, 64)
        assert again == sorted(again)
        assert len(again) == 10
        assert set(again) < set(slots)


async def test_fewer_slots_are_given_where_nothing_is_free():
    async with opened(512 * KIB) as tier:
        assert len(tier.allocate("a", 16 * KIB, 1000)) == 32
        assert tier.allocate("a", 16 * KIB, 1) == []
        assert tier.available("a", 16 * KIB) == 0


async def test_a_block_larger_than_a_segment_never_fits():
    async with opened() as tier:
        assert tier.largest_slot_bytes == 256 * KIB
        assert tier.available("a", 256 * KIB + 1) == 0
        assert tier.allocate("a", 256 * KIB + 1, 1) == []
        assert len(tier.allocate("a", 256 * KIB, 9)) == 4


async def test_unused_segments_of_the_tenant_are_cut_anew_before_fresh_ones_are_taken():
    async with opened() as tier:
        old = tier.allocate("a", 4096, 1)
        tier.free(old[0])
        new = tier.allocate("a", 8192, 1)
        assert segments_of(new) == segments_of(old)
        assert tier.available("a", 4096) == 3 * 64


async def test_another_tenants_unused_segment_is_not_taken():
    async with opened(256 * KIB) as tier:
        for slot in tier.allocate("a", 4096, 64):
            tier.free(slot)
        assert tier.available("b", 4096) == 0
        assert tier.allocate("b", 4096, 1) == []


async def test_a_slot_is_freed_once():
    async with opened() as tier:
        slot = tier.allocate("a", 4096, 2)[0]
        tier.free(slot)
        with pytest.raises(AssertionError, match="freed once"):
            tier.free(slot)


async def test_owners_are_found_by_slot_and_by_segment_until_the_slot_is_freed():
    async with opened() as tier:
        slots = tier.allocate("a", 4096, 3)
        for name, slot in zip("xy", slots, strict=False):
            tier.bind(slot, name)
        assert [tier.owner(slot) for slot in slots] == ["x", "y", None]
        assert tier.occupants(slots[0] >> 20) == ["x", "y"]
        tier.free(slots[0])
        assert tier.owner(slots[0]) is None
        assert tier.occupants(slots[0] >> 20) == ["y"]
        with pytest.raises(AssertionError, match="no owner"):
            tier.bind(slots[0], "z")


async def test_freeing_a_slot_frees_its_record_and_no_generation_comes_twice():
    async with opened(256 * KIB) as tier:
        seen = []
        for size in (4096, 8192, 4096):
            slot = tier.allocate("a", size, 1)[0]
            seen.append(tier.records.begin(slot, 4000, b"d" * 16, b"h" * 32, b""))
            tier.records.commit(slot, b"c" * 16)
            assert tier.records.content_hash(slot) == b"c" * 16
            assert tier.records.heads([(slot, 1)])[16:] == b"c" * 16
            tier.free(slot)
            seen.append(tier.records.generation(slot))
        assert seen == sorted(set(seen))


async def test_a_view_shows_the_bytes_of_its_slot_and_no_others():
    async with opened() as tier:
        first, second = tier.allocate("a", 4096, 2)
        tier.view(first, 4096)[:] = b"x" * 4096
        tier.view(second, 10)[:] = b"y" * 10
        assert bytes(tier.view(first, 4096)) == b"x" * 4096
        assert memory.hash_bytes(tier.address(second), 10) == memory.hash_many([(tier.address(first) + 4096, 10)])[0]
        with pytest.raises(AssertionError, match="inside"):
            tier.view(first, 4097)


# ---- segments that change tenants ----


async def retired_segment(tier, *, exposed):
    slot = tier.allocate("a", 4096, 1)[0]
    segment_id = slot >> 20
    tier.view(slot, 6)[:] = b"secret"
    fd = os.dup(tier.segment_fd(segment_id))
    if exposed:
        tier.expose(segment_id)
    tier.free(slot)
    tier.retire(segment_id)
    return segment_id, fd


async def test_a_retired_segment_counts_as_retired_until_another_is_in_its_place():
    async with opened() as tier:
        segment_id, fd = await retired_segment(tier, exposed=True)
        os.close(fd)
        assert tier.usage().retired_bytes == 256 * KIB
        assert tier.available("b", 256 * KIB) == 3
        assert segment_id not in {s.segment_id for s in tier.segments()}
        assert tier.is_retired(segment_id)
        tier.audit()
        await tier.dispose(segment_id)
        assert tier.usage().retired_bytes == 0
        assert not tier.is_retired(segment_id)
        assert tier.available("b", 256 * KIB) == 4
        assert segment_id not in {s.segment_id for s in tier.segments()}


@pytest.mark.parametrize("exposed", [True, False])
async def test_the_next_tenant_finds_zeros(exposed):
    async with opened(256 * KIB) as tier:
        segment_id, fd = await retired_segment(tier, exposed=exposed)
        os.close(fd)
        await tier.dispose(segment_id)
        slot = tier.allocate("b", 256 * KIB, 1)[0]
        assert bytes(tier.view(slot, 256 * KIB)) == bytes(256 * KIB)
        assert slot >> 20 > segment_id


async def test_whoever_kept_an_exposed_segment_sees_nothing_of_the_next_tenant():
    async with opened(256 * KIB) as tier:
        segment_id, fd = await retired_segment(tier, exposed=True)
        with mmap.mmap(fd, 256 * KIB, mmap.MAP_SHARED, mmap.PROT_READ) as kept:
            await tier.dispose(segment_id)
            assert os.fstat(fd).st_blocks == 0  # and it keeps no memory from others
            slot = tier.allocate("b", 4096, 1)[0]
            tier.view(slot, 5)[:] = b"other"
            assert kept[:6] == bytes(6)
        os.close(fd)


async def test_a_segment_in_use_is_not_retired():
    async with opened() as tier:
        slot = tier.allocate("a", 4096, 1)[0]
        with pytest.raises(AssertionError, match="nothing uses it"):
            tier.retire(slot >> 20)


async def test_disposal_goes_on_when_its_caller_is_cancelled():
    async with opened() as tier:
        segment_id, fd = await retired_segment(tier, exposed=True)
        os.close(fd)
        disposing = asyncio.create_task(tier.dispose(segment_id))
        await asyncio.sleep(0)
        disposing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await disposing
        await asyncio.gather(*tier._replacements)
        tier.audit()
        assert tier.available("b", 256 * KIB) == 4


async def test_a_segment_counts_as_retired_until_its_bytes_are_given_back(monkeypatch):
    """A purge that said it was complete before would leave them there for a while."""
    renewing, real = threading.Event(), dram.renew

    def slow(segment, segment_id, config):
        assert renewing.wait(PATIENCE_S)
        return real(segment, segment_id, config)

    monkeypatch.setattr(dram, "renew", slow)
    async with opened() as tier:
        segment_id, fd = await retired_segment(tier, exposed=True)
        os.close(fd)
        disposing = asyncio.create_task(tier.dispose(segment_id))
        await turns()
        assert tier.retired("a") == [segment_id]
        renewing.set()
        await disposing
        assert tier.retired("a") == []


@pytest.mark.parametrize("error", [DeviceError, ConfigError])
async def test_memory_that_cannot_be_had_again_stays_retired_and_is_told(monkeypatch, error):
    def refused(segment, segment_id, config):
        segment.close()
        raise error("no memory")

    async with opened(lock="never", huge_pages="never") as tier:
        segment_id, fd = await retired_segment(tier, exposed=True)
        os.close(fd)
        monkeypatch.setattr("kvstored.tiers.dram.renew", refused)
        with pytest.raises(DeviceError, match="no memory"):
            await tier.dispose(segment_id)
        assert tier.usage().retired_bytes == 256 * KIB
        assert "262144 bytes are lost" in tier.warnings[0]


def mapped_segments():
    return Path("/proc/self/maps").read_text().count("memfd:kvstored")


async def test_closing_leaves_no_descriptor_and_no_mapping():
    before, mappings = descriptors(), mapped_segments()
    async with opened() as tier:
        segment_id, fd = await retired_segment(tier, exposed=True)
        os.close(fd)
        tier.allocate("a", 4096, 100)
        assert mapped_segments() > mappings
        disposing = asyncio.create_task(tier.dispose(segment_id))
        await asyncio.sleep(0)
    await disposing
    assert descriptors() == before
    assert mapped_segments() == mappings


# ---- account ----


async def test_tails_that_fit_no_slot_are_dead():
    async with opened(512 * KIB) as tier:
        tier.allocate("a", 100 * KIB, 1)
        usage = tier.usage()
        assert (usage.used_bytes, usage.dead_bytes, usage.blocks) == (100 * KIB, 56 * KIB, 1)
        assert usage.free_bytes == 512 * KIB - 156 * KIB


async def test_tenants_are_charged_for_whole_slots():
    async with opened() as tier:
        slots = tier.allocate("a", 5000, 3)
        tier.allocate("b", 4096, 1)
        tier.free(slots[0])
        assert tier.tenant_usage() == {"a": (2 * 8192, 2), "b": (4096, 1)}


async def test_what_is_being_wiped_is_nobodys_and_accounted_for():
    async with opened() as tier:
        slots = tier.allocate("a", 4096, 3)
        for slot in slots[1:]:
            tier.free(slot)
        segment = tier.segments("a")[0]
        wiping = tier.take_old(segment.segment_id, segment.old_slots)
        assert len(wiping) == 2
        assert tier.used_bytes_by_tenant() == {"a": 4096}
        assert tier.misaccounted() == []
        tier.give_back_old(wiping)
        assert tier.misaccounted() == []


@pytest.mark.parametrize("seed", range(5))
async def test_the_account_adds_up_after_every_step(seed):
    rng, held = random.Random(seed), []
    async with opened(MIB + 12 * KIB, lock="never", huge_pages="never") as tier:
        for _ in range(300):
            tenant, size, count = rng.choice("abc"), rng.choice([4000, 16 * KIB, 100 * KIB]), rng.randint(1, 40)
            promised = tier.available(tenant, size)
            slots = tier.allocate(tenant, size, count)
            assert len(slots) == min(count, promised)
            held += slots
            rng.shuffle(held)
            for _ in range(rng.randint(0, len(held))):
                tier.free(held.pop())
            for segment in tier.segments():
                if segment.tenant and not segment.used_slots and rng.random() < 0.2:
                    tier.retire(segment.segment_id)
                    tier.audit()
                    await tier.dispose(segment.segment_id)
            tier.audit()
            assert tier.usage().balanced()
        assert len(set(held)) == len(held) == tier.usage().blocks


@pytest.mark.parametrize("picked", [[0, 1, 2, 3], [2], [3, 1], [0, 1, 3], [5, 6, 7, 8]])
async def test_heads_are_the_starts_of_the_records_whether_or_not_slots_lie_side_by_side(picked):
    async with opened(16 * MIB, 2 * MIB) as dram:
        slots = dram.allocate("t", MIB, 9)
        for number, slot in enumerate(slots):
            dram.records.begin(slot, 100 + number, b"d" * 16, b"hash", b"")
            dram.records.commit(slot, bytes([number]) * 16)
        chosen = [slots[i] for i in picked]
        heads = dram.records.heads([(chosen[first], end - first) for first, end in slot_runs(chosen)])
        found = [HEAD.unpack_from(heads, 32 * i) for i in range(len(chosen))]
        assert [(size, content) for _, _, size, content in found] == [(100 + i, bytes([i]) * 16) for i in picked]
