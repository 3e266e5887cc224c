"""An NVMe index with a million blocks: how long until it is open, and what a block costs in memory.

The index is filled as stores fill it, the extents are sealed with footers but hold no blocks.
Then processes of their own open the tier: after an orderly close, after a kill (the index is
checked in a child), and with the index gone (it is made anew from the footers).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from bench.common import MIB, Figure, Values, emit, parser, progress, run
from kvstored.clock import SystemClock
from kvstored.device.file import FileDevice
from kvstored.keys import Namespace
from kvstored.tiers.base import Store
from kvstored.tiers.directory import VolumeDirectory
from kvstored.tiers.formats import ExtentRow, Placed, State, footer_bytes, header_bytes
from kvstored.tiers.index import Index
from kvstored.tiers.nvme import NvmeConfig, NvmeTier
from kvstored.tiers.trailer import pack_footer

_EXTENT_BYTES: Final = 256 << 20
_BLOCK_BYTES: Final = 4096
_DIGEST: Final = bytes(16)
_BATCH: Final = 4096
_FOUND: Final = 512
_PER_EXTENT: Final = _EXTENT_BYTES // (_BLOCK_BYTES + 256)

FIGURES: Final = (
    Figure("blocks", "blocks in the index"),
    Figure("index_mb", "size of the index's file, MB"),
    Figure("clean_open_s", "seconds to open the tier after an orderly close"),
    Figure("killed_open_s", "the same after a kill: checked and copied by a child", "<= 4"),
    Figure("rebuilt_open_s", "the same without an index: made anew from the footers"),
    Figure("memory_bytes_per_block", "memory of the daemon's own (RssAnon) that opening adds, per block", "<= 64"),
    Figure("find512_ms", "look-up of 512 blocks that are all there, ms"),
)


def fill(path: Path, blocks: int) -> None:
    """A volume with so many blocks of one tenant."""
    directory = VolumeDirectory(FileDevice(), path, open_files_max=8)
    directory.open(_EXTENT_BYTES, require_direct_io=False)
    index = Index(directory.index, 0, 1 << 30)
    index.open(directory)
    index.remember(Namespace("t", _DIGEST, b"bench", {}))
    for number, start in enumerate(range(0, blocks, _PER_EXTENT), 1):
        stores = [_store(i) for i in range(start, min(start + _PER_EXTENT, blocks))]
        _check_fits(stores)
        for first in range(0, len(stores), _BATCH):
            few = enumerate(stores[first : first + _BATCH], first)
            index.insert("t", [Placed(number, 1, i * _BLOCK_BYTES, store) for i, store in few], time.time())
        headers = index.headers(number, 1)
        row = ExtentRow(number, 1, "t", State.SEALED, number)
        footer = pack_footer(row, directory.identity, b"".join(headers), len(headers))
        with (directory.extents / f"{number:08d}.ext").open("wb") as file:
            file.truncate(_EXTENT_BYTES)
            os.pwrite(file.fileno(), footer, _EXTENT_BYTES - len(footer))
        index.seal(row)
    index.close()
    directory.close()


def _store(number: int) -> Store:
    parent = _hash(number - 1)
    return Store(_DIGEST, _hash(number), parent, 0, _BLOCK_BYTES, parent[:16])


def _hash(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little", signed=True)).digest()


def _check_fits(stores: list[Store]) -> None:
    size = len(stores) * _BLOCK_BYTES + footer_bytes(sum(map(header_bytes, stores)))
    assert size <= _EXTENT_BYTES, "too many blocks for an extent"


async def open_tier(path: Path) -> dict[str, float]:
    """Open the tier and close it; what that took."""
    config = NvmeConfig(paths=[path], capacity_bytes=64 * _EXTENT_BYTES, extent_bytes=_EXTENT_BYTES)
    tier = NvmeTier(config, FileDevice(), SystemClock())
    before, started = own_memory_bytes(), time.perf_counter()
    await tier.open()
    opened_s = time.perf_counter() - started
    grown, blocks = own_memory_bytes() - before, tier.usage().blocks
    hashes = [_hash(i) for i in range(_FOUND)]
    started = time.perf_counter()
    records = await tier.find("t", _DIGEST, hashes, prefix=True)
    found_s = time.perf_counter() - started
    assert len(records) == min(_FOUND, blocks), "blocks are missing"
    tier.unpin([record for record in records if record is not None])
    await tier.close()
    return {"blocks": blocks, "open_s": opened_s, "memory_bytes": grown, "find_s": found_s}


def own_memory_bytes() -> int:
    """Resident memory of this process that is not a file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def _in_a_process(path: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.index", "--open", str(path)]
    done = subprocess.run(command, capture_output=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def measure(arguments: argparse.Namespace) -> Values:
    """Fill a volume and open it in every way."""
    with tempfile.TemporaryDirectory(dir=arguments.directory) as made:
        path = Path(made) / "volume"
        progress(f"entering {arguments.blocks} blocks")
        fill(path, arguments.blocks)
        index_bytes = (path / "index" / "data.mdb").stat().st_size
        clean = _in_a_process(path)
        (path / "CLEAN").unlink()
        killed = _in_a_process(path)
        shutil.rmtree(path / "index")
        rebuilt = _in_a_process(path)
    assert clean["blocks"] == killed["blocks"] == rebuilt["blocks"] == arguments.blocks
    return {
        "blocks": arguments.blocks,
        "index_mb": index_bytes / MIB,
        "clean_open_s": clean["open_s"],
        "killed_open_s": killed["open_s"],
        "rebuilt_open_s": rebuilt["open_s"],
        "memory_bytes_per_block": max(clean["memory_bytes"], killed["memory_bytes"]) / arguments.blocks,
        "find512_ms": clean["find_s"] * 1e3,
    }


def main() -> int:
    """Entry point."""
    built = parser("bench.index", "Opening an NVMe index with many blocks.", FIGURES)
    built.add_argument("--blocks", type=int, default=1_000_000)
    built.add_argument("--directory", type=Path, help="where to make the volume")
    built.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    arguments = built.parse_args()
    if arguments.open is not None:
        print(json.dumps(asyncio.run(open_tier(arguments.open))))
        return 0
    emit(measure(arguments), FIGURES, arguments.json)
    return 0


if __name__ == "__main__":
    run(main)
