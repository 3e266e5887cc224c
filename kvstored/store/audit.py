"""Checking what is stored against its content hashes, on demand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Final

import msgspec

from kvstored.catalog.catalog import DEAD, READY, Entry, Space
from kvstored.catalog.history import Reason
from kvstored.device import memory
from kvstored.keys import BLOCK_BYTES_MAX, in_pieces, slot_bytes
from kvstored.store.parts import Below, Parts
from kvstored.tiers.base import Load
from kvstored.tiers.threads import Calls

BATCH_BLOCKS: Final = 64
SCRATCH_BYTES: Final = 2 * BLOCK_BYTES_MAX


class Verified(msgspec.Struct):
    """Blocks checked per tier; `corrupt` ones were dropped, `skipped` ones were busy or went away meanwhile."""

    dram_blocks: int = 0
    nvme_blocks: int = 0
    size_bytes: int = 0
    corrupt: int = 0
    skipped: int = 0


async def verify(parts: Parts) -> Verified:
    """Check every block of every tenant in every tier; reads all of NVMe."""
    result, calls = Verified(), Calls()
    for space in list(parts.catalog.spaces.values()):
        entries = iter(list(space.entries.values()))
        while batch := list(itertools.islice(entries, BATCH_BLOCKS)):
            # However often the caller is cancelled: the blocks are held until no thread is at them, and no longer.
            await calls.to_its_end(_verify_dram(parts, batch, result))
        if parts.below is not None:
            await _verify_nvme(parts.below, space, result)
    return result


async def _verify_dram(parts: Parts, batch: Sequence[Entry], result: Verified) -> None:
    entries = [entry for entry in batch if entry.state == READY]
    result.skipped += len(batch) - len(entries)
    parts.catalog.hold(entries)
    try:
        blocks = [(parts.dram.address(entry.slot), entry.size_bytes) for entry in entries]
        hashes = await asyncio.get_running_loop().run_in_executor(parts.copiers, memory.hash_many, blocks)
        for entry, found in zip(entries, hashes, strict=True):
            if entry.state != DEAD and found != parts.dram.records.content_hash(entry.slot):
                _drop(parts, entry)
                result.corrupt += 1
    finally:
        parts.room.unhold(entries)
    result.dram_blocks += len(entries)
    result.size_bytes += sum(entry.size_bytes for entry in entries)


def _drop(parts: Parts, entry: Entry) -> None:
    rule = "its bytes in DRAM no longer had their content hash"
    parts.history.note(entry.pool.space, [entry.hash], Reason.CORRUPT, rule)
    parts.counters["corrupt_blocks"] += 1
    parts.room.forget(entry)


async def _verify_nvme(below: Below, space: Space, result: Verified) -> None:
    # As it is now: blocks are looked for, read and decrypted under one digest, whatever epoch begins meanwhile.
    tenant, digest = space.tenant, space.digest
    scratch = memory.Mapping(SCRATCH_BYTES, name="kvstored-verify")
    try:
        cursor = b""
        while True:
            page, cursor = await below.tier.list_records(digest, cursor, BATCH_BLOCKS)
            for piece in in_pieces(page, lambda item: item[2].size_bytes, SCRATCH_BYTES):
                await _verify_records(below, tenant, digest, [hash_ for _, hash_, _ in piece], scratch.address, result)
            if not cursor:
                return
    finally:
        scratch.close()


async def _verify_records(
    below: Below, tenant: str, digest: bytes, hashes: Sequence[bytes], address: int, result: Verified
) -> None:
    records = await below.tier.find(tenant, digest, hashes, prefix=False)
    loads = []
    for hash_, record in zip(hashes, records, strict=True):
        if record is None:
            result.skipped += 1
            continue
        loads.append(Load(digest, hash_, record, address, used=False))
        address += slot_bytes(record.size_bytes)
    try:
        good = await below.tier.load(loads)
    finally:
        below.tier.unpin([load.record for load in loads])
    result.nvme_blocks += len(loads)
    result.size_bytes += sum(load.record.size_bytes for load in loads)
    result.corrupt += good.count(False)
