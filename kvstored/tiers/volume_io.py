"""How one volume's blocks come and go: read, written and synced in threads, and what failing at it means.

Encrypted blocks are decrypted and encrypted in the same threads (`runs`); what says how is here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Final, TypeVar

import msgspec

from kvstored.clock import Clock
from kvstored.errors import DeviceError
from kvstored.keys import slot_bytes
from kvstored.tiers.base import Health, Load, Record, Store
from kvstored.tiers.condition import Condition
from kvstored.tiers.directory import VolumeDirectory
from kvstored.tiers.extent import ExtentTable
from kvstored.tiers.formats import DIGEST_BYTES, Placed
from kvstored.tiers.key_ring import KeyRing
from kvstored.tiers.nvme_config import NvmeConfig
from kvstored.tiers.runs import Block, Mover, Read, Run, cut
from kvstored.tiers.sealing import Lock, about
from kvstored.tiers.threads import VolumeThreads, call_all
from kvstored.tiers.wear import WearMeter
from kvstored.tiers.wear_file import WearFile

T = TypeVar("T")

# A bad sector spoils a record or a few neighbours, a device that is gone spoils all: so many in a row, without
# one that can be read between them, are more than one call reads, and cost no record.
UNREADABLE_IN_A_ROW_MAX: Final = 32
# In one call of a thread: each costs the event loop 0.1 ms, and its end wakes it. Few, for the deadline is a call's.
RUNS_PER_CALL_MAX: Final = 4


class VolumeIO(Condition):
    """The blocks of one volume, on their way."""

    def __init__(
        self,
        directory: VolumeDirectory,
        table: ExtentTable,
        threads: VolumeThreads,
        config: NvmeConfig,
        clock: Clock,
        counts: Counter[str],
        keys: KeyRing,
        meter: WearMeter,
    ) -> None:
        super().__init__(directory, table, threads, config, clock, counts)
        self.suspects: dict[int, None] = {}  # extents in which something was wrong, to be scrubbed first
        self.mover = Mover(directory.device, directory.files, directory.extents)
        self.keys = keys
        self.wear = WearFile(meter, directory, threads, self.calls, counts)
        self._run_bytes = config.run_bytes
        self._unreadable_in_a_row = 0

    async def _read(self, blocks: Sequence[Block]) -> dict[int, Read]:
        runs = cut(blocks, self._run_bytes, self.threads.load_count)
        read = await self._each(self.threads.loads, self.threads.load_count, self.mover.read, runs)
        outcomes: dict[int, Read] = {}
        for run, results in zip(runs, read, strict=True):
            # A call that was not begun because the device hangs; else a failed read is an outcome.
            found = [Read.UNREADABLE] * len(run.blocks) if isinstance(results, DeviceError) else results
            for block, outcome in zip(run.blocks, found, strict=True):
                self.counts[f"load_{outcome.value}_blocks"] += 1
                outcomes[block.position] = outcome
                if outcome is not Read.OK:
                    self.suspects[block.extent] = None
        if Read.OK in outcomes.values():
            self._unreadable_in_a_row = 0
        return outcomes

    def _sources(self, loads: Sequence[Load], positions: Sequence[int]) -> list[Block]:
        """Where these loads are to be read; those whose key is not there are left out, and stay where they are."""
        if not self.directory.sealed:
            return [source(loads[i].record, loads[i].address, i) for i in positions]
        locks = self.locks_of([(loads[i].digest + loads[i].hash, loads[i].record) for i in positions])
        found: list[Block] = []
        for i in positions:
            load = loads[i]
            lock = locks.get(load.digest + load.hash)
            if lock is not None or not load.record.seal:
                found.append(source(load.record, load.address, i, lock))
        self.counts["load_locked_blocks"] += len(positions) - len(found)
        return found

    def locks_of(self, entries: Iterable[tuple[bytes, Record]]) -> dict[bytes, Lock]:
        """By key, how encrypted records are read whose data key is there."""
        locks: dict[bytes, Lock] = {}
        for key, record in entries:
            if record.seal:
                tenant, digest, hash_ = self.table.owner(record) or "", key[:DIGEST_BYTES], key[DIGEST_BYTES:]
                said = about(tenant, digest, hash_, record.content_hash, record.size_bytes)
                lock = self.keys.lock_of(record, said)
                if lock is not None:
                    locks[key] = lock
        return locks

    async def device_reads(self, outcomes: Sequence[Read]) -> bool:
        """Whether it is the records that are bad, and not the device or its directory that is gone."""
        if Read.OK in outcomes:
            self._unreadable_in_a_row = 0
        unreadable = sum(outcome is Read.UNREADABLE for outcome in outcomes)
        self._unreadable_in_a_row += unreadable
        if unreadable and self.health is not Health.OFF:
            if self._unreadable_in_a_row > UNREADABLE_IN_A_ROW_MAX:
                self.turn(Health.OFF, f"{self._unreadable_in_a_row} reads in a row failed")
            await self.check()
        return self.health is not Health.OFF

    async def _write(self, placed: Sequence[Placed], locks: Sequence[Lock] = ()) -> Mapping[int, bytes]:
        """Write and sync, encrypted where there are `locks`; seals by the positions of the blocks that are durable."""
        blocks = [
            Block(p.extent, p.offset, p.store.address, p.store.size_bytes, b"", i, locks[i] if locks else None)
            for i, p in enumerate(placed)
        ]
        runs = cut(blocks, self._run_bytes, self.threads.store_count)
        stores, call, size_bytes = self.threads.stores, self.calls.call, sum(run.bytes for run in runs)
        await self.wear.before(size_bytes)
        outcomes = await self._each(stores, self.threads.store_count, self.mover.write, runs)
        self.wear.wrote(size_bytes, "blocks")  # also what failed on its way
        written = [
            (run, seals)
            for run, seals in zip(runs, outcomes, strict=True)
            if not (isinstance(seals, DeviceError) and self._failed(run.extent, seals))
        ]
        extents = sorted({run.extent for run, _ in written})
        synced = await call_all(call(stores, self.mover.sync, extent) for extent in extents)
        durable = {e for e, error in zip(extents, synced, strict=True) if not self._failed(e, error)}
        self.counts["written_bytes"] += sum(run.bytes for run, _ in written)
        return {
            block.position: seal
            for run, seals in written
            if run.extent in durable and not isinstance(seals, DeviceError)
            for block, seal in zip(run.blocks, seals, strict=True)
        }

    async def _each(
        self, pool: Executor, threads: int, work: Callable[[Run], T], runs: Sequence[Run]
    ) -> list[T | DeviceError]:
        """What `work` made of each run, a few by one call; of a call that was not begun, the error of all."""
        step = max(1, min(RUNS_PER_CALL_MAX, -(-len(runs) // threads)))
        shares = [runs[start : start + step] for start in range(0, len(runs), step)]
        ended = await call_all(self.calls.call(pool, work_on, work, share) for share in shares)
        outcomes: list[T | DeviceError] = []
        for share, results in zip(shares, ended, strict=True):
            outcomes += [results] * len(share) if isinstance(results, DeviceError) else results
        return outcomes

    def _failed(self, extent: int, error: DeviceError | None) -> bool:
        if error is None:
            return False
        self.table.fill(extent)
        self.write_failed(error)
        return True


def work_on(work: Callable[[Run], T], runs: Sequence[Run]) -> list[T | DeviceError]:
    """One run after the other, whatever became of those before it. Runs in a thread."""
    outcomes: list[T | DeviceError] = []
    for run in runs:
        try:
            outcomes.append(work(run))
        except DeviceError as error:
            outcomes.append(error)
    return outcomes


def source(record: Record, address: int, position: int, lock: Lock | None = None) -> Block:
    """Where a record lies and where it is to go."""
    place = record.location
    return Block(place.extent, place.offset, address, record.size_bytes, record.content_hash, position, lock)


def read_each(
    mover: Mover, entries: Sequence[tuple[bytes, Record]], locks: Mapping[bytes, Lock], address: int, piece_bytes: int
) -> list[Read]:
    """Read records, by key, one behind the other to an address, in pieces; what became of each. Runs in a thread."""
    blocks, at = [], address
    for position, (key, record) in enumerate(entries):
        blocks.append(source(record, at, position, locks.get(key)))
        at += slot_bytes(record.size_bytes)
    outcomes = [Read.UNREADABLE] * len(entries)
    for run in cut(blocks, piece_bytes, 1):
        for block, outcome in zip(run.blocks, mover.read(run), strict=True):
            outcomes[block.position] = outcome
    return outcomes


def locks_for(keys: KeyRing, tenant: str, stores: Iterable[Store]) -> list[Lock] | None:
    """How a tenant's new blocks are encrypted; None where they are to be and its key is not there."""
    algorithm = keys.algorithms.get(tenant, 0)
    key = keys.open.get(tenant)
    if key is None:
        return None if algorithm else []
    if not algorithm:
        return []
    return [Lock(key, algorithm, about(tenant, s.digest, s.hash, s.content_hash, s.size_bytes)) for s in stores]


def with_seals(placed: Sequence[Placed], seals: Mapping[int, bytes], *, sealed: bool) -> list[Placed]:
    """The blocks that are durable, as the index is to know them."""
    if not sealed:
        return [placed[i] for i in sorted(seals)]
    return [msgspec.structs.replace(placed[i], seal=seals[i]) for i in sorted(seals)]
