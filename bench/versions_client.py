"""What `bench.versions` runs with the client of either version: one round of every cell for each line on stdin.

It stands alone, with the standard library, numpy and whatever `kvstored_client` is on the path; so only what both
versions have is used. Arguments: address of the daemon, MiB of the copied cells, calls of the small ones.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import kvstored_client
import numpy as np
from kvstored_client import Addresses, Client, NamespaceSpec

SMALL_BYTES = 16 << 10
LARGE_BYTES = 512 << 10
CHAIN_BLOCKS = 512
TRIES = 100


class Buffer:
    """Page-aligned slots, every page touched."""

    def __init__(self, blocks: int, block_bytes: int, fill: int) -> None:
        self._memory = mmap.mmap(-1, blocks * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._anchor = ctypes.c_char.from_buffer(self._memory)
        start = ctypes.addressof(self._anchor)
        self.block_bytes = block_bytes
        self.addresses = [start + index * block_bytes for index in range(blocks)]
        for index, address in enumerate(self.addresses):
            ctypes.memset(address, (fill + index) % 251 if fill else 0, block_bytes)

    def spans(self) -> Addresses:
        """The blocks as an engine names them."""
        return Addresses(self.addresses, self.block_bytes)


def hashes(label: str, count: int) -> list[bytes]:
    """Of a chain that nothing else uses."""
    return [hashlib.sha256(f"{label} {index}".encode()).digest() for index in range(count)]


def move(destinations: list[int], sources: list[int], block_bytes: int) -> float:
    """Seconds of one memmove per block."""
    started = time.perf_counter()
    for destination, source in zip(destinations, sources, strict=True):
        ctypes.memmove(destination, source, block_bytes)
    return time.perf_counter() - started


def seconds(call: Callable[[], object]) -> float:
    """Of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class Rounds:
    """One client, its blocks, and the cells."""

    def __init__(self, client: Client, blocks: int, calls: int) -> None:
        self._client, self._calls = client, calls
        self._namespace = client.namespace(NamespaceSpec(model="bench.versions"))
        self._chain, self._large = hashes("chain", CHAIN_BLOCKS), hashes("large", blocks)
        self._put = hashes("put", blocks)
        small = Buffer(CHAIN_BLOCKS, SMALL_BYTES, 1)
        self._source, self._target = Buffer(blocks, LARGE_BYTES, 7), Buffer(blocks, LARGE_BYTES, 0)
        for names, buffer in ((self._chain, small), (self._large, self._source)):
            self._store(names, buffer)

    def _store(self, names: list[bytes], buffer: Buffer) -> None:
        """Put them; again where the client is still connecting, or the daemon making memory."""
        for _ in range(TRIES):
            result = self._client.put(self._namespace, names, buffer.spans(), wait_s=30.0)
            if result.stored + result.existing == len(names):
                return
            time.sleep(0.2)
        raise RuntimeError(f"{len(names)} blocks cannot be put: {result.refused} refused, {self._client.connect_error}")

    def round(self) -> dict[str, float]:
        """All cells once: microseconds of a call, and ratios of a copy to memmove."""
        return {
            "lookup512_us": self._median_us(self._lookup),
            "get512_us": self._median_us(lambda: self._get(self._chain)),
            "get1_us": self._median_us(lambda: self._get(self._chain[:1])),
            "put_ratio": self._put_ratio(),
            "get_ratio": self._get_ratio(),
        }

    def _median_us(self, call: Callable[[], object]) -> float:
        return 1e6 * statistics.median(seconds(call) for _ in range(self._calls))

    def _lookup(self) -> None:
        assert self._client.lookup(self._namespace, self._chain).ready_blocks == CHAIN_BLOCKS

    def _get(self, names: list[bytes]) -> None:
        with self._client.get(self._namespace, names) as blocks:
            assert len(blocks) == len(names)

    def _put_ratio(self) -> float:
        source, target = self._source.addresses, self._target.addresses
        before = move(target, source, LARGE_BYTES)
        put = seconds(lambda: self._client.put(self._namespace, self._put, self._source.spans(), wait_s=30.0))
        after = move(target, source, LARGE_BYTES)
        assert self._client.delete(self._namespace, self._put) == len(self._put)
        return 2 * put / (before + after)

    def _get_ratio(self) -> float:
        before = self._mapped_s()
        got = seconds(lambda: self._client.get_into(self._namespace, self._large, self._target.spans()))
        return 2 * got / (before + self._mapped_s())

    def _mapped_s(self) -> float:
        """Of the memmoves of the same blocks, from where they are mapped."""
        with self._client.get(self._namespace, self._large) as blocks:
            views = [blocks[index] for index in range(len(blocks))]
            sources = [np.frombuffer(view, dtype=np.uint8).ctypes.data for view in views]
            return move(self._target.addresses, sources, LARGE_BYTES)

    def wrong_blocks(self) -> int:
        """Blocks that a get delivers otherwise than they were put."""
        assert self._client.get_into(self._namespace, self._large, self._target.spans()) == len(self._large)
        pairs = zip(self._target.addresses, self._source.addresses, strict=True)
        return sum(ctypes.string_at(a, LARGE_BYTES) != ctypes.string_at(b, LARGE_BYTES) for a, b in pairs)


def main() -> None:
    """Serve rounds until the end of stdin; the first line says whose code runs, the last how many blocks were wrong."""
    address, mib, calls = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with Client(address, name="bench.versions", timeout_s=60.0, connect_timeout_s=60.0) as client:
        rounds = Rounds(client, (mib << 20) // LARGE_BYTES, calls)
        rounds.round()  # memory, mappings, code paths
        print(Path(kvstored_client.__file__).parents[1], flush=True)
        for _ in sys.stdin:
            print(json.dumps(rounds.round()), flush=True)
        print(json.dumps({"wrong_blocks": rounds.wrong_blocks()}), flush=True)


if __name__ == "__main__":
    main()
