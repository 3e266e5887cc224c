"""The NVMe tier on a device that fails for a while: what it answers meanwhile, and that it comes back."""

import asyncio
import os
import time

import msgspec
import pytest

from kvstored.device.file import FileDevice
from kvstored.errors import DeviceError
from kvstored.testing.contract_lower_tier import DIGEST, Blocks, block_hash, content, find, load_all
from kvstored.testing.faulty import FakeDevice, Faults
from kvstored.testing.waiting import PATIENCE_S, until
from kvstored.tiers.base import Health
from kvstored.tiers.volume import Volume
from kvstored.tiers.volume_io import UNREADABLE_IN_A_ROW_MAX
from tests.descriptors import descriptors
from tests.unit.test_nvme import EXTENT_BYTES, Harness, names, store


@pytest.fixture
def blocks():
    made = Blocks()
    yield made
    made.close()


def faulty_harness(tmp_path, **settings):
    return Harness(tmp_path, FakeDevice(seed=1), **settings)


async def back(harness):
    """Look after the paths until all are well."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        if await looked_after(harness):
            return True
        await asyncio.sleep(0.001)
    return False


async def stays_away(harness):
    """However often its paths are looked after."""
    return not any([await looked_after(harness) for _ in range(20)])


async def looked_after(harness):
    await harness.tier.look_after()
    return all(path.health is Health.OK for path in harness.tier.paths())


def hang(harness, call):
    """Calls of this kind do not come back from here on, and none is waited for any longer than a moment."""
    harness.device.hold(call)
    wait(harness, 0.3)


def answer(harness):
    """They do again; from here on a call may take as long as the machine makes it."""
    wait(harness, PATIENCE_S)
    harness.device.release()


def wait(harness, deadline_s):
    msgspec.structs.force_setattr(harness.tier._config, "io_deadline_s", deadline_s)
    for volume in harness.tier._volumes.values():
        volume.calls._deadline_s = deadline_s


# --- writes that fail ---


@pytest.mark.parametrize(
    "fault", [{"write_error": 1.0}, {"sync_error": 1.0}, {"read_only": True}], ids=["write", "sync", "read_only"]
)
async def test_a_path_that_could_not_be_written_takes_writes_again_when_it_can(tmp_path, blocks, fault):
    async with faulty_harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 3))
        harness.device.faults = Faults(**fault)
        assert await store(harness, blocks, names("b", 3)) == [False] * 3
        assert harness.tier.health is Health.READ_ONLY
        assert await load_all(harness, blocks, "t", names("a", 3)) == {n: content(n, 16384) for n in names("a", 3)}
        assert await stays_away(harness)
        (told,) = harness.tier.paths()
        assert told.reason
        assert "tried again in" in harness.tier.properties()["path.0"]
        harness.device.faults = Faults()
        assert await back(harness)
        assert await store(harness, blocks, names("b", 3)) == [True] * 3
        assert len(await load_all(harness, blocks, "t", names("a", 3) + names("b", 3))) == 6


async def test_an_extent_in_doubt_is_never_appended_to(tmp_path, blocks):
    async with faulty_harness(tmp_path) as harness:
        await store(harness, blocks, ["a"])
        harness.device.faults = Faults(write_error=1.0)
        await store(harness, blocks, ["b"])
        harness.device.faults = Faults()
        assert await back(harness)
        await store(harness, blocks, ["c"])
        (a, c) = await find(harness, "t", ["a", "c"])
        assert a.location.extent != c.location.extent


async def test_a_full_file_system_that_gets_room_again_gives_the_tier_its_size_back(tmp_path, blocks):
    async with faulty_harness(tmp_path) as harness:
        harness.device.faults = Faults(space_bytes=EXTENT_BYTES)
        for name in names("a", 20):
            await store(harness, blocks, [name])
        assert harness.tier.health is Health.OK
        small = harness.tier.usage().capacity_bytes
        assert small < 4 * EXTENT_BYTES
        await harness.tier.look_after()
        assert harness.tier.usage().capacity_bytes == small
        harness.device.faults = Faults()
        await harness.tier.look_after()
        harness.audit()
        assert harness.tier.usage().capacity_bytes == 4 * EXTENT_BYTES
        assert all([(await store(harness, blocks, [name]))[0] for name in names("b", 20)])


# --- directories that are gone ---


async def test_a_directory_that_is_gone_is_off_and_comes_back_with_its_blocks(tmp_path, blocks):
    async with faulty_harness(tmp_path, paths=2) as harness:
        await store(harness, blocks, names("a", 8))
        held = await find(harness, "t", names("a", 8))
        numbers = {record.location.volume for record in held}
        assert numbers == {0, 1}
        (tmp_path / "drive0").rename(tmp_path / "away")
        await harness.tier.look_after()
        assert [path.health for path in harness.tier.paths()] == [Health.OFF, Health.OK]
        assert "gone" in harness.tier.paths()[0].reason
        assert 0 < len(await load_all(harness, blocks, "t", names("a", 8))) < 8
        assert await store(harness, blocks, names("b", 4)) == [True] * 4
        assert not (tmp_path / "drive0").exists(), "nothing is made where a mount point may be"
        (tmp_path / "away").rename(tmp_path / "drive0")
        assert await back(harness)
        assert len(await load_all(harness, blocks, "t", names("a", 8) + names("b", 4))) == 12
        assert {record.location.volume for record in await find(harness, "t", names("a", 8))} == numbers


async def test_a_path_that_takes_long_to_open_is_served_without_and_then_with(tmp_path, blocks, monkeypatch):
    async with faulty_harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 4))
    monkeypatch.setattr("kvstored.tiers.recovery.OPEN_WAIT_S", 0.01)
    ready, settle = asyncio.Event(), Volume.settle

    async def late(volume, lost):
        await ready.wait()
        await settle(volume, lost)

    monkeypatch.setattr(Volume, "settle", late)
    async with faulty_harness(tmp_path) as harness:
        (path,) = harness.tier.paths()
        assert (path.health, path.reason) == (Health.OFF, "it is being opened, which takes long")
        assert await load_all(harness, blocks, "t", names("a", 4)) == {}
        ready.set()
        assert await back(harness)
        assert len(await load_all(harness, blocks, "t", names("a", 4))) == 4
    ready.clear()
    async with faulty_harness(tmp_path) as harness:
        assert not await harness.tier._paths[0].close(0.01), "a stop does not wait for what may never end"
        ready.set()


async def test_blocks_deleted_while_a_path_was_off_do_not_come_back_with_it(tmp_path, blocks):
    async with faulty_harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 4))
        (tmp_path / "drive0").rename(tmp_path / "away")
        await harness.tier.look_after()
        with pytest.raises(DeviceError, match="drive0 is off: what is deleted may come back"):
            await harness.tier.delete("t", DIGEST, [block_hash("a0")])
        (tmp_path / "away").rename(tmp_path / "drive0")
        assert await back(harness)
        assert set(await load_all(harness, blocks, "t", names("a", 4))) == {"a1", "a2", "a3"}


async def test_a_block_put_again_after_its_delete_failed_on_a_path_outlives_that_path(tmp_path, blocks, monkeypatch):
    async with faulty_harness(tmp_path, paths=2) as harness:
        await store(harness, blocks, ["a"])
        ((record,),) = [await find(harness, "t", ["a"])]
        number = record.location.volume
        volume = harness.tier._volumes[number]

        def fails(tenant, keys):
            raise DeviceError("syncing: Input/output error")

        monkeypatch.setattr(volume.index, "remove", fails)
        with pytest.raises(DeviceError, match="Input/output error"):
            await harness.tier.delete("t", DIGEST, [block_hash("a")])
        assert await find(harness, "t", ["a"]) == [None], "it goes as soon as the path is opened anew"
        assert await store(harness, blocks, ["a"]) == [True]
        assert await back(harness)
        assert harness.tier._volumes[number] is not volume
        assert len(await load_all(harness, blocks, "t", ["a"])) == 1


async def test_a_delete_while_the_path_is_being_opened_again_is_not_overlooked(tmp_path, blocks, monkeypatch):
    async with faulty_harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 2))
        await harness.tier.remember_namespace("t", DIGEST, b"encoding", {})
        (tmp_path / "drive0").rename(tmp_path / "away")
        await harness.tier.look_after()
        remember = Volume.remember

        async def meanwhile(volume, namespace):
            await remember(volume, namespace)
            with pytest.raises(DeviceError, match="is off"):
                await harness.tier.delete("t", DIGEST, [block_hash("a0")])

        monkeypatch.setattr(Volume, "remember", meanwhile)
        (tmp_path / "away").rename(tmp_path / "drive0")
        assert await back(harness)
        assert set(await load_all(harness, blocks, "t", names("a", 2))) == {"a1"}


async def test_more_deletes_than_are_kept_while_a_path_is_off_empty_it(tmp_path, blocks, monkeypatch):
    monkeypatch.setattr("kvstored.tiers.recovery.DELETES_MAX", 3)
    async with faulty_harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 10))
        (tmp_path / "drive0").rename(tmp_path / "away")
        await harness.tier.look_after()
        with pytest.raises(DeviceError, match="is off"):
            await harness.tier.delete("t", DIGEST, [block_hash(name) for name in names("a", 4)])
        (tmp_path / "away").rename(tmp_path / "drive0")
        assert await back(harness)
        assert await load_all(harness, blocks, "t", names("a", 10)) == {}
        harness.audit()
        assert await store(harness, blocks, names("b", 10)) == [True] * 10


async def test_a_directory_that_was_deleted_is_used_again_once_it_is_made(tmp_path, blocks):
    async with faulty_harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 4))
        (tmp_path / "drive0").rename(tmp_path / "deleted")
        assert await stays_away(harness)
        (tmp_path / "drive0").mkdir()
        assert await back(harness)
        assert await load_all(harness, blocks, "t", names("a", 4)) == {}
        assert await store(harness, blocks, names("b", 4)) == [True] * 4
        assert harness.tier.usage().blocks == 4


async def test_an_index_that_is_removed_while_it_is_open_is_made_anew(tmp_path, blocks):
    async with faulty_harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 8))
        (tmp_path / "drive0" / "index" / "data.mdb").unlink()
        await harness.tier.look_after()
        assert await back(harness)
        found = await load_all(harness, blocks, "t", names("a", 8))
        assert len(found) == 7, "what lay in the open extent is gone with the index"
        assert await store(harness, blocks, names("b", 3)) == [True] * 3
        await harness.restart()
        assert set(await load_all(harness, blocks, "t", names("b", 3))) == set(names("b", 3))


async def test_a_block_in_an_extent_whose_file_was_removed_is_not_called_durable(tmp_path, blocks):
    async with Harness(tmp_path, FileDevice(), retry_s=3600.0, scrub_bytes_per_s=0) as harness:
        await store(harness, blocks, names("a", 2))
        (tmp_path / "drive0" / "extents" / "00000001.ext").unlink()
        assert await store(harness, blocks, names("b", 2)) == [False] * 2
        assert await back(harness)
        assert await store(harness, blocks, names("b", 2)) == [True] * 2
        await harness.restart()
        assert set(await load_all(harness, blocks, "t", names("b", 2))) == set(names("b", 2))


async def test_a_path_that_was_absent_at_the_start_joins_later(tmp_path, blocks):
    (tmp_path / "drive0").write_bytes(b"a file, not a directory")
    async with faulty_harness(tmp_path, paths=2) as harness:
        await harness.tier.remember_namespace("t", DIGEST, b"encoding", {"model": "m"})
        assert await store(harness, blocks, ["a"]) == [True]
        (tmp_path / "drive0").unlink()
        assert await back(harness)
        assert await store(harness, blocks, names("b", 8)) == [True] * 8
        records = await find(harness, "t", ["a", *names("b", 8)])
        assert {record.location.volume for record in records} == {0, 1}
        assert records[0].location.volume == 1
        await harness.restart()
        assert len(await load_all(harness, blocks, "t", ["a", *names("b", 8)])) == 9
        assert [n.digest for n in harness.tier._volumes[0].namespaces.values()] == [DIGEST]


# --- reads that fail ---


async def test_many_reads_that_fail_in_a_row_turn_the_path_off_and_cost_no_record(tmp_path, blocks):
    async with faulty_harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 60), size=4096)
        harness.device.faults = Faults(read_error=1.0)
        assert await load_all(harness, blocks, "t", names("a", 60)) == {}
        assert harness.tier.health is Health.OFF
        harness.device.faults = Faults()
        assert await back(harness)
        assert len(await load_all(harness, blocks, "t", names("a", 60))) == 60


async def test_an_unreadable_record_is_dropped_told_of_and_makes_room_by_recycling_only(tmp_path, blocks):
    async with faulty_harness(tmp_path) as harness:
        await store(harness, blocks, ["a"])
        harness.device.faults = Faults(read_error=1.0)
        assert await load_all(harness, blocks, "t", ["a"]) == {}
        harness.device.faults = Faults()
        assert harness.tier.health is Health.OK
        assert await find(harness, "t", ["a"]) == [None]
        assert harness.dropped == [("t", DIGEST, block_hash("a"))]
        harness.audit()


@pytest.mark.parametrize("fault", ["torn", "misdirected"])
async def test_writes_that_lie_are_never_served(tmp_path, blocks, fault):
    async with faulty_harness(tmp_path) as harness:
        harness.device.faults = Faults(**{fault: 0.9})  # of those that are left at least one
        for i in range(12):
            await store(harness, blocks, names(f"{i}-", 7))
        harness.device.faults = Faults()
        wanted = [name for i in range(12) for name in names(f"{i}-", 7)]
        loaded = await load_all(harness, blocks, "t", wanted)
        assert loaded == {name: content(name, 16384) for name in loaded}
        assert harness.tier.counters()["load_corrupt_blocks"] > 0
        harness.audit()
        await harness.restart()
        again = await load_all(harness, blocks, "t", wanted)
        assert again == loaded


# --- devices that do not answer ---


@pytest.mark.parametrize("call", ["read", "write", "sync"])
async def test_a_device_that_hangs_turns_its_path_off_and_its_memory_stays_busy(tmp_path, blocks, call):
    async with faulty_harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 3))
        (record,) = await find(harness, "t", ["a0"])
        blocks.reset()
        hang(harness, call)
        if call == "read":
            task = asyncio.ensure_future(harness.tier.load([blocks.load("a0", record)]))
        else:
            task = asyncio.ensure_future(harness.tier.store("t", [blocks.store("b", 16384)]))
        await asyncio.to_thread(harness.device.held.wait)
        await until(lambda: harness.tier.health is Health.OFF)
        assert not task.done(), "its thread is still at the memory"
        assert await harness.tier.find("t", DIGEST, [block_hash("a0")], prefix=True) == []
        assert await harness.tier.load([blocks.load("a0", record)]) == [False]
        assert await harness.tier.store("t", [blocks.store("c", 4096)]) == [False]
        await harness.tier.look_after()
        assert harness.tier.health is Health.OFF, "not while a thread is in it"
        answer(harness)
        await task
        assert await back(harness)
        assert harness.tier.counters()["late_calls"] == 1
        assert set(await load_all(harness, blocks, "t", names("a", 3))) == set(names("a", 3))
        assert await store(harness, blocks, ["d"]) == [True]


async def test_a_device_that_hangs_when_it_is_opened_is_off_until_it_answers(tmp_path, blocks):
    harness = faulty_harness(tmp_path)
    hang(harness, "place")
    async with harness:
        assert harness.tier.health is Health.OFF
        await harness.tier.look_after()
        assert "not answer" in harness.tier.paths()[0].reason
        answer(harness)
        await until(lambda: not harness.tier._opener.stuck)
        assert await back(harness)
        assert await store(harness, blocks, ["a"]) == [True]


async def test_a_tier_whose_device_hangs_can_be_closed(tmp_path, blocks):
    harness = faulty_harness(tmp_path)
    await harness.tier.open()
    hang(harness, "write")
    task = asyncio.ensure_future(harness.tier.store("t", [blocks.store("a", 4096)]))
    await asyncio.to_thread(harness.device.held.wait)
    await harness.tier.close()
    assert harness.tier.stuck
    harness.device.release()
    assert await task == [False]


# --- descriptors ---


async def test_coming_back_again_and_again_leaks_nothing(tmp_path, blocks):
    async with faulty_harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 4))
        counts = []
        for _ in range(4):
            (tmp_path / "drive0").rename(tmp_path / "away")
            await harness.tier.look_after()
            (tmp_path / "away").rename(tmp_path / "drive0")
            assert await back(harness)
            assert len(await load_all(harness, blocks, "t", names("a", 4))) == 4
            counts.append(descriptors())
        assert counts[-1] <= counts[1]


# --- files and the index do not agree ---


def extent_files(tmp_path):
    return {path.name: path.stat().st_size for path in (tmp_path / "drive0" / "extents").iterdir()}


async def test_files_that_the_index_does_not_know_are_taken_back_at_the_start(tmp_path, blocks):
    async with faulty_harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 10))
        before, usage, tenants = extent_files(tmp_path), harness.tier.usage(), harness.tier.tenant_usage()
        await harness.tier.close()
        extents = tmp_path / "drive0" / "extents"
        for name in ("00000003.ext", "00000077.ext", "00000001.ext.new"):
            (extents / name).write_bytes(b"x" * EXTENT_BYTES)
        (tmp_path / "drive0" / "FORMAT.new").write_bytes(b"x")
        (tmp_path / "drive0" / "PROBE").write_bytes(b"x" * 4096)
        with (extents / "00000001.ext").open("ab") as file:
            file.write(b"x" * 10_000)
        harness.tier = harness.make()
        await harness.tier.open()
        assert extent_files(tmp_path) == before
        assert not {"FORMAT.new", "PROBE"} & set(os.listdir(tmp_path / "drive0"))
        assert (harness.tier.usage(), harness.tier.tenant_usage()) == (usage, tenants)
        assert harness.tier.counters()["orphan_files"] == 5
        assert len(await load_all(harness, blocks, "t", names("a", 10))) == 10


async def test_an_extent_that_lost_its_file_is_empty_and_used_again(tmp_path, blocks):
    async with faulty_harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 28))
        await harness.tier.close()
        (tmp_path / "drive0" / "extents" / "00000002.ext").unlink()
        harness.tier = harness.make()
        await harness.tier.open()
        harness.audit()
        assert harness.tier.usage().blocks == 21
        assert set(await load_all(harness, blocks, "t", names("a", 28))) == set(names("a", 28)) - {
            f"a{i}" for i in range(7, 14)
        }
        assert await store(harness, blocks, names("b", 7)) == [True] * 7
        assert len(await load_all(harness, blocks, "t", names("a", 28))) == 21, "it was used before any was recycled"


async def test_all_extents_that_lost_their_files_are_emptied_by_one_look_at_the_index(tmp_path, blocks):
    async with faulty_harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 28))
        await harness.tier.close()
        for path in (tmp_path / "drive0" / "extents").iterdir():
            path.unlink()
        harness.tier = harness.make()
        await harness.tier.open()
        assert harness.tier.usage().used_bytes == 0
        assert await store(harness, blocks, names("b", 28)) == [True] * 28


async def test_what_is_on_disk_never_exceeds_the_capacity(tmp_path, blocks):
    async with faulty_harness(tmp_path) as harness:
        for round_ in range(3):
            for i in range(12):
                await store(harness, blocks, names(f"{round_}-{i}-", 5))
                assert sum(extent_files(tmp_path).values()) <= 4 * EXTENT_BYTES
            await harness.restart()


async def test_an_extent_that_was_cut_short_is_scrubbed_first(tmp_path, blocks):
    async with faulty_harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 7))
        await harness.tier.close()
        os.truncate(tmp_path / "drive0" / "extents" / "00000001.ext", 3 * 16384)
        harness.tier = harness.make(scrub_bytes_per_s=1 << 40)
        await harness.tier.open()
        await until(lambda: harness.tier.counters().get("scrubbed_extents"))
        assert {hash_ for _, _, hash_ in harness.dropped} == {block_hash(f"a{i}") for i in range(3, 7)}
        assert harness.tier.usage().blocks == 3


async def test_an_extent_that_lost_many_blocks_costs_no_other(tmp_path, blocks):
    async with faulty_harness(tmp_path, extent_bytes=64 * 16384, capacity_bytes=256 * 16384) as harness:
        await store(harness, blocks, names("a", 100))
        await harness.tier.close()
        os.truncate(tmp_path / "drive0" / "extents" / "00000001.ext", 16384)
        harness.tier = harness.make()
        await harness.tier.open()
        found = await load_all(harness, blocks, "t", names("a", 100))
        assert harness.tier.health is Health.OK, "the device reads what is there"
        assert "a0" in found
        assert len(found) == harness.tier.usage().blocks == 100 - len(harness.dropped)
        assert len(harness.dropped) > UNREADABLE_IN_A_ROW_MAX


# --- scrub ---


async def test_a_corrupt_read_has_its_whole_extent_scrubbed(tmp_path, blocks):
    async with faulty_harness(tmp_path, scrub_bytes_per_s=1 << 40) as harness:
        await store(harness, blocks, names("a", 14))
        records = await find(harness, "t", names("a", 14))
        path = tmp_path / "drive0" / "extents" / "00000001.ext"
        damage(path, [records[i].location.offset for i in (1, 3, 5)])
        assert len(await load_all(harness, blocks, "t", ["a1"])) == 0
        await until(lambda: harness.tier.counters().get("scrubbed_extents"))
        assert {hash_ for _, _, hash_ in harness.dropped} == {block_hash(name) for name in ("a1", "a3", "a5")}
        counters = harness.tier.counters()
        assert counters["scrub_corrupt_blocks"] == 2
        assert counters["scrubbed_bytes"] == 6 * 16384, "a1 was gone already"
        assert counters["scrubbed_extents"] == 1
        harness.audit()
        assert harness.tier.usage().blocks == 11
        assert set(await load_all(harness, blocks, "t", names("a", 14))) == set(names("a", 14)) - {"a1", "a3", "a5"}


async def test_a_pass_of_the_scrub_reads_all_that_is_there(tmp_path, blocks, monkeypatch):
    monkeypatch.setattr("kvstored.tiers.scrub.FIRST_PASS_S", 0.0)
    async with faulty_harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 10))
        damage(tmp_path / "drive0" / "extents" / "00000002.ext", [0])
        await harness.restart(scrub_bytes_per_s=1 << 40)
        await until(lambda: harness.tier.paths()[0].scrub_passed_s)
        (told,) = harness.tier.paths()
        assert (told.scrubbed_bytes, told.scrub_corrupt_blocks) == (10 * 16384, 1)
        assert harness.tier.usage().blocks == 9


async def test_the_scrub_rests_between_pieces_so_as_to_keep_its_rate(tmp_path, blocks, monkeypatch):
    monkeypatch.setattr("kvstored.tiers.scrub.FIRST_PASS_S", 0.0)
    monkeypatch.setattr("kvstored.tiers.scrub.PIECE_BYTES", 16384)
    async with faulty_harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 4))
        await harness.restart(scrub_bytes_per_s=1)  # a piece takes hours
        await until(lambda: harness.tier.counters().get("scrubbed_bytes"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert harness.tier.counters()["scrubbed_bytes"] == 16384


async def test_flips_at_rest_are_found_by_the_scrub_or_hit_nothing(tmp_path, blocks, monkeypatch):
    monkeypatch.setattr("kvstored.tiers.scrub.FIRST_PASS_S", 0.0)
    async with faulty_harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 7))
        await harness.tier.close()
        at = harness.device.rot(tmp_path / "drive0" / "extents" / "00000001.ext")
        harness.tier = harness.make(scrub_bytes_per_s=1 << 40)
        await harness.tier.open()
        await until(lambda: harness.tier.paths()[0].scrub_passed_s)
        expected = {f"a{i}" for i in range(7)} - {f"a{at // 16384}"}
        assert set(await load_all(harness, blocks, "t", names("a", 7))) == expected


def damage(path, offsets):
    with path.open("r+b") as file:
        for offset in offsets:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 1]))


async def test_a_volume_whose_making_was_cut_short_is_made_anew(tmp_path, blocks):
    drive = tmp_path / "drive0"
    drive.mkdir()
    (drive / "FORMAT").write_bytes(b"\0" * 90)  # all that there is: it never held a block
    async with faulty_harness(tmp_path) as harness:
        assert await store(harness, blocks, names("a", 2)) == [True] * 2
    async with faulty_harness(tmp_path) as harness:
        assert len(await load_all(harness, blocks, "t", names("a", 2))) == 2


async def test_a_device_that_does_not_keep_the_format_files_makes_no_volume(tmp_path, blocks, monkeypatch):
    read_whole = FakeDevice.read_whole
    monkeypatch.setattr(
        FakeDevice, "read_whole", lambda self, path: b"{}" if path.name == "FORMAT" else read_whole(self, path)
    )
    async with faulty_harness(tmp_path) as harness:
        (path,) = harness.tier.paths()
        assert path.health is Health.OFF
        assert "does not read as it was written" in path.reason or "damaged" in path.reason
