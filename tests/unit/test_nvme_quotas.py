"""What tenants may have on NVMe: limits to the byte over all volumes, guarantees, whose extent goes."""

import asyncio

import pytest

from kvstored.clock import SystemClock
from kvstored.device.file import FileDevice
from kvstored.policy.quota import Allotments, Quota
from kvstored.testing.contract_lower_tier import DIGEST, OTHER_DIGEST, Blocks, find
from kvstored.tiers.nvme import NvmeConfig, NvmeTier
from tests.unit.test_nvme import QUIET

EXTENT_BYTES = 128 << 10
BLOCK = 16 << 10  # seven to an extent, beside its footer
DIGESTS = {"alice": DIGEST, "bob": OTHER_DIGEST}


@pytest.fixture
def blocks():
    made = Blocks()
    yield made
    made.close()


class Harness:
    """A tier with quotas; `find` of the contract takes it."""

    def __init__(self, directory, quotas, *, extents=6, paths=1):
        self.allotments = Allotments(paths * extents * EXTENT_BYTES, quotas)
        config = NvmeConfig(
            paths=[directory / f"drive{i}" for i in range(paths)],
            capacity_bytes=extents * EXTENT_BYTES,
            extent_bytes=EXTENT_BYTES,
            share_blocks=1,
            **QUIET,
        )
        self.tier = NvmeTier(config, FileDevice(), SystemClock(), allotment=self.allotments)

    async def store(self, blocks, tenant, names):
        blocks.reset()
        stores = [blocks.store(name, BLOCK, DIGESTS[tenant]) for name in names]
        done = await self.tier.store(tenant, stores)
        self.tier.audit()
        limit = self.allotments.of(tenant).limit_bytes
        assert limit is None or self.tier.tenants.used_bytes_of(tenant) <= limit
        return sum(done)

    async def kept(self, tenant, names):
        return [n for n in names if (await find(self, tenant, [n], DIGESTS[tenant]))[0] is not None]

    async def __aenter__(self):
        await self.tier.open()
        return self

    async def __aexit__(self, *_):
        await self.tier.close()


def names(prefix, count):
    return [f"{prefix}{i}" for i in range(count)]


@pytest.mark.parametrize("paths", [1, 2])
async def test_a_limit_holds_to_the_byte_and_the_oldest_of_its_tenant_goes(tmp_path, blocks, paths):
    async with Harness(tmp_path, {"alice": Quota(16 * BLOCK), "bob": Quota()}, paths=paths) as harness:
        await harness.store(blocks, "bob", names("b", 4))
        for batch in range(8):
            assert await harness.store(blocks, "alice", names(f"a{batch}-", 3)) == 3
        assert await harness.kept("alice", names("a7-", 3)) == names("a7-", 3)
        assert await harness.kept("alice", names("a0-", 3)) == []
        assert await harness.kept("bob", names("b", 4)) == names("b", 4)


async def test_a_limit_of_nothing_stores_nothing_and_one_below_a_call_a_part(tmp_path, blocks):
    async with Harness(tmp_path, {"alice": Quota(0), "bob": Quota(2 * BLOCK)}) as harness:
        assert await harness.store(blocks, "alice", names("a", 3)) == 0
        assert await harness.store(blocks, "bob", names("b", 3)) == 2


async def test_stores_side_by_side_stay_within_the_limit_together(tmp_path, blocks):
    async with Harness(tmp_path, {"alice": Quota(5 * BLOCK)}) as harness:
        blocks.reset()
        calls = [[blocks.store(name, BLOCK, DIGEST) for name in names(f"a{i}-", 2)] for i in range(4)]
        await asyncio.gather(*(harness.tier.store("alice", stores) for stores in calls))
        assert harness.tier.tenants.used_bytes_of("alice") <= 5 * BLOCK
        assert harness.tier.tenants.charged_bytes_of("alice") == harness.tier.tenant_usage()["alice"][0]


async def test_what_is_guaranteed_stays_whatever_another_stores(tmp_path, blocks):
    quotas = {"alice": Quota(guaranteed_bytes=7 * BLOCK), "bob": Quota()}
    async with Harness(tmp_path, quotas, extents=4) as harness:
        await harness.store(blocks, "alice", names("a", 7))
        for batch in range(12):
            assert await harness.store(blocks, "bob", names(f"b{batch}-", 7)) == 7
        assert await harness.kept("alice", names("a", 7)) == names("a", 7)


async def test_within_its_guarantee_a_tenant_finds_room_in_what_others_have_above_theirs(tmp_path, blocks):
    quotas = {"alice": Quota(guaranteed_bytes=7 * BLOCK, weight=0), "bob": Quota(guaranteed_bytes=7 * BLOCK)}
    async with Harness(tmp_path, quotas, extents=5) as harness:
        for batch in range(6):
            await harness.store(blocks, "bob", names(f"b{batch}-", 7))
        assert await harness.store(blocks, "alice", names("a", 7)) == 7
        assert harness.tier.tenants.used_bytes_of("bob") >= 7 * BLOCK
        assert await harness.kept("bob", names("b5-", 7)) == names("b5-", 7)


async def test_a_lowered_limit_is_met_extent_by_extent(tmp_path, blocks):
    async with Harness(tmp_path, {"alice": Quota()}) as harness:
        for batch in range(3):
            await harness.store(blocks, "alice", names(f"a{batch}-", 7))
        assert not await harness.tier.trim("alice")
        harness.allotments.change({"alice": Quota(8 * BLOCK)})
        while await harness.tier.trim("alice"):
            pass
        assert harness.tier.tenants.used_bytes_of("alice") == 7 * BLOCK
        assert await harness.kept("alice", names("a2-", 7)) == names("a2-", 7)
