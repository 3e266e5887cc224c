"""The DRAM tier's memory over restarts: what comes back, what does not, and what is said."""

import os
import struct
from contextlib import asynccontextmanager

import pytest

from kvstored.errors import ConfigError
from kvstored.keys import Namespace
from kvstored.testing.keeping import MemoryKeeper
from kvstored.tiers.dram import DramConfig, DramTier
from kvstored.tiers.slots import RECORD_BYTES
from tests.descriptors import descriptors

KIB, MIB = 1 << 10, 1 << 20
DIGEST, CONTENT = b"d" * 16, b"c" * 16
NAMESPACE = Namespace("acme", DIGEST, b"encoding", {"model": "m"})


@pytest.fixture
def keeper():
    made = MemoryKeeper()
    yield made
    made.close()


def config(capacity_bytes=MIB, segment_bytes=256 * KIB, **settings):
    return DramConfig(capacity_bytes, segment_bytes, **{"huge_pages": "never", "lock": "never", **settings})


@asynccontextmanager
async def opened(keeper, tenants=None, **settings):
    tier = DramTier(config(**settings), keeper, tenants)
    await tier.open()
    try:
        tier.audit()
        yield tier
        tier.audit()
    finally:
        await tier.close()


def put(tier, names, size=16 * KIB, tenant="acme"):
    """Store a block of each name, as the store does."""
    slots = tier.allocate(tenant, size, len(names))
    for slot, name in zip(slots, names, strict=True):
        tier.records.begin(slot, size, DIGEST, name.encode().ljust(16), b"")
        tier.view(slot, size)[:] = name.encode()[:1] * size
        tier.records.commit(slot, CONTENT)
    return slots


def found(tier):
    return {
        (segment_id << 20 | block.slot): block.hash.decode().strip()
        for segment_id, blocks in tier.adoption.found.items()
        for block in blocks
    }


async def test_committed_blocks_are_found_in_their_slots_with_their_bytes(keeper):
    async with opened(keeper) as tier:
        slots = put(tier, ["a", "b", "c"])
    async with opened(keeper) as tier:
        assert found(tier) == dict(zip(slots, ["a", "b", "c"], strict=True))
        assert bytes(tier.view(slots[1], 16 * KIB)) == b"b" * 16 * KIB
        assert tier.usage().used_bytes == 3 * 16 * KIB
        assert tier.tenant_usage() == {"acme": (3 * 16 * KIB, 3)}
        assert not tier.adoption.dropped
        (block,) = [b for b in tier.adoption.found[slots[0] >> 20] if b.slot == 0]
        assert (block.size_bytes, block.content_hash, block.digest) == (16 * KIB, CONTENT, DIGEST)


async def test_nothing_comes_back_where_nobody_keeps_it():
    async with opened(None) as tier:
        put(tier, ["a"])
        assert tier.boot == 0
        assert tier.ledger is None
        assert "kept" not in tier.properties()
    async with opened(None) as tier:
        assert not found(tier)


async def test_what_is_free_half_written_damaged_or_unhashed_is_a_free_slot_with_a_new_generation(keeper):
    async with opened(keeper) as tier:
        slots = put(tier, list("abcdef"))
        tier.free(slots[1])
        tier.records.begin(slots[1], 16 * KIB, DIGEST, b"x" * 16, b"")  # never committed
        tier.records._of(slots[2])._table[(slots[2] + 1 & 0xFFFFF) * RECORD_BYTES + 60] ^= 1
        tier.free(slots[3])
        tier.records.begin(slots[4], 16 * KIB, DIGEST, b"x" * 16, b"")
        tier.records.commit(slots[4], bytes(16))
        before = [tier.records.generation(slot) for slot in slots]
        tier.audit = lambda: None  # the test wrote behind the tier's back
    async with opened(keeper) as tier:
        assert list(found(tier).values()) == ["a", "f"]
        assert tier.adoption.dropped == {"half_written": 1, "damaged_record": 1, "unhashed": 1}
        assert tier.usage().blocks == 2
        for index in (1, 2, 4):
            assert tier.records.generation(slots[index]) > before[index]
        assert set(tier.allocate("acme", 16 * KIB, 14)) >= {slots[1], slots[2], slots[3], slots[4]}


async def test_ids_of_segments_go_on_and_their_memory_stays_its_tenants(keeper):
    async with opened(keeper) as tier:
        put(tier, ["a"])
        ids = [segment.segment_id for segment in tier.segments()]
    async with opened(keeper) as tier:
        assert [segment.segment_id for segment in tier.segments()] == ids
        (mine,) = tier.segments("acme")
        assert tier.is_exposed(mine.segment_id)
        assert not {slot >> 20 for slot in tier.allocate("other", 16 * KIB, 100)} & {mine.segment_id}
        (slot,) = found(tier)
        tier.free(slot)
        tier.retire(mine.segment_id)
        await tier.dispose(mine.segment_id)
        assert max(segment.segment_id for segment in tier.segments()) == max(ids) + 1
    async with opened(keeper) as tier:
        assert mine.segment_id not in [segment.segment_id for segment in tier.segments()]
        assert len(tier.segments()) == len(ids)


async def test_a_retired_segment_is_dropped_by_the_keeper_before_its_memory_is_made_anew(keeper):
    async with opened(keeper) as tier:
        (slot,) = put(tier, ["a"])
        tier.free(slot)
        tier.retire(slot >> 20)
        keeper.log.clear()
        await tier.dispose(slot >> 20)
        old, new = slot >> 20, max(segment.segment_id for segment in tier.segments())
        assert keeper.log == [
            ("drop", f"seg-{old}"),
            ("drop", f"slots-{old}"),
            ("keep", f"seg-{new}"),
            ("keep", f"slots-{new}"),
        ]


async def test_a_smaller_capacity_keeps_the_segments_that_hold_most_and_counts_the_rest(keeper):
    async with opened(keeper) as tier:
        put(tier, [f"{n}" for n in range(40)])  # 16 a segment: two full ones and a half one
    async with opened(keeper, capacity_bytes=512 * KIB) as tier:
        assert len(found(tier)) == 32
        assert tier.adoption.dropped == {"capacity": 8}
        assert tier.usage().capacity_bytes == 512 * KIB
        assert any("does not fit" in note for note in tier.adoption.notes)
    async with opened(keeper) as tier:
        assert len(found(tier)) == 32
        assert sum(segment.size_bytes for segment in tier.segments()) == MIB


async def test_segments_of_another_size_are_adopted_and_the_missing_capacity_is_made_fresh(keeper):
    async with opened(keeper) as tier:
        put(tier, ["a"])
    async with opened(keeper, capacity_bytes=2 * MIB, segment_bytes=512 * KIB) as tier:
        assert list(found(tier).values()) == ["a"]
        assert sorted(s.size_bytes for s in tier.segments()) == [256 * KIB] * 4 + [512 * KIB] * 2


async def test_the_memory_of_a_tenant_that_is_gone_is_dropped(keeper):
    async with opened(keeper) as tier:
        put(tier, ["a"])
        put(tier, ["b"], tenant="other")
    async with opened(keeper, tenants=["other"]) as tier:
        assert list(found(tier).values()) == ["b"]
        assert tier.adoption.dropped == {"tenant_unknown": 1}
        assert any("not configured" in note for note in tier.adoption.notes)


async def test_namespaces_come_back(keeper):
    async with opened(keeper) as tier:
        assert tier.namespaces() == []
        await tier.remember_namespaces([NAMESPACE, NAMESPACE])
    async with opened(keeper) as tier:
        assert tier.namespaces() == [NAMESPACE]


async def test_many_namespaces_move_the_registry_to_a_larger_one(keeper):
    many = [Namespace("acme", n.to_bytes(16, "big"), bytes(16 << 10), {"model": str(n)}) for n in range(200)]
    async with opened(keeper) as tier:
        for namespace in many:
            await tier.remember_namespaces([namespace])
    assert [name for name in keeper.held if name.startswith("registry")] == ["registry-3"]
    async with opened(keeper) as tier:
        assert tier.namespaces() == many
        assert len(tier.segments()) == 4


async def test_namespaces_of_a_tenant_are_forgotten_and_all_else_that_is_noted_stays(keeper):
    theirs = [Namespace("gone", bytes([n]) * 16, b"secret", {"model": "secret"}) for n in range(3)]
    async with opened(keeper) as tier:
        (slot,) = put(tier, ["a"])
        await tier.remember_namespaces([*theirs, NAMESPACE])
        await tier.remember_epochs(b"epochs")
        await tier.forget_namespaces("gone")
        await tier.forget_namespaces("nobody")
        assert tier.namespaces() == [NAMESPACE]
        (name,) = [name for name in keeper.held if name.startswith("registry")]
        assert b"secret" not in os.pread(keeper.held[name], 1 << 20, 0)
    async with opened(keeper) as tier:
        assert tier.namespaces() == [NAMESPACE]
        assert tier.epochs() == b"epochs"
        assert list(found(tier)) == [slot]
        await tier.remember_namespaces(theirs)
        assert len(tier.namespaces()) == 4


@pytest.mark.parametrize("kind", ["registry", "slots"])
async def test_memory_of_a_newer_format_is_dropped_and_said(keeper, kind):
    async with opened(keeper) as tier:
        (slot,) = put(tier, ["a"])
    for name, fd in keeper.held.items():
        if name.startswith(kind):
            os.pwrite(fd, struct.pack("=I", 99), 8)
    async with opened(keeper) as tier:
        assert not found(tier)
        assert any("format 99" in note for note in tier.adoption.notes)
        assert min(segment.segment_id for segment in tier.segments()) > slot >> 20
        put(tier, ["b"])
    async with opened(keeper) as tier:
        assert list(found(tier).values()) == ["b"]
        assert len(keeper.held) == 2 * 4 + 2


async def test_what_nobody_knows_is_dropped_by_the_keeper(keeper):
    stray = os.memfd_create("stray")
    for name in ("seg-5", "slots-5", "connection", "registry-x"):
        keeper.keep(name, stray)
    os.close(stray)
    async with opened(keeper) as tier:
        assert min(segment.segment_id for segment in tier.segments()) == 6
    assert not {"connection", "registry-x"} & keeper.held.keys()


async def test_where_the_keeper_is_full_the_tier_lives_and_warns(keeper):
    keeper.room = 2 + 2 * 2
    async with opened(keeper) as tier:
        assert tier.properties()["kept"] == "partly"
        assert "2 segments will not survive" in tier.warnings[-1]
    async with opened(keeper) as tier:
        assert len(tier.adoption.segments) == 2


async def test_a_larger_segment_size_has_effect_though_the_memory_was_full(keeper):
    async with opened(keeper) as tier:
        slots = put(tier, [f"{number}" for number in range(64)])
        tier.free(slots[0])
    async with opened(keeper, segment_bytes=512 * KIB) as tier:
        assert tier.largest_slot_bytes == 512 * KIB
        assert len(found(tier)) == 32
        assert tier.adoption.dropped == {"capacity": 31}
        put(tier, ["large"], size=512 * KIB)
    async with opened(keeper, segment_bytes=512 * KIB) as tier:
        assert len(found(tier)) == 33, "it is there already"


async def test_more_segments_than_descriptors_are_a_wrong_setting_that_says_what_helps(keeper, monkeypatch):
    monkeypatch.setattr("kvstored.tiers.provision.descriptors_max", lambda: 75)
    before = descriptors()
    with pytest.raises(ConfigError, match=r"4 segments need 76 .* may have 75: .*LimitNOFILE.*segment_bytes"):
        await DramTier(config(), keeper).open()
    assert descriptors() - before == len(keeper.held)
    monkeypatch.setattr("kvstored.tiers.provision.descriptors_max", lambda: 76)
    async with opened(keeper):
        pass


async def test_memory_that_must_be_locked_and_is_not_is_fatal_after_a_restart_too(keeper, monkeypatch):
    async with opened(keeper) as tier:
        put(tier, ["a"])
    monkeypatch.setattr("kvstored.device.memory.Mapping.lock", lambda self: False)
    before = descriptors()
    with pytest.raises(ConfigError, match="LimitMEMLOCK"):
        await DramTier(config(lock="require"), keeper).open()
    assert descriptors() == before


async def test_closing_leaves_no_descriptor_behind(keeper):
    async with opened(keeper) as tier:
        put(tier, ["a"])
    before = descriptors()
    async with opened(keeper):
        pass
    assert descriptors() == before


async def test_every_start_is_counted(keeper):
    boots = []
    for _ in range(3):
        async with opened(keeper) as tier:
            boots.append(tier.boot)
    assert boots == [1, 2, 3]


async def test_a_kill_between_any_two_calls_of_the_keeper_loses_at_most_what_was_not_kept_yet(keeper):
    pictures = []
    keep = keeper.keep

    def watched(name, fd):
        pictures.append(keeper.snapshot())
        return keep(name, fd)

    keeper.keep = watched
    async with opened(keeper) as tier:
        put(tier, ["a"])
        pictures.append(keeper.snapshot())
    for picture in pictures:
        async with opened(picture) as tier:
            assert len(tier.segments()) == 4
            assert list(found(tier).values()) in ([], ["a"])
        picture.close()
    assert len(pictures) == 2 + 2 * 4 + 1
