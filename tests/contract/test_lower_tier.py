"""The contract of lower tiers, kept by the NVMe tier: on one path, on three, with hostile I/O."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstored.clock import SystemClock
from kvstored.device.file import FileDevice
from kvstored.testing.contract_lower_tier import (
    DIGEST,
    OTHER_DIGEST,
    Blocks,
    LowerTierContract,
    block_hash,
    content,
    find,
    ignored,
    load_all,
)
from kvstored.testing.faulty import FakeDevice, Faults
from kvstored.tiers.base import Record
from kvstored.tiers.nvme import NvmeConfig, NvmeTier

EXTENT_BYTES = 128 << 10


class NvmeHarness:
    def __init__(self, directory: Path, device: FileDevice, paths: int, extents: int = 4, algorithm: str = "") -> None:
        self._algorithm = algorithm
        self._paths = [directory / f"drive{i}" for i in range(paths)]
        self._config = NvmeConfig(
            paths=self._paths,
            capacity_bytes=extents * EXTENT_BYTES,
            extent_bytes=EXTENT_BYTES,
            index_map_bytes=1 << 20,
            share_blocks=1,
        )
        self._device = device
        self.evicted: list[tuple[str, bytes, bytes]] = []
        self.tier = self._make()

    def _make(self) -> NvmeTier:
        return NvmeTier(self._config, self._device, SystemClock(), self._note)

    def _note(self, tenant: str, digest: bytes, hashes: list[bytes]) -> None:
        self.evicted += [(tenant, digest, hash_) for hash_ in hashes]

    async def open(self) -> None:
        await self.tier.open()
        for tenant in "tu" if self._algorithm else "":
            self.tier.keys.configure(tenant, self._algorithm)
            await self.tier.keys.unlock(tenant, [b"m" * 32])

    async def restart(self) -> None:
        await self.tier.close()
        self.tier = self._make()
        await self.open()

    def damage(self, record: Record) -> None:
        path = self._paths[record.location.volume] / "extents" / f"{record.location.extent:08d}.ext"
        with path.open("r+b") as file:
            file.seek(record.location.offset + record.size_bytes - 1)
            last = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([last ^ 0x80]))

    def holds(self, data: bytes) -> bool:
        files = [file for path in self._paths for file in sorted((path / "extents").iterdir())]
        return any(data in file.read_bytes() for file in files)

    def audit(self) -> None:
        self.tier.audit()
        assert self.tier.usage().balanced()


@pytest.fixture
def blocks() -> Iterator[Blocks]:
    made = Blocks()
    yield made
    made.close()


class TestOnePath(LowerTierContract):
    @pytest.fixture
    async def harness(self, tmp_path: Path) -> AsyncIterator[NvmeHarness]:
        made = NvmeHarness(tmp_path, FileDevice(), paths=1)
        await made.tier.open()
        yield made
        await made.tier.close()


class TestThreePaths(LowerTierContract):
    @pytest.fixture
    async def harness(self, tmp_path: Path) -> AsyncIterator[NvmeHarness]:
        made = NvmeHarness(tmp_path, FileDevice(), paths=3, extents=2)
        await made.tier.open()
        yield made
        await made.tier.close()


class TestShortReadsAndWrites(LowerTierContract):
    @pytest.fixture
    async def harness(self, tmp_path: Path) -> AsyncIterator[NvmeHarness]:
        made = NvmeHarness(tmp_path, FakeDevice(1, Faults(short=0.3)), paths=1)
        await made.tier.open()
        yield made
        await made.tier.close()


class TestEncrypted(LowerTierContract):
    @pytest.fixture(params=["aes-256-gcm", "chacha20-poly1305"])
    async def harness(self, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[NvmeHarness]:
        made = NvmeHarness(tmp_path, FakeDevice(1, Faults(short=0.3)), paths=2, extents=3, algorithm=request.param)
        await made.open()
        yield made
        await made.tier.close()


DIGESTS = {"t": DIGEST, "u": OTHER_DIGEST}
NAMES = [f"block {i}" for i in range(40)]
TENANTS = st.sampled_from(sorted(DIGESTS))
SOME_NAMES = st.lists(st.sampled_from(NAMES), min_size=1, max_size=8, unique=True)
STEPS = st.lists(
    st.tuples(st.just("store"), TENANTS, SOME_NAMES)
    | st.tuples(st.just("store"), TENANTS, SOME_NAMES)
    | st.tuples(st.just("delete"), TENANTS, SOME_NAMES)
    | st.tuples(st.just("load"), TENANTS, SOME_NAMES)
    | st.tuples(st.just("wipe"), TENANTS, st.just([]))
    | st.tuples(st.just("restart"), TENANTS, st.just([])),
    max_size=20,
)


def size_of(name: str) -> int:
    return 1 + int.from_bytes(block_hash(name)[:2], "big") * 3 // 4


class Model:
    """What the tier must hold: everything it took that was neither deleted nor reported as evicted."""

    def __init__(self, harness: NvmeHarness, blocks: Blocks) -> None:
        self.harness = harness
        self.blocks = blocks
        self.held: set[tuple[str, str]] = set()
        self.stored: set[tuple[str, str]] = set()  # ever
        self.names = {block_hash(name): name for name in NAMES}

    async def step(self, verb: str, tenant: str, names: list[str]) -> None:
        await getattr(self, verb)(tenant, names)
        for evicted_tenant, _, hash_ in self.harness.evicted:
            self.held.discard((evicted_tenant, self.names[hash_]))
        self.harness.evicted.clear()
        self.harness.audit()
        usage = {t: blocks for t, (_, blocks) in self.harness.tier.tenant_usage().items()}
        assert usage == {t: sum(h[0] == t for h in self.held) for t in usage}

    async def store(self, tenant: str, names: list[str]) -> None:
        self.blocks.reset()
        stores = [self.blocks.store(name, size_of(name), DIGESTS[tenant]) for name in names]
        stored = await self.harness.tier.store(tenant, stores)
        self.held |= {(tenant, name) for name, done in zip(names, stored, strict=True) if done}
        self.stored |= {(tenant, name) for name in names}

    async def delete(self, tenant: str, names: list[str]) -> None:
        deleted = await self.harness.tier.delete(tenant, DIGESTS[tenant], [block_hash(name) for name in names])
        there = {(tenant, name) for name in names} & self.held
        assert deleted == len(there)
        self.held -= there

    async def load(self, tenant: str, names: list[str]) -> None:
        loaded = await load_all(self.harness, self.blocks, tenant, names, DIGESTS[tenant])
        assert loaded == {name: content(name, size_of(name)) for name in names if (tenant, name) in self.held}

    async def wipe(self, tenant: str, _names: list[str]) -> None:
        assert (await self.harness.tier.wipe([tenant], ignored)).left == []
        alive = {name for owner, name in self.held if owner == tenant}
        # Of both tenants a name has the same bytes: one that the other holds may be there.
        elsewhere = {name for owner, name in self.held if owner != tenant} | self.other_than(tenant)
        for name in set(NAMES) - alive - elsewhere:
            assert not self.harness.holds(content(name, size_of(name))[:64]), name

    def other_than(self, tenant: str) -> set[str]:
        """What the other tenant ever stored and may have left dead."""
        return {name for owner, name in self.stored if owner != tenant}

    async def restart(self, _tenant: str, _names: list[str]) -> None:
        await self.harness.restart()

    async def check_all(self) -> None:
        for tenant, digest in DIGESTS.items():
            found = await find(self.harness, tenant, NAMES, digest)
            assert [r is not None for r in found] == [(tenant, name) in self.held for name in NAMES]
            await self.load(tenant, NAMES)


@settings(max_examples=25, deadline=None)
@given(steps=STEPS, paths=st.integers(1, 2), algorithm=st.sampled_from(["", "aes-256-gcm"]))
def test_the_tier_holds_exactly_what_a_dictionary_would(
    steps: list[tuple[str, str, list[str]]], paths: int, algorithm: str
) -> None:
    async def run(directory: Path) -> None:
        blocks = Blocks()
        harness = NvmeHarness(directory, FileDevice(), paths, algorithm=algorithm)
        await harness.open()
        model = Model(harness, blocks)
        for step in steps:
            await model.step(*step)
        await model.check_all()
        await harness.tier.close()
        blocks.close()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory)))
