"""Blocks that are encrypted at rest: round trips, damage, keys that are missing, wrong, changed or destroyed."""

import errno
import os
import shutil

import pytest

from kvstored.errors import DeviceError
from kvstored.testing.contract_lower_tier import DIGEST, Blocks, block_hash, content, find, load_all
from kvstored.testing.faulty import FakeDevice
from kvstored.tiers.base import Health
from kvstored.tiers.formats import ExtentFlags
from kvstored.tiers.sealing import ALGORITHMS, key_id
from tests.unit.test_nvme import EXTENT_BYTES, Harness, names, store

OLD, NEW = b"\1" * 32, b"\2" * 32
AES = "aes-256-gcm"
FEW = names("a", 3)


@pytest.fixture
def blocks():
    made = Blocks()
    yield made
    made.close()


def raw(path):
    """All bytes that lie below a path."""
    return b"".join(file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file())


def plain_names(path, candidates, size=16384):
    data = raw(path)
    return {name for name in candidates if content(name, size)[:64] in data}


async def encrypt(harness, algorithm=AES, tenant="t", masters=(OLD,)):
    harness.tier.keys.configure(tenant, algorithm)
    await harness.tier.keys.unlock(tenant, masters)


async def loaded(harness, blocks, candidates=FEW, tenant="t"):
    blocks.reset()
    found = await load_all(harness, blocks, tenant, candidates)
    assert all(data == content(name, len(data)) for name, data in found.items())
    return set(found)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [1, 4095, 4096, 16384, 20000, 100_000])
async def test_blocks_come_back_and_none_of_their_bytes_lie_on_the_device(tmp_path, blocks, algorithm, size):
    async with Harness(tmp_path) as harness:
        await encrypt(harness, algorithm)
        assert all(await store(harness, blocks, FEW, size=size))
        assert await loaded(harness, blocks) == set(FEW)
        assert all(record.seal for record in await find(harness, "t", FEW))
        assert harness.tier.properties()["encryption.t"] == algorithm
    if size >= 4095:
        assert not plain_names(tmp_path, FEW, size)


async def test_a_tenant_without_encryption_leaves_no_trace_of_it(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, FEW)
        assert not any(record.seal for record in await find(harness, "t", FEW))
        assert "encryption.t" not in harness.tier.properties()
    assert plain_names(tmp_path, FEW) == set(FEW)
    assert not (tmp_path / "drive0" / "keys").exists()
    assert b'"format":2' in (tmp_path / "drive0" / "FORMAT").read_bytes()


async def test_what_is_at_the_end_of_a_slot_beyond_the_block_is_zeros(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        await encrypt(harness)
        await store(harness, blocks, ["a"], size=5000)
        (record,) = await find(harness, "t", ["a"])
        blocks.reset()
        blocks.store("b", 8192)  # something that lay there before
        blocks.reset()
        load = blocks.load("a", record)
        assert await harness.tier.load([load]) == [True]
        assert blocks.bytes_at(load.address + 5000, 8192 - 5000) == bytes(8192 - 5000)


async def test_they_come_back_after_a_restart_when_the_key_is_there_again(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        await encrypt(harness)
        await store(harness, blocks, FEW)
        await harness.restart()
        assert await loaded(harness, blocks) == set()
        assert harness.tier.keys.waiting() == {"t"}
        await encrypt(harness)
        assert await loaded(harness, blocks) == set(FEW)
        assert harness.tier.keys.waiting() == set()


async def test_many_blocks_over_many_extents_and_restarts(tmp_path, blocks):
    async with Harness(tmp_path, capacity_bytes=8 * EXTENT_BYTES) as harness:
        await encrypt(harness)
        for round_ in range(12):
            await store(harness, blocks, names(f"{round_}-", 5))
            await harness.restart()
            await encrypt(harness)
        everything = {name for round_ in range(12) for name in names(f"{round_}-", 5)}
        kept = await loaded(harness, blocks, sorted(everything))
        assert len(kept) >= 30  # what the capacity holds
        assert not plain_names(tmp_path, everything)


# --- damage ---


@pytest.mark.parametrize("where", [0, 8000, 16383])
async def test_a_flip_in_the_ciphertext_is_a_miss_and_the_record_goes(tmp_path, blocks, where):
    async with Harness(tmp_path) as harness:
        await encrypt(harness)
        await store(harness, blocks, FEW)
        place = (await find(harness, "t", FEW))[1].location
        path = tmp_path / "drive0" / "extents" / f"{place.extent:08d}.ext"
        with path.open("r+b") as file:
            file.seek(place.offset + where)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        assert await loaded(harness, blocks) == {"a0", "a2"}
        assert [tenant for tenant, _, _ in harness.dropped] == ["t"]
        assert [record is not None for record in await find(harness, "t", FEW)] == [True, False, True]


@pytest.mark.parametrize("algorithm", ["", *ALGORITHMS])
async def test_a_bad_sector_costs_its_own_block_and_none_of_those_read_with_it(
    tmp_path, blocks, monkeypatch, algorithm
):
    many = names("a", 4)
    async with Harness(tmp_path, device := FakeDevice(), retry_s=3600.0, scrub_bytes_per_s=0) as harness:
        await encrypt(harness, algorithm)
        assert all(await store(harness, blocks, many, size=20_000))
        places = [record.location for record in await find(harness, "t", many)]
        assert len({place.extent for place in places}) == 1, "one call reads them all"
        preadv, bad = device._preadv, places[1].offset + 4096

        def fails_there(file, buffers, offset):
            if file.path.suffix == ".ext" and offset <= bad < offset + sum(map(len, buffers)):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return preadv(file, buffers, offset)

        monkeypatch.setattr(device, "_preadv", fails_there)
        assert await loaded(harness, blocks, many) == set(many) - {many[1]}
        assert harness.tier.counters().get("load_corrupt_blocks", 0) == 0
        assert (await find(harness, "t", many)).count(None) == 1


async def test_ciphertext_of_one_record_is_not_taken_for_another_s(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        await encrypt(harness)
        await store(harness, blocks, FEW)
        places = [record.location for record in await find(harness, "t", FEW)]
        path = tmp_path / "drive0" / "extents" / f"{places[0].extent:08d}.ext"
        data = bytearray(path.read_bytes())
        first, second = (slice(place.offset, place.offset + 16384) for place in places[:2])
        data[first], data[second] = data[second], data[first]
        path.write_bytes(data)
        assert await loaded(harness, blocks) == {"a2"}


# --- keys that are missing or wrong ---


async def test_without_its_key_nothing_of_a_tenant_goes_below_and_others_do(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        harness.tier.keys.configure("t", AES)
        assert harness.tier.barred == {"t"}
        assert await store(harness, blocks, FEW) == [False] * 3
        assert all(await store(harness, blocks, ["b"], tenant="u"))
        assert "locked" in harness.tier.properties()["encryption.t"]
        await encrypt(harness)
        assert harness.tier.barred == set()
        assert all(await store(harness, blocks, FEW))
    assert not plain_names(tmp_path, FEW)


async def test_with_a_wrong_master_key_records_are_misses_and_none_is_lost(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        await encrypt(harness)
        await store(harness, blocks, FEW)
        await harness.restart()
        await encrypt(harness, masters=[NEW])
        assert "another master key" in harness.tier.keys.locked()["t"]
        assert await loaded(harness, blocks) == set()
        assert await store(harness, blocks, ["b"]) == [False]
        await harness.restart()
        await encrypt(harness)
        assert await loaded(harness, blocks) == set(FEW)
        assert harness.dropped == []


async def test_a_load_that_was_found_before_its_key_went_is_a_miss_and_keeps_its_record(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        await encrypt(harness)
        await store(harness, blocks, ["a"])
        (record,) = await find(harness, "t", ["a"])
        (path,) = harness.tier.keys.paths
        key = path.volume.keys.take("t")
        blocks.reset()
        assert await harness.tier.load([blocks.load("a", record)]) == [False]
        path.volume.keys._open("t", key)
        assert await loaded(harness, blocks, ["a"]) == {"a"}


async def test_a_scrub_leaves_alone_what_it_has_no_key_for(tmp_path, blocks):
    async with Harness(tmp_path, scrub_bytes_per_s=1 << 30) as harness:
        await encrypt(harness)
        await store(harness, blocks, FEW)
        extent = (await find(harness, "t", FEW))[0].location.extent
        (path,) = harness.tier.keys.paths
        await path.scrubber.scrub_extent(extent)
        counts = harness.tier.counters()
        assert (counts["scrubbed_bytes"], counts.get("scrub_corrupt_blocks", 0)) == (3 * 16384, 0)
        await harness.restart()
        (path,) = harness.tier.keys.paths
        await path.scrubber.scrub_extent(extent)
        assert harness.tier.counters()["scrub_locked_blocks"] == 3
        await encrypt(harness)
        assert await loaded(harness, blocks) == set(FEW)


async def test_a_damaged_key_file_locks_and_both_copies_put_back_unlock(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        await encrypt(harness)
        await store(harness, blocks, FEW)
        keys = tmp_path / "drive0" / "keys"
        shutil.copytree(keys, tmp_path / "backup")
        for file in keys.iterdir():
            file.write_bytes(b"x" * 4096)
        await harness.restart()
        await encrypt(harness)
        assert "put them back from a backup" in harness.tier.keys.locked()["t"]
        assert await store(harness, blocks, ["b"]) == [False]
        shutil.copytree(tmp_path / "backup", keys, dirs_exist_ok=True)
        await harness.restart()
        await encrypt(harness)
        assert await loaded(harness, blocks) == set(FEW)


async def test_an_index_made_anew_needs_no_key_and_knows_all_encrypted_blocks(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        await encrypt(harness)
        some = names("a", 10)  # a sealed extent and an open one
        await store(harness, blocks, some)
        await harness.tier.close()
        (tmp_path / "drive0" / "index" / "data.mdb").unlink()
        harness.tier = harness.make()
        await harness.tier.open()
        await encrypt(harness)
        back = await loaded(harness, blocks, some)
        assert len(back) >= 6, "those of the extent that has a footer, at least"
        assert all(r is None or r.seal for r in await find(harness, "t", some))


# --- settings that change ---


async def test_turned_off_and_on_and_to_another_algorithm_every_block_stays_readable(tmp_path, blocks):
    async with Harness(tmp_path, capacity_bytes=16 * EXTENT_BYTES) as harness:
        for number, algorithm in enumerate(["", AES, "", "chacha20-poly1305", AES]):
            await encrypt(harness, algorithm)
            assert all(await store(harness, blocks, names(f"{number}-", 3)))
        everything = [name for number in range(5) for name in names(f"{number}-", 3)]
        assert await loaded(harness, blocks, everything) == set(everything)
        await harness.restart()
        await encrypt(harness, "")
        assert await loaded(harness, blocks, everything) == set(everything)
    assert plain_names(tmp_path, everything) == {*names("0-", 3), *names("2-", 3)}


async def test_a_block_that_cannot_be_read_gives_way_to_the_same_one_stored_plain(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        await encrypt(harness)
        await store(harness, blocks, FEW)
        await harness.restart()  # turned off, and the key is gone
        assert all(await store(harness, blocks, FEW))
        assert await loaded(harness, blocks) == set(FEW)
        assert harness.tier.usage().blocks == 3


# --- rotation ---


async def test_after_a_rekey_the_new_master_key_opens_and_the_old_one_does_not(tmp_path, blocks):
    async with Harness(tmp_path, paths=2) as harness:
        await encrypt(harness)
        await store(harness, blocks, FEW)
        assert await harness.tier.keys.rekey("t", [NEW]) == 2
        assert await loaded(harness, blocks) == set(FEW)
        await harness.restart()
        await encrypt(harness, masters=[OLD])
        assert await loaded(harness, blocks) == set()
        await encrypt(harness, masters=[NEW])
        assert await loaded(harness, blocks) == set(FEW)


async def test_with_the_old_key_as_the_second_a_start_wraps_with_the_first(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        await encrypt(harness)
        await store(harness, blocks, FEW)
        await harness.restart()
        await encrypt(harness, masters=[NEW, OLD])
        assert await loaded(harness, blocks) == set(FEW)
        await harness.restart()
        await encrypt(harness, masters=[NEW])
        assert await loaded(harness, blocks) == set(FEW)


async def test_a_rekey_that_a_path_missed_says_so(tmp_path, blocks):
    async with Harness(tmp_path, paths=2) as harness:
        await encrypt(harness)
        harness.tier.keys.paths[1].volume.turn(Health.OFF, "pulled out")
        with pytest.raises(DeviceError, match="drive1: it is off"):
            await harness.tier.keys.rekey("t", [NEW])


async def test_a_path_that_is_opened_anew_has_its_keys_without_being_asked(tmp_path, blocks):
    async with Harness(tmp_path, paths=1) as harness:
        await encrypt(harness)
        await store(harness, blocks, FEW)
        harness.tier.keys.paths[0].volume.turn(Health.OFF, "pulled out")
        await harness.tier.look_after()
        assert await loaded(harness, blocks) == set(FEW)


# --- destroying ---


async def test_with_its_key_destroyed_a_tenant_s_blocks_are_gone_and_new_ones_are_not(tmp_path, blocks):
    async with Harness(tmp_path, paths=2) as harness:
        await encrypt(harness)
        await encrypt(harness, tenant="u")
        await store(harness, blocks, FEW)
        await store(harness, blocks, ["x"], tenant="u")
        assert harness.tier.keys.erasable("t")
        old = key_id((await find(harness, "t", FEW))[0].seal)
        assert await harness.tier.keys.destroy("t") == 2
        assert not list(tmp_path.glob("drive*/keys/t.*"))
        assert await loaded(harness, blocks) == set()
        assert await store(harness, blocks, FEW) == [False] * 3
        await encrypt(harness)
        assert await loaded(harness, blocks) == set()
        assert all(await store(harness, blocks, FEW))
        assert await loaded(harness, blocks) == set(FEW)
        assert all(key_id(record.seal) != old for record in await find(harness, "t", FEW))
        assert await loaded(harness, blocks, ["x"], tenant="u") == {"x"}


async def test_a_path_that_was_off_when_the_key_was_destroyed_loses_it_when_it_is_back(tmp_path, blocks):
    async with Harness(tmp_path, paths=2, share_blocks=1) as harness:
        await encrypt(harness)
        await store(harness, blocks, names("a", 8))
        harness.tier.keys.paths[1].volume.turn(Health.OFF, "pulled out")
        with pytest.raises(DeviceError, match="drive1: it is off"):
            await harness.tier.keys.destroy("t")
        await harness.tier.look_after()
        assert await loaded(harness, blocks, names("a", 8)) == set()
        await encrypt(harness)
        assert await loaded(harness, blocks, names("a", 8)) == set()
        assert all(await store(harness, blocks, names("b", 8)))
        assert await loaded(harness, blocks, names("b", 8)) == set(names("b", 8))


async def test_only_a_tenant_that_was_never_stored_plain_is_erased_by_its_key(tmp_path, blocks):
    async with Harness(tmp_path, capacity_bytes=2 * EXTENT_BYTES) as harness:
        assert harness.tier.keys.erasable("t")
        await store(harness, blocks, FEW)
        assert not harness.tier.keys.erasable("t")
        await encrypt(harness)
        for round_ in range(8):  # every extent was recycled and written to since
            await store(harness, blocks, names(f"{round_}-", 5))
        assert not harness.tier.keys.erasable("t"), "between the blocks and the footer something may be left"
        await harness.restart()
        assert not harness.tier.keys.erasable("t")


async def test_a_wipe_after_the_key_was_destroyed_spares_noise_and_zeroes_what_was_plain(tmp_path, blocks):
    async with Harness(tmp_path, capacity_bytes=8 * EXTENT_BYTES) as harness:
        await store(harness, blocks, ["plain"])
        await encrypt(harness)
        await store(harness, blocks, FEW)
        plain, sealed = await find(harness, "t", ["plain", "a0"])
        extents = tmp_path / "drive0" / "extents"
        file = extents / f"{sealed.location.extent:08d}.ext"
        assert sealed.location.extent != plain.location.extent
        hashes = [block_hash(name) for name in ["plain", *FEW]]
        assert await harness.tier.delete("t", DIGEST, hashes) == 4
        before = file.read_bytes()
        assert any(before)
        await harness.tier.keys.destroy("t")
        wiped = await harness.tier.wipe(["t"], lambda *_: None, erased=["t"])
        assert (wiped.left, wiped.size_bytes > 0) == ([], True)
        assert not plain_names(tmp_path, ["plain", *FEW])
        assert file.read_bytes() == before, "its key is gone"
        assert (await harness.tier.wipe(["t", "u"], lambda *_: None, erased=["t"])).left == []
        assert not any(file.read_bytes()), "the key of the other is not destroyed"


async def test_what_is_written_plain_into_a_pure_extent_stains_it_before_a_byte_is_written(
    tmp_path, blocks, monkeypatch
):
    async with Harness(tmp_path, capacity_bytes=2 * EXTENT_BYTES) as harness:
        await encrypt(harness)
        for round_ in range(4):
            await store(harness, blocks, names(f"{round_}-", 5))
        assert harness.tier.keys.erasable("t")
        await encrypt(harness, "")
        volume = harness.tier.keys.paths[0].volume
        write, on_disk = volume.mover.write, []

        def writing(run):
            flags = {row.extent: row.flags for row in volume.index.rows()}
            on_disk.append((run.extent, flags.get(run.extent, 0) & ExtentFlags.PURE))
            return write(run)

        monkeypatch.setattr(volume.mover, "write", writing)
        assert all(await store(harness, blocks, FEW))
        assert on_disk
        assert not any(pure for _, pure in on_disk), "a crash must leave no plain bytes in one that is called pure"
        assert {extent for extent, _ in on_disk} <= set(volume.table.stained("t"))
        assert not harness.tier.keys.erasable("t")


async def test_a_listing_needs_no_key(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        await encrypt(harness)
        await store(harness, blocks, ["a"])
        ((digest, hash_, record),), _ = await harness.tier.list_records(DIGEST, b"", 10)
        assert (digest, hash_) == (DIGEST, block_hash("a"))
        assert record.seal
