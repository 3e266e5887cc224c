"""Blocks that were read outlive their extent: which, how many, at what price, and what is never written again."""

import asyncio
import shutil
import time

import pytest

from kvstored.catalog.history import RECYCLED, Reason
from kvstored.clock import SystemClock
from kvstored.device.file import FileDevice
from kvstored.lifetime import Expiry
from kvstored.mover.gate import Gate
from kvstored.policy.admission import AdmitAll
from kvstored.policy.extent_log import ExtentLog
from kvstored.policy.orders import make_order
from kvstored.policy.two_tiers import TwoTiers
from kvstored.policy.watermarks import Watermarks
from kvstored.store.removal import gone_below
from kvstored.testing.contract_lower_tier import DIGEST, Blocks, block_hash, content, find, load_all
from kvstored.testing.node import BLOCK_BYTES, Node
from kvstored.tiers.base import Load
from kvstored.tiers.formats import ExtentRow, State
from kvstored.tiers.nvme import NvmeConfig, NvmeTier
from kvstored.tiers.tombstones import Tombstone, _still_needed, pack_tombstone, unpack_tombstones
from tests.unit.test_nvme import EXTENT_BYTES, QUIET, Harness, names, store
from tests.unit.test_simulator import workload

EXTENT_BLOCKS = 7  # of 16 KiB in an extent


@pytest.fixture
def blocks():
    made = Blocks()
    yield made
    made.close()


def volume_of(harness):
    (volume,) = harness.tier._volumes.values()
    return volume


async def store_all(harness, blocks, chosen, **options):
    """One after the other, and what follows from each."""
    for name in chosen:
        assert await store(harness, blocks, [name], **options) == [True]
        await volume_of(harness).reinsertion.ended()
        harness.audit()


async def read(harness, blocks, chosen, tenant="t"):
    blocks.reset()
    found = await load_all(harness, blocks, tenant, chosen)
    assert found == {name: content(name, 16384) for name in chosen}


def counters(harness):
    return harness.tier.counters()


async def test_what_was_read_is_there_after_its_extent_was_recycled_and_the_rest_is_not(tmp_path, blocks):
    async with Harness(tmp_path, reinsert_share=0.5) as harness:
        await store_all(harness, blocks, names("a", 2 * EXTENT_BLOCKS))
        await read(harness, blocks, ["a1", "a3"])
        (before,) = await find(harness, "t", ["a1"])
        await store_all(harness, blocks, names("b", 3 * EXTENT_BLOCKS - 2))
        assert [name for name in names("a", EXTENT_BLOCKS) if (await find(harness, "t", [name]))[0]] == ["a1", "a3"]
        (after,) = await find(harness, "t", ["a1"])
        assert after.location != before.location
        assert (after.created_s, after.parent) == (before.created_s, before.parent)
        assert counters(harness)["reinserted_blocks"] == 2
        assert counters(harness)["reinserted_bytes"] == 2 * 16384
        (wear,) = harness.tier.wear()
        assert wear.reinserted_bytes == 2 * 16384
        assert wear.stored_bytes == (5 * EXTENT_BLOCKS - 2) * 16384
        assert wear.written_bytes > wear.stored_bytes + wear.reinserted_bytes
        await harness.restart()
        await read(harness, blocks, ["a1", "a3"])


async def test_no_more_than_a_share_of_an_extent_is_written_again(tmp_path, blocks):
    async with Harness(tmp_path, reinsert_share=0.45) as harness:
        await store_all(harness, blocks, names("a", 2 * EXTENT_BLOCKS))
        await read(harness, blocks, names("a", EXTENT_BLOCKS))
        await store_all(harness, blocks, names("b", 3 * EXTENT_BLOCKS - 3))
        assert counters(harness)["reinserted_blocks"] == 3  # of seven
        await read(harness, blocks, ["a0", "a1", "a2"])


@pytest.mark.parametrize("settings", [{"reinsert_share": 0.0}, {"write_budget_bytes_per_day": 1 << 20}])
async def test_nothing_is_written_again_where_it_is_off_or_the_budget_is_short(tmp_path, blocks, settings):
    async with Harness(tmp_path, **settings) as harness:
        await store_all(harness, blocks, names("a", 2 * EXTENT_BLOCKS))
        await read(harness, blocks, names("a", EXTENT_BLOCKS))
        await store_all(harness, blocks, names("b", 3 * EXTENT_BLOCKS - 2))
        assert not counters(harness).get("reinserted_blocks")


async def test_a_check_of_all_blocks_is_no_use_of_them(tmp_path, blocks):
    async with Harness(tmp_path, reinsert_share=0.5) as harness:
        await store_all(harness, blocks, names("a", 2 * EXTENT_BLOCKS))
        records = await harness.tier.find("t", DIGEST, [block_hash("a1")], prefix=False)
        blocks.reset()
        load = blocks.load("a1", records[0])
        assert await harness.tier.load([Load(load.digest, load.hash, load.record, load.address, used=False)]) == [True]
        harness.tier.unpin(records)
        await store_all(harness, blocks, names("b", 3 * EXTENT_BLOCKS))
        assert not counters(harness).get("reinserted_blocks")


async def test_an_end_is_kept(tmp_path, blocks):
    async with Harness(tmp_path, reinsert_share=0.5) as harness:
        end = Expiry(float(int(time.time()) + 3600))
        blocks.reset()
        one = blocks.store("a0", 16384)
        ending = type(one)(*(getattr(one, name) for name in one.__struct_fields__[:-1]), end)
        assert await harness.tier.store("t", [ending]) == [True]
        await store_all(harness, blocks, names("a", 2 * EXTENT_BLOCKS)[1:])
        await read(harness, blocks, ["a0"])
        await store_all(harness, blocks, names("b", 3 * EXTENT_BLOCKS - 1))
        assert counters(harness)["reinserted_blocks"] == 1
        assert (await find(harness, "t", ["a0"]))[0].expiry == end


async def test_what_is_deleted_meanwhile_stays_away(tmp_path, blocks):
    async with Harness(tmp_path, reinsert_share=0.5) as harness:
        await store_all(harness, blocks, names("a", 2 * EXTENT_BLOCKS))
        await read(harness, blocks, ["a1", "a3"])
        volume = volume_of(harness)
        written, original = asyncio.Event(), volume._write

        async def write(placed, locks=()):
            if [p.store.hash for p in placed] == [block_hash("a1"), block_hash("a3")]:
                assert await harness.tier.delete("t", DIGEST, [block_hash("a1")]) == 1
                written.set()
            return await original(placed, locks)

        volume._write = write
        await store_all(harness, blocks, names("b", 3 * EXTENT_BLOCKS - 2))
        assert written.is_set()
        assert [record is not None for record in await find(harness, "t", ["a1", "a3"])] == [False, True]
        assert counters(harness)["reinserted_blocks"] == 1


@pytest.mark.parametrize("recycled", [False, True])
async def test_what_is_deleted_afterwards_stays_away_from_an_index_that_is_made_anew(tmp_path, blocks, recycled):
    async with Harness(tmp_path, reinsert_share=0.5) as harness:
        await store_all(harness, blocks, names("a", 2 * EXTENT_BLOCKS))
        await read(harness, blocks, ["a1", "a3"])
        await store_all(harness, blocks, names("b", EXTENT_BLOCKS + 1))
        assert counters(harness)["reinserted_blocks"] == 2
        assert await harness.tier.delete("t", DIGEST, [block_hash("a1")]) == 1
        if recycled:  # the extent in which it was deleted, before the one that it came from
            assert await harness.tier.delete("t", DIGEST, [block_hash(name) for name in ("a3", "b7")]) == 2
            volume = volume_of(harness)
            (number,) = [e.number for e in volume.table.extents if e.state.name == "OPEN"]
            await volume.recycler.empty([number])
            volume.index._beside._tombstones.forget(volume.index.rows())
    shutil.rmtree(tmp_path / "drive0" / "index")
    async with Harness(tmp_path, reinsert_share=0.5) as harness:
        found = [record is not None for record in await find(harness, "t", ["a0", "a1", "a3"])]
        assert found == [True, False, not recycled]
        harness.audit()


def test_a_mark_of_a_move_becomes_a_tombstone_when_the_delete_is_forgotten_first():
    rows = [ExtentRow(1, 1, "t", State.SEALED), ExtentRow(4, 2, "t", State.OPEN)]
    left, deleted = Tombstone(b"a", 1, 1, 4096, moved=True), Tombstone(b"a", 4, 1, 0)
    other = Tombstone(b"b", 1, 1, 8192, moved=True)
    assert _still_needed([left, other, deleted], rows) == [left._replace(moved=False), other]
    assert _still_needed([left, other], rows) == [left, other]
    assert unpack_tombstones(pack_tombstone(left) + pack_tombstone(deleted)) == ([left, deleted], 0)


async def test_an_index_that_is_made_anew_has_them_once(tmp_path, blocks):
    async with Harness(tmp_path, reinsert_share=0.5) as harness:
        await store_all(harness, blocks, names("a", 2 * EXTENT_BLOCKS))
        await read(harness, blocks, ["a1", "a3"])
        await store_all(harness, blocks, names("b", 2 * EXTENT_BLOCKS - 2))
        assert counters(harness)["reinserted_blocks"] == 2
    shutil.rmtree(tmp_path / "drive0" / "index")
    async with Harness(tmp_path, reinsert_share=0.5) as harness:
        await read(harness, blocks, names("a", 2 * EXTENT_BLOCKS))
        harness.audit()


async def test_a_block_that_cannot_be_read_is_left_and_the_others_are_written(tmp_path, blocks):
    async with Harness(tmp_path, reinsert_share=0.5) as harness:
        await store_all(harness, blocks, names("a", 2 * EXTENT_BLOCKS))
        await read(harness, blocks, ["a1", "a3"])
        with (tmp_path / "drive0" / "extents" / "00000001.ext").open("r+b") as file:
            file.seek(1 * 16384 + 100)
            file.write(b"wrong")
        await store_all(harness, blocks, names("b", 3 * EXTENT_BLOCKS - 2))
        assert counters(harness)["reinserted_blocks"] == 1
        await read(harness, blocks, ["a3"])


async def test_blocks_are_encrypted_again(tmp_path, blocks):
    async with Harness(tmp_path, reinsert_share=0.5) as harness:
        harness.tier.keys.configure("t", "aes-256-gcm")
        await harness.tier.keys.unlock("t", [b"m" * 32])
        await store_all(harness, blocks, names("a", 2 * 6))
        await read(harness, blocks, ["a1"])
        (before,) = await find(harness, "t", ["a1"])
        await store_all(harness, blocks, names("b", 3 * 7))
        (after,) = await find(harness, "t", ["a1"])
        assert after.seal
        assert after.seal != before.seal
        await read(harness, blocks, ["a1"])


async def test_tenants_keep_their_own_extents(tmp_path, blocks):
    async with Harness(tmp_path, reinsert_share=0.5, capacity_bytes=6 * EXTENT_BYTES) as harness:
        await store_all(harness, blocks, names("u", 2 * EXTENT_BLOCKS + 1), tenant="u")
        blocks.reset()
        await load_all(harness, blocks, "u", ["u0"])
        await store_all(harness, blocks, names("t", 3 * EXTENT_BLOCKS + 1))
        (record,) = await find(harness, "u", ["u0"])
        assert volume_of(harness).table.owner(record) == "u"
        harness.audit()


# ---- the simulator knows it as well ----


def test_the_simulated_log_writes_what_was_hit_again():
    log = ExtentLog(8, 2, reinsert_share=0.5)
    log.append(range(7))
    log.hit([0])
    log.append([7])  # into the last extent
    assert not log.reinserted_blocks
    log.append([8])
    assert 0 not in log, "its extent was the one to go"
    log.hit([2, 3])
    log.append([9])
    log.append([10])
    assert log.reinserted_blocks == 0, "2 and 3 were hit after the look at their extent"
    log.hit([6])
    log.append([11, 12])
    assert 6 in log


async def test_the_store_over_a_log_has_exactly_the_hits_and_writes_of_the_simulator(tmp_path):
    requests, marks = workload(5, 900), Watermarks(0.6, 0.3, 1.0)  # one store a demotion
    extent_bytes = 64 << 10
    per_extent = (extent_bytes - 8192) // BLOCK_BYTES  # the rest is for the footer
    log = ExtentLog(4 * per_extent, per_extent, reinsert_share=0.25)
    tiers = TwoTiers(make_order("lru"), 50, AdmitAll(), marks, nvme=log)
    simulated = list(map(tiers.request, requests))
    assert not tiers.short_blocks
    assert log.reinserted_blocks > 10
    assert log.recycled_blocks > 50
    nodes = []

    def gone(tenant, digest, hashes):
        gone_below(nodes[0].parts.catalog, nodes[0].parts.history, digest, hashes, Reason.EVICTED, RECYCLED)

    config = NvmeConfig(paths=[tmp_path], capacity_bytes=4 * extent_bytes, extent_bytes=extent_bytes, **QUIET)
    tier = NvmeTier(config, FileDevice(), SystemClock(), gone)
    await tier.open()
    try:
        found = []
        async with Node(50, below=tier, watermarks=marks, gate=Gate()) as node:
            nodes.append(node)
            session = await node.session()
            space = await node.space(session)

            async def settle():
                while True:
                    await asyncio.sleep(0.001)
                    below = node.parts.below
                    moving = below.promoter.queued_blocks + below.promoter.inflight_bytes
                    if below.mover.idle and not moving and not tier.counters().get("reinserting"):
                        return

            for ids in requests:
                hashes = [f"{block:016}".encode() for block in ids]
                held = await node.get(session, space, hashes, wait_s=60)
                await settle()
                node.store.reads.release(session, [lease.lease_id for lease in held.leases])
                await settle()
                if held.blocks < len(ids):
                    parent = hashes[held.blocks - 1] if held.blocks else b""
                    await node.put(session, space, hashes[held.blocks :], parent)
                    await settle()
                found.append(held.blocks)
            node.lower = None  # what a tier in memory tells of its pins this one does not
            assert found == simulated
            assert tier.counters()["stored_blocks"] == tiers.written_blocks
            assert tier.counters()["reinserted_blocks"] == log.reinserted_blocks
    finally:
        await tier.close()
