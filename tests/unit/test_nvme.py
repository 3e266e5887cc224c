"""The NVMe tier beyond the contract: restarts, recycling, cancelling, failing devices, refusals."""

import asyncio
import json
import shutil

import pytest

from kvstored.clock import SystemClock
from kvstored.device.file import FileDevice
from kvstored.errors import ConfigError, DeviceError
from kvstored.testing.contract_lower_tier import DIGEST, OTHER_DIGEST, Blocks, block_hash, content, find, load_all
from kvstored.testing.faulty import FakeDevice, Faults
from kvstored.tiers import runs
from kvstored.tiers.base import Health
from kvstored.tiers.deadline import DeviceCalls
from kvstored.tiers.nvme import NvmeConfig, NvmeTier
from kvstored.tiers.trailer import unpack_trailer
from kvstored.tiers.volume_io import work_on

EXTENT_BYTES = 128 << 10


# A device of a busy machine is slow, and does not hang; paths are looked after and scrubbed when a test says so.
QUIET = {"io_deadline_s": 60.0, "retry_s": 3600.0, "scrub_bytes_per_s": 0}


class Harness:
    """One tier on some paths; `find` and `load_all` of the contract take it."""

    def __init__(self, directory, device=None, paths=1, **settings):
        self.device = device or FileDevice()
        self.settings = {
            "paths": [directory / f"drive{i}" for i in range(paths)],
            "capacity_bytes": 4 * EXTENT_BYTES,
            "extent_bytes": EXTENT_BYTES,
            "share_blocks": 1,
            **QUIET,
            **settings,
        }
        self.evicted = []
        self.dropped = []
        self.tier = self.make()

    def make(self, **settings):
        def note(tenant, digest, hashes):
            self.evicted += [(tenant, digest, hash_) for hash_ in hashes]

        def note_dropped(tenant, digest, hashes):
            self.dropped += [(tenant, digest, hash_) for hash_ in hashes]

        self.settings.update(settings)
        config = NvmeConfig(**self.settings)
        return NvmeTier(config, self.device, SystemClock(), note, on_dropped=note_dropped)

    async def restart(self, **settings):
        await self.tier.close()
        self.tier = self.make(**settings)
        await self.tier.open()

    def audit(self):
        self.tier.audit()
        assert self.tier.usage().balanced()

    async def __aenter__(self):
        await self.tier.open()
        return self

    async def __aexit__(self, *_):
        self.audit()
        await self.tier.close()


@pytest.fixture
def blocks():
    made = Blocks()
    yield made
    made.close()


async def store(harness, blocks, names, tenant="t", size=16384, digest=DIGEST):
    blocks.reset()
    stored = await harness.tier.store(tenant, [blocks.store(name, size, digest) for name in names])
    harness.audit()
    return stored


def names(prefix, count):
    return [f"{prefix}{i}" for i in range(count)]


# --- restarts ---


async def test_many_restarts_cost_no_capacity(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        for i in range(20):
            assert await store(harness, blocks, [f"{i}"], size=4096) == [True]
            await harness.restart()
        usage = harness.tier.usage()
        assert (usage.used_bytes, usage.dead_bytes, usage.blocks) == (20 * 4096, 0, 20)
        assert harness.evicted == []
        assert len(await load_all(harness, blocks, "t", names("", 20))) == 20


async def test_what_was_acknowledged_is_there_without_an_orderly_close(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 10))  # more than one extent
        shutil.copytree(tmp_path / "drive0", tmp_path / "copy" / "drive0")
        before = harness.tier.usage()
    async with Harness(tmp_path / "copy") as copy:
        assert copy.tier.usage() == before
        assert len(await load_all(copy, blocks, "t", names("a", 10))) == 10
        assert await store(copy, blocks, ["b"]) == [True]


async def test_a_full_extent_ends_in_a_footer_that_names_its_blocks(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 10))
    extent = (tmp_path / "drive0" / "extents" / "00000001.ext").read_bytes()
    trailer = unpack_trailer(extent[-4096:])
    assert (trailer.tenant, trailer.extent, trailer.records) == ("t", 1, 7)
    assert len(extent) == EXTENT_BYTES


async def test_a_smaller_capacity_gives_up_the_oldest_extents_and_their_files(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, names("a", 28))
        await harness.restart(capacity_bytes=2 * EXTENT_BYTES)
        assert harness.tier.usage().capacity_bytes == 2 * EXTENT_BYTES
        assert len(list((tmp_path / "drive0" / "extents").iterdir())) == 2
        assert set(await load_all(harness, blocks, "t", names("a", 28))) == {f"a{i}" for i in range(14, 28)}
        assert await store(harness, blocks, names("b", 28)) == [True] * 14 + [False] * 14


async def test_namespaces_and_records_can_be_listed_after_a_restart(tmp_path, blocks):
    async with Harness(tmp_path, paths=2) as harness:
        await harness.tier.remember_namespace("t", DIGEST, b"encoding", {"model": "m"})
        await store(harness, blocks, names("a", 5))
        await store(harness, blocks, ["b"], digest=OTHER_DIGEST)
        await harness.restart()
        (namespace,) = harness.tier.namespaces()
        assert (namespace.tenant, namespace.digest, namespace.fields) == ("t", DIGEST, {"model": "m"})
        listed, cursor = [], b""
        while page := await harness.tier.list_records(DIGEST, cursor, 2):
            listed += page[0]
            if not (cursor := page[1]):
                break
        assert {hash_ for _, hash_, _ in listed} == {block_hash(f"a{i}") for i in range(5)}
        assert len(listed) == 5


async def test_namespaces_of_one_tenant_are_forgotten_for_good(tmp_path, blocks):
    async with Harness(tmp_path, paths=2) as harness:
        for number in range(3):
            await harness.tier.remember_namespace("t", bytes([number]) * 16, b"encoding", {"model": "m"})
        await harness.tier.remember_namespace("u", DIGEST, b"encoding", {"model": "m"})
        await store(harness, blocks, names("a", 5))
        await harness.tier.forget_namespaces("t")
        assert [namespace.tenant for namespace in harness.tier.namespaces()] == ["u"]
        for path in tmp_path.glob("*/namespaces"):
            assert [file.name for file in path.iterdir()] == [f"{DIGEST.hex()}.namespace"]
        await harness.restart()
        assert [namespace.tenant for namespace in harness.tier.namespaces()] == ["u"]
        await harness.tier.remember_namespace("t", bytes(16), b"encoding", {"model": "m"})
        await harness.restart()
        assert {namespace.tenant for namespace in harness.tier.namespaces()} == {"t", "u"}


# --- recycling ---


async def test_a_footer_is_erased_and_synced_before_new_bytes_go_into_an_extent(tmp_path, blocks):
    device = FakeDevice()
    async with Harness(tmp_path, device, capacity_bytes=2 * EXTENT_BYTES) as harness:
        await store(harness, blocks, names("a", 14))
        device.events.clear()
        await store(harness, blocks, ["b"])
        changes = [e for e in device.events if e.name == "00000001.ext" and e.call != "read"]
        assert [(e.call, e.offset) for e in changes] == [
            ("write", EXTENT_BYTES - 4096),
            ("sync", 0),
            ("write", 0),
            ("sync", 0),
        ]


async def test_an_extent_with_a_damaged_footer_is_recycled_all_the_same(tmp_path, blocks):
    async with Harness(tmp_path, capacity_bytes=2 * EXTENT_BYTES) as harness:
        await store(harness, blocks, names("a", 14))
        with (tmp_path / "drive0" / "extents" / "00000001.ext").open("r+b") as file:
            file.seek(EXTENT_BYTES - 4096)
            file.write(b"x")
        assert await store(harness, blocks, ["b"]) == [True]
        assert {h for _, _, h in harness.evicted} == {block_hash(f"a{i}") for i in range(7)}


async def test_an_extent_whose_blocks_were_all_deleted_before_it_was_sealed_is_recycled(tmp_path, blocks):
    async with Harness(tmp_path, capacity_bytes=2 * EXTENT_BYTES) as harness:
        await store(harness, blocks, names("a", 7))
        await harness.tier.delete("t", DIGEST, [block_hash(name) for name in names("a", 7)])
        for name in names("b", 20):
            assert await store(harness, blocks, [name]) == [True]


async def test_a_tenant_that_fills_the_volume_gets_room_again_from_its_own_extents_first(tmp_path, blocks):
    async with Harness(tmp_path, capacity_bytes=2 * EXTENT_BYTES) as harness:
        await store(harness, blocks, ["theirs"], tenant="u", digest=OTHER_DIGEST)
        for i in range(20):
            assert await store(harness, blocks, [f"a{i}"]) == [True]
        assert await load_all(harness, blocks, "u", ["theirs"], OTHER_DIGEST) != {}


async def test_more_tenants_than_extents_still_store(tmp_path, blocks):
    async with Harness(tmp_path, capacity_bytes=2 * EXTENT_BYTES) as harness:
        for i in range(6):
            assert await store(harness, blocks, ["a"], tenant=f"tenant {i}", digest=bytes([i]) * 16) == [True]
        assert harness.tier.usage().blocks == 2


async def test_a_call_larger_than_the_tier_stores_what_fits(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        assert await store(harness, blocks, names("a", 40)) == [True] * 28 + [False] * 12


async def test_a_block_that_is_there_already_is_not_evicted_by_the_call_that_names_it(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, ["old"])
        assert (await store(harness, blocks, ["old", *names("a", 40)]))[0]
        assert await find(harness, "t", ["old"]) != [None]


async def test_a_block_that_was_stored_again_is_evicted_in_its_turn(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        await store(harness, blocks, ["old"])
        await store(harness, blocks, ["old"])
        for i in range(5):
            await store(harness, blocks, names(f"{i}-", 7))
        assert await find(harness, "t", ["old"]) == [None]


async def test_full_volumes_take_turns(tmp_path, blocks):
    async with Harness(tmp_path, paths=2, capacity_bytes=2 * EXTENT_BYTES) as harness:
        for i in range(80):
            assert await store(harness, blocks, [f"{i}"]) == [True]
        records = await find(harness, "t", names("", 80))
        assert {r.location.volume for r in records if r} == {0, 1}
        assert all(records[-14:])


# --- concurrency ---


async def test_calls_at_the_same_time_store_each_block_once(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        blocks.reset()
        calls = [[blocks.store(f"{i % 5}", 4096) for i in range(8)] for _ in range(6)]
        results = await asyncio.gather(*(harness.tier.store("t", call) for call in calls))
        assert all(map(all, results))
        harness.audit()
        assert harness.tier.usage().blocks == 5
        assert len(await load_all(harness, blocks, "t", names("", 5))) == 5


async def test_a_cancelled_load_returns_only_when_no_thread_writes_any_more(tmp_path, blocks):
    device = FakeDevice()
    async with Harness(tmp_path, device) as harness:
        await store(harness, blocks, ["a"])
        (record,) = await find(harness, "t", ["a"])
        blocks.reset()
        load = blocks.load("a", record)
        device.gate.clear()
        task = asyncio.create_task(harness.tier.load([load]))
        await asyncio.to_thread(device.held.wait)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        device.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert blocks.bytes_at(load.address, record.size_bytes) == content("a", record.size_bytes)


async def test_a_cancelled_store_is_finished_and_accounted(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        task = asyncio.create_task(harness.tier.store("t", [blocks.store("a", 4096)]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        harness.audit()
        assert harness.tier.usage().blocks == 1


async def test_flush_waits_for_stores_under_way(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        task = asyncio.create_task(harness.tier.store("t", [blocks.store("a", 4096)]))
        await asyncio.sleep(0)
        await harness.tier.flush()
        assert harness.tier.usage().blocks == 1
        await task


# --- devices that fail ---


@pytest.mark.parametrize("fault", ["write_error", "sync_error"])
async def test_a_path_that_cannot_be_written_is_read_only_and_the_other_goes_on(tmp_path, blocks, fault):
    device = FakeDevice()
    async with Harness(tmp_path, device, paths=2) as harness:
        await store(harness, blocks, names("a", 4))
        failing = harness.tier._volumes[0]
        failing.directory.files._device = failing.mover._device = FakeDevice(faults=Faults(**{fault: 1.0}))
        assert await store(harness, blocks, names("b", 8)) == [True] * 8
        assert (failing.health, harness.tier.health) == (Health.READ_ONLY, Health.OK)
        assert "read_only" in harness.tier.properties()["path.0"]
        assert len(await load_all(harness, blocks, "t", names("a", 4) + names("b", 8))) == 12


async def test_a_store_that_fails_everywhere_is_no_hit(tmp_path, blocks):
    device = FakeDevice()
    async with Harness(tmp_path, device) as harness:
        device.faults = Faults(write_error=1.0)
        assert await store(harness, blocks, ["a"]) == [False]
        assert harness.tier.health is Health.READ_ONLY
        assert await find(harness, "t", ["a"]) == [None]
        assert await store(harness, blocks, ["b"]) == [False]


async def test_an_unreadable_block_costs_only_itself(tmp_path, blocks):
    device = FakeDevice(seed=2)
    async with Harness(tmp_path, device, io_threads=1) as harness:  # in one order, and so many fail in a row
        await store(harness, blocks, names("a", 20), size=4096)
        device.faults = Faults(read_error=0.7)
        loaded = await load_all(harness, blocks, "t", names("a", 20))
        device.faults = Faults()
        assert 0 < len(loaded) < 20
        assert loaded == {name: content(name, 4096) for name in loaded}
        assert set(await load_all(harness, blocks, "t", names("a", 20))) == set(loaded)
        assert harness.tier.counters()["load_unreadable_blocks"] == 20 - len(loaded)


async def test_flipped_bits_are_never_served(tmp_path, blocks):
    device = FakeDevice(seed=5)
    async with Harness(tmp_path, device, run_bytes=4096, io_threads=1) as harness:
        await store(harness, blocks, names("a", 28))
        device.faults = Faults(read_flip=0.5)
        for name in names("a", 28):
            loaded = await load_all(harness, blocks, "t", [name])
            assert loaded in ({}, {name: content(name, 16384)})
        assert harness.tier.counters()["load_corrupt_blocks"] > 0
        assert harness.tier.counters()["load_ok_blocks"] > 0


async def test_a_full_file_system_makes_the_tier_smaller_and_not_read_only(tmp_path, blocks):
    device = FakeDevice(faults=Faults(space_bytes=2 * EXTENT_BYTES))
    async with Harness(tmp_path, device) as harness:
        stored = [(await store(harness, blocks, [f"a{i}"]))[0] for i in range(28)]
        assert stored.index(False) > 10
        assert harness.tier.health is Health.OK
        assert harness.tier.usage().capacity_bytes < 4 * EXTENT_BYTES
        device.faults = Faults()
        for i in range(10):
            await store(harness, blocks, [f"b{i}"])
        assert await find(harness, "t", ["b9"]) != [None]


async def test_a_path_that_cannot_be_opened_is_off_and_the_other_goes_on(tmp_path, blocks):
    (tmp_path / "drive0").write_bytes(b"a file, not a directory")
    async with Harness(tmp_path, paths=2) as harness:
        assert harness.tier.health is Health.OK
        assert "off: " in harness.tier.properties()["path.0"]
        assert await store(harness, blocks, ["a"]) == [True]
        assert len(await load_all(harness, blocks, "t", ["a"])) == 1


async def test_with_no_path_left_the_tier_is_off_and_everything_a_miss(tmp_path, blocks):
    device = FakeDevice(faults=Faults(open_error=1.0))
    async with Harness(tmp_path, device) as harness:
        assert harness.tier.health is Health.OFF
        assert harness.tier.usage().capacity_bytes == 0
        assert await store(harness, blocks, ["a"]) == [False]
        assert await harness.tier.find("t", DIGEST, [block_hash("a")], prefix=True) == []
        with pytest.raises(DeviceError, match="may come back"):
            await harness.tier.delete("t", DIGEST, [block_hash("a")])


# --- refusals ---


async def refused(harness):
    with pytest.raises(ConfigError) as raised:
        await harness.tier.open()
    return str(raised.value)


async def test_a_second_tier_on_one_directory_is_refused(tmp_path, blocks):
    async with Harness(tmp_path) as harness:
        assert "in use by another kvstored" in await refused(Harness(tmp_path))
        assert await store(harness, blocks, ["a"]) == [True]


async def test_a_refused_start_leaves_the_directories_unlocked(tmp_path):
    harness = Harness(tmp_path)
    harness.tier = harness.make(paths=[tmp_path / "drive0", tmp_path / "drive1", tmp_path / "drive0"])
    assert "drive0 is in use" in await refused(harness)
    async with Harness(tmp_path, paths=2) as again:
        assert again.tier.health is Health.OK


async def test_a_newer_format_is_refused(tmp_path):
    async with Harness(tmp_path):
        pass
    marker = tmp_path / "drive0" / "FORMAT"
    marker.write_text(json.dumps({"format": 4, "other": "fields"}))
    assert "format 4, this kvstored reads up to 3" in await refused(Harness(tmp_path))


async def test_another_extent_size_is_refused(tmp_path):
    async with Harness(tmp_path):
        pass
    message = await refused(Harness(tmp_path, extent_bytes=EXTENT_BYTES // 2))
    assert f"was made with {EXTENT_BYTES}" in message


async def test_a_directory_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "drive0" / "index").mkdir(parents=True)
    assert "no FORMAT file" in await refused(Harness(tmp_path))


async def test_direct_io_is_demanded_where_it_is_refused(tmp_path):
    message = await refused(Harness(tmp_path, FakeDevice(), require_direct_io=True))
    assert "nvme.require_direct_io" in message


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("paths", []),
        ("extent_bytes", 65537),
        ("extent_bytes", 4096),
        ("capacity_bytes", EXTENT_BYTES),
        ("io_threads", -1),
    ],
)
async def test_a_wrong_setting_is_named(tmp_path, setting, value):
    harness = Harness(tmp_path)
    harness.tier = harness.make(**{setting: value})
    assert f"nvme.{setting}" in await refused(harness)


async def test_a_search_under_way_when_the_tier_closes_finds_nothing(tmp_path, blocks):
    harness = Harness(tmp_path)
    await harness.tier.open()
    await store(harness, blocks, names("a", 4))
    hashes = [block_hash(name) for name in names("a", 4)]
    held = await harness.tier.find("t", DIGEST, hashes, prefix=False)
    searches = [asyncio.ensure_future(harness.tier.find("t", DIGEST, hashes, prefix=False)) for _ in range(20)]
    await asyncio.sleep(0)
    await harness.tier.close()
    for found in await asyncio.gather(*searches):
        assert found == [None] * 4
    harness.tier.unpin(held)


async def test_many_blocks_are_moved_in_few_calls_of_threads(tmp_path, blocks, monkeypatch):
    """Each call costs the event loop, which answers clients meanwhile."""
    calls = []
    real = DeviceCalls.call

    async def call(self, where, work, *args, **kwargs):
        calls.append(work)
        return await real(self, where, work, *args, **kwargs)

    many = names("many", 8)  # each a run of its own
    async with Harness(tmp_path, run_bytes=16384, io_threads=2) as harness:
        monkeypatch.setattr(runs, "RUN_BYTES_MIN", 1)
        monkeypatch.setattr(DeviceCalls, "call", call)
        assert all(await store(harness, blocks, many, size=16384 - 4096))
        assert calls.count(work_on) == 2, "four runs in each"
        calls.clear()
        assert await load_all(harness, blocks, "t", many) == {name: content(name, 12288) for name in many}
        assert calls.count(work_on) == 2


def test_runs_behind_one_that_fails_are_moved_all_the_same():
    error = DeviceError("no")

    def work(run):
        if run == "b":
            raise error
        return run.upper()

    assert work_on(work, ["a", "b", "c"]) == ["A", error, "C"]
