"""One byte of a volume flipped while nobody has it open: never a wrong byte, never a tier that does not come up.

A thousand random places, each in a fresh copy of one volume, in every kind of file: half of the copies are as an
orderly close left them, half as a kill did. After each the whole tier is read, its account is compared with what
is in it, and it takes new blocks. Damaged indexes are checked and made anew by the same code as otherwise, in
processes of their own that are forked and not started (`check_server`).
"""

import random
import shutil
import tempfile
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest

from kvstored.keys import slot_bytes
from kvstored.testing import contract_lower_tier
from kvstored.testing.contract_lower_tier import DIGEST, OTHER_DIGEST, Blocks, block_hash, load_all
from kvstored.tiers import index_check
from kvstored.tiers.base import Health
from tests.unit.check_server import CheckServer
from tests.unit.test_nvme import EXTENT_BYTES, Harness, names, store

PLACES = 1000
BLOCK_BYTES = 4096
GROUPS = 4
SETTINGS = {"extent_bytes": EXTENT_BYTES, "capacity_bytes": 6 * EXTENT_BYTES, "scrub_bytes_per_s": 0}
FOOTER_BYTES = 8192
DELETED = {"a2", "a40", "a69"}
HELD = {("t", DIGEST): set(names("a", 70)) - DELETED, ("u", OTHER_DIGEST): set(names("b", 10))}
content = lru_cache(contract_lower_tier.content)
# How many blocks one byte may cost, and how often which file is hit.
KINDS = {
    "FORMAT": (0, 1),
    "FORMAT.copy": (0, 1),
    "CLEAN": (0, 1),
    "tombstones": (0, 1),
    "namespaces": (0, 1),
    "index/data.mdb": (11, 8),
    "block": (1, 3),
    "footer": (0, 3),
}


@pytest.fixture(scope="module")
def server():
    made = CheckServer()
    yield made
    made.close()


@pytest.fixture
def blocks():
    made = Blocks()
    yield made
    made.close()


@pytest.fixture
def directory():
    """In memory where that is possible: what is tested is not how fast a disk syncs."""
    parent = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=parent if parent.is_dir() else None) as made:
        yield Path(made)


async def make_volume(directory, blocks):
    """Two sealed extents, two open ones, two tenants, deleted blocks; as closed and as killed."""
    async with Harness(directory / "closed", **SETTINGS) as harness:
        await harness.tier.remember_namespace("t", DIGEST, b"encoding", {"model": "m"})
        assert all(await store(harness, blocks, names("a", 70), size=BLOCK_BYTES))
        assert all(await store(harness, blocks, names("b", 10), "u", BLOCK_BYTES, OTHER_DIGEST))
        assert await harness.tier.delete("t", DIGEST, [block_hash(name) for name in sorted(DELETED)]) == 3
        shutil.copytree(directory / "closed", directory / "killed")
    return [directory / "closed" / "drive0", directory / "killed" / "drive0"]


def place(volume, kind, rng):
    """A random byte of a file of that kind: its path and offset."""
    if kind in ("block", "footer"):
        extents = sorted((volume / "extents").iterdir())
        if kind == "footer":  # only what was sealed ends in one
            path = rng.choice([path for path in extents if path.stat().st_size == EXTENT_BYTES])
            return path, EXTENT_BYTES - 1 - rng.randrange(FOOTER_BYTES)
        path = rng.choice(extents)
        return path, rng.randrange(min(path.stat().st_size, EXTENT_BYTES - FOOTER_BYTES))
    path = volume / kind
    if path.is_dir():
        path = rng.choice(sorted(path.iterdir()))
    data = path.read_bytes()
    if rng.random() < 0.7:  # much of the index's pages is empty
        return path, rng.choice([at for at, byte in enumerate(data) if byte])
    return path, rng.randrange(len(data))


def flip(path, at, rng):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


async def read_all(harness, blocks):
    """Everything that is found, checked byte for byte; returns how many blocks are missing."""
    missing = 0
    for (tenant, digest), chosen in HELD.items():
        found = await load_all(harness, blocks, tenant, sorted(chosen | DELETED), digest)
        for name, data in found.items():
            assert data == content(name, BLOCK_BYTES)
        assert not DELETED & set(found), "a deleted block came back"
        missing += len(chosen - set(found))
    assert await load_all(harness, blocks, "t", sorted(HELD["u", OTHER_DIGEST]), OTHER_DIGEST) == {}
    return missing


async def account(harness):
    """Blocks and bytes are those of the records that there are."""
    records, cursor = [], b""
    while page := await harness.tier.list_records(None, cursor, 1000):
        records += page[0]
        if not (cursor := page[1]):
            break
    usage = harness.tier.usage()
    assert usage.blocks == len(records)
    assert usage.used_bytes == sum(slot_bytes(record.size_bytes) for _, _, record in records)
    assert sum(blocks for _, blocks in harness.tier.tenant_usage().values()) == len(records)


async def live_through(directory, volume, blocks, kind, rng):
    """One flip in a copy of a volume; returns how many blocks it cost."""
    copy = directory / "copy"
    shutil.copytree(volume, copy / "drive0")
    path, at = place(copy / "drive0", kind, rng)
    flip(path, at, rng)
    try:
        async with Harness(copy, **SETTINGS) as harness:
            assert harness.tier.health is Health.OK, harness.tier.properties()
            await account(harness)
            missing = await read_all(harness, blocks)
            harness.audit()
            assert await store(harness, blocks, ["n0", "n1"]) == [True] * 2
            found = await load_all(harness, blocks, "t", ["n0", "n1"])
            assert found == {name: content(name, 16384) for name in ("n0", "n1")}
            await account(harness)
            assert missing <= KINDS[kind][0]
    except BaseException as error:
        error.add_note(f"flipped: {path.relative_to(copy)} at {at}, of {volume}")
        raise
    finally:
        shutil.rmtree(copy)
    return missing


@pytest.mark.parametrize("group", range(GROUPS))
async def test_a_flipped_byte_costs_a_block_or_nothing(directory, blocks, server, monkeypatch, group):
    monkeypatch.setattr(index_check, "run", server.run)
    volumes = await make_volume(directory, blocks)
    rng = random.Random(group)
    kinds = rng.choices(list(KINDS), [weight for _, weight in KINDS.values()], k=PLACES // GROUPS)
    cost = Counter()
    for kind in kinds:
        volume = volumes[0] if kind == "CLEAN" else rng.choice(volumes)  # a kill leaves none
        cost[kind] += await live_through(directory, volume, blocks, kind, rng)
    assert cost["block"], "flips in blocks are noticed"
    print(dict(Counter(kinds)), "missing:", dict(cost), dict(Counter(server.modes)), "deaths:", server.deaths)
