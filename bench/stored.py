"""A chain that a bench stores and finds again: its payloads follow from each block's position."""

from __future__ import annotations

import time
from typing import Final

from kvstored_client import Client, NamespaceSpec
from kvstored_client.terms import Durability

from bench.cell import chain_hashes
from bench.common import MIB
from bench.payload import Payloads

_PIECE_BYTES: Final = 32 * MIB
_PIECE_BLOCKS: Final = 4096
_HIT_S: Final = 60.0


class Stored:
    """One chain of blocks of one size, in a namespace of its own."""

    def __init__(self, label: str, block_bytes: int, blocks: int) -> None:
        self.spec = NamespaceSpec(model="bench.restart", extra=label)
        self.block_bytes = block_bytes
        self.hashes = chain_hashes(label, blocks)
        self.payloads = Payloads(block_bytes)
        self.piece = max(1, min(_PIECE_BLOCKS, _PIECE_BYTES // block_bytes))

    def put(self, client: Client, *, durable: bool) -> float:
        """Put all of it; returns the seconds that it took, those for making the bytes left out."""
        namespace, seconds = client.namespace(self.spec), 0.0
        durability: Durability = "nvme" if durable else "memory"
        for start in range(0, len(self.hashes), self.piece):
            piece = self.hashes[start : start + self.piece]
            rows = list(self.payloads.make(range(start, start + len(piece))))
            parent = self.hashes[start - 1] if start else b""
            started = time.perf_counter()
            result = client.put(namespace, piece, rows, parent=parent, wait_s=30.0, durability=durability)
            seconds += time.perf_counter() - started
            assert result.stored == len(piece), f"put: {result}"
        return seconds

    def found(self, client: Client) -> tuple[int, int]:
        """How many blocks are in DRAM, and how many on NVMe only."""
        namespace, in_dram, on_nvme = client.namespace(self.spec), 0, 0
        for start in range(0, len(self.hashes), _PIECE_BLOCKS):
            found = client.lookup(namespace, self.hashes[start : start + _PIECE_BLOCKS])
            on_nvme += found.nvme_blocks
            in_dram += found.prefix_blocks - found.nvme_blocks
        return in_dram, on_nvme

    def delivered(self, client: Client, *, last_blocks: int | None = None) -> tuple[int, int]:
        """Get and compare all of it, or the last blocks: blocks delivered, and wrong bytes."""
        namespace, blocks, wrong = client.namespace(self.spec), 0, 0
        first = len(self.hashes) - min(last_blocks or len(self.hashes), len(self.hashes))
        for start in range(first, len(self.hashes), self.piece):
            with client.get(namespace, self.hashes[start : start + self.piece], wait_s=30.0) as held:
                wrong += sum(self.payloads.wrong_bytes(start + i, held[i]) for i in range(len(held)))
                blocks += len(held)
        return blocks, wrong

    def await_hit(self, client: Client) -> bool:
        """Until the first block is delivered; False where a daemon answers that it is not there."""
        namespace, deadline = client.namespace(self.spec), time.monotonic() + _HIT_S
        while time.monotonic() < deadline:
            with client.get(namespace, self.hashes[:1], wait_s=1.0) as held:
                if len(held):
                    return True
            if client.connected and not client.lookup(namespace, self.hashes[:1]).prefix_blocks and client.connected:
                return False
            time.sleep(0.001)
        return False
