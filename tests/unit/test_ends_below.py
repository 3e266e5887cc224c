"""Blocks on NVMe that end: found until then and not after, also by an index that is made anew; and the sweep."""

import random
import shutil

import msgspec
import pytest

from kvstored.device.file import FileDevice
from kvstored.lifetime import Expiry
from kvstored.testing.contract_lower_tier import DIGEST, Blocks, block_hash, load_all
from kvstored.testing.node import ManualClock
from kvstored.tiers import trailer
from kvstored.tiers.formats import DIGEST_BYTES, ExtentRow, State
from kvstored.tiers.nvme import NvmeConfig, NvmeTier
from kvstored.tiers.trailer import end_of, pack_footer, unpack_trailer
from tests.unit.test_nvme import QUIET

EXTENT_BYTES = 1 << 20
BLOCK_BYTES = 4096


class Harness:
    """A tier whose clock is the test's."""

    def __init__(self, directory, paths=1):
        self.clock = ManualClock()
        self.config = NvmeConfig(
            paths=[directory / f"drive{i}" for i in range(paths)],
            capacity_bytes=8 * EXTENT_BYTES,
            extent_bytes=EXTENT_BYTES,
            share_blocks=1,
            **QUIET,
        )
        self.expired = []
        self.max_age_s = 0.0
        self.blocks = Blocks()

    def make(self):
        def note(_tenant, _digest, hashes):
            self.expired += hashes

        tier = NvmeTier(self.config, FileDevice(), self.clock, on_expired=note)
        tier.limit_ages(lambda tenant: self.max_age_s, self.clock.wall)
        return tier

    async def __aenter__(self):
        self.tier = self.make()
        await self.tier.open()
        return self

    async def __aexit__(self, *_):
        self.tier.audit()
        await self.tier.close()
        self.blocks.close()

    async def restart(self):
        await self.tier.close()
        self.tier = self.make()
        await self.tier.open()

    async def put(self, names, ttl_s=0.0, sliding_s=0):
        self.blocks.reset()
        expiry = Expiry(self.clock.wall() + ttl_s, sliding_s) if ttl_s else None
        stores = [msgspec.structs.replace(self.blocks.store(name, BLOCK_BYTES), expiry=expiry) for name in names]
        return await self.tier.store("t", stores)

    async def there(self, names):
        self.blocks.reset()
        found = await load_all(self, self.blocks, "t", names)
        return [name in found for name in names]

    async def record(self, name):
        (record,) = await self.tier.find("t", DIGEST, [block_hash(name)], prefix=False)
        self.tier.unpin([record])
        return record

    async def sweep(self):
        await self.tier.sweep.sweep()
        self.tier.audit()
        return self.tier.usage().blocks


async def test_a_block_is_found_until_its_end_and_can_be_stored_again(tmp_path):
    async with Harness(tmp_path) as harness:
        await harness.put(["a"], 50.0)
        await harness.put(["b"])
        harness.clock.now += 49.0
        assert await harness.there(["a", "b"]) == [True, True]
        harness.clock.now += 1.0
        assert await harness.there(["a", "b"]) == [False, True]
        assert await harness.put(["a"], 20.0) == [True]
        assert await harness.there(["a"]) == [True]
        harness.clock.now += 20.0
        assert await harness.there(["a", "b"]) == [False, True]
        assert await harness.put(["a"]) == [True]
        harness.clock.now += 1e6
        assert await harness.there(["a", "b"]) == [True, True]


async def test_a_copy_that_has_ended_on_one_path_hides_none_on_another(tmp_path):
    async with Harness(tmp_path, paths=3) as harness:
        names = [f"a{i}" for i in range(9)]
        for _ in range(4):
            assert all(await harness.put(names, 10.0))
            assert all(await harness.there(names))
            harness.clock.now += 10.0
            assert not any(await harness.there(names))


async def test_ends_outlast_a_restart(tmp_path):
    async with Harness(tmp_path) as harness:
        await harness.put(["a"], 50.0, 50)
        await harness.restart()
        assert (await harness.record("a")).expiry == Expiry(harness.clock.wall() + 50.0, 50)
        harness.clock.now += 50.0
        assert await harness.there(["a"]) == [False]


async def test_what_was_used_above_ends_later_here_too_and_never_earlier(tmp_path):
    async with Harness(tmp_path) as harness:
        await harness.put(["a"], 50.0, 50)
        assert await harness.put(["a"], 80.0, 50) == [True]
        assert await harness.put(["a"], 30.0, 50) == [True]
        harness.clock.now += 79.0
        assert await harness.there(["a"]) == [True]
        assert harness.tier.counters()["stored_blocks"] == 1
        await harness.restart()
        harness.clock.now += 1.0
        assert await harness.there(["a"]) == [False]


# ---- the sweep ----


async def test_the_sweep_takes_what_has_ended_and_says_so(tmp_path):
    async with Harness(tmp_path) as harness:
        await harness.put([f"a{i}" for i in range(50)], 10.0)
        await harness.put([f"b{i}" for i in range(50)], 100.0)
        await harness.put([f"c{i}" for i in range(50)])
        assert await harness.sweep() == 150
        harness.clock.now += 20.0
        assert await harness.sweep() == 100
        assert sorted(harness.expired) == sorted(block_hash(f"a{i}") for i in range(50))
        harness.clock.now += 100.0
        assert await harness.sweep() == 50
        assert harness.tier.counters()["expired_blocks"] == 100


async def test_the_sweep_finds_what_an_earlier_process_stored(tmp_path):
    async with Harness(tmp_path) as harness:
        await harness.put([f"a{i}" for i in range(20)], 10.0)
        await harness.restart()
        harness.clock.now += 20.0
        assert await harness.sweep() == 0


async def test_ends_that_are_spread_cost_a_multiple_of_what_ends_and_no_more(tmp_path, monkeypatch):
    async with Harness(tmp_path) as harness:
        for number in range(400):
            await harness.put([f"a{number}"], 100.0 + number)
        looked_at, (volume,) = [], harness.tier._volumes.values()
        find = volume.find

        async def counting(digest, hashes, *, prefix):
            looked_at.extend(hashes)
            return await find(digest, hashes, prefix=prefix)

        monkeypatch.setattr(volume, "find", counting)
        for _ in range(60):
            harness.clock.now += 10.0
            await harness.sweep()
        assert harness.tier.usage().blocks == 0
        assert len(looked_at) <= 16 * 400


async def test_a_maximum_age_that_is_set_later_counts_for_what_is_there(tmp_path):
    async with Harness(tmp_path) as harness:
        await harness.put(["a"])
        harness.clock.now += 100.0
        await harness.put(["b"], 1e6)
        harness.max_age_s = 60.0
        harness.tier.limit_ages(lambda tenant: harness.max_age_s, harness.clock.wall)
        assert await harness.there(["a", "b"]) == [False, True]
        assert await harness.sweep() == 1
        harness.clock.now += 60.0
        assert await harness.there(["b"]) == [False]
        assert await harness.sweep() == 0


# ---- made anew ----


async def test_an_index_made_anew_knows_the_ends(tmp_path):
    async with Harness(tmp_path) as harness:
        per_extent = EXTENT_BYTES // BLOCK_BYTES
        for start in range(0, per_extent + 50, 50):
            await harness.put([f"s{i}" for i in range(start, start + 50)], 50.0 + start, 40 if start % 100 else 0)
        await harness.put(["open", "never"], 70.0)
        names = [f"s{i}" for i in range(per_extent)]
        expected = {name: (await harness.record(name)).expiry for name in names}
        assert harness.tier.counters()["sealed_extents"] == 1
        await harness.tier.close()
        shutil.rmtree(tmp_path / "drive0" / "index")
        harness.tier = harness.make()
        await harness.tier.open()
        there = [name for name in names if (await harness.there([name]))[0]]
        assert len(there) > per_extent - 100
        for name in there:
            assert (await harness.record(name)).expiry == expected[name]
        harness.clock.now += 50.0
        assert not any(await harness.there(names[:50]))
        assert all(await harness.there(there[60:80]))


@pytest.mark.parametrize("distinct", [1, 5, 150, 5000])
def test_ends_in_a_trailer_are_never_later_than_they_were(distinct):
    rng = random.Random(distinct)
    choice = [Expiry(1.7e9 + n * 3, rng.choice((0, 50)), rng.choice((0, 1_800_000_000))) for n in range(distinct)]
    runs = [rng.choice([*choice, None]) for _ in range(distinct)]
    ends = [end for end in runs for _ in range(rng.randrange(1, 6))]
    row = ExtentRow(3, 1, "t" * 198, State.SEALED, 5)
    footer = pack_footer(row, bytes(16), b"h" * 100, len(ends), ends)
    found = unpack_trailer(footer[-4096:])
    assert (found.tenant, found.records) == ("t" * 198, len(ends))
    read = [end_of(found, number) for number in range(len(ends))]
    if distinct <= 5:
        assert read == ends
    for end, was in zip(read, ends, strict=True):
        if was is not None:
            assert end is not None
            assert end.expires_s <= was.expires_s
            assert end == was or not end.sliding_s
    assert unpack_trailer(pack_footer(row, bytes(16), b"", 0, [None] * 5)[-4096:]).ends == ()


def test_a_trailer_with_ends_is_read_by_older_code_as_one_without():
    row = ExtentRow(3, 1, "t", State.SEALED, 5)
    with_ends = pack_footer(row, bytes(16), b"h" * 100, 2, [Expiry(1e9), None])
    without = pack_footer(row, bytes(16), b"h" * 100, 2)
    assert unpack_trailer(with_ends[-4096:])[:9] == unpack_trailer(without[-4096:])[:9]
    assert len(with_ends) == len(without)
    assert trailer.TRAILER_BYTES == 4096
    assert DIGEST_BYTES == 16
