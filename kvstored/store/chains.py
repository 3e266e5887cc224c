"""What one put is about: consecutive blocks of a chain."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvstored.catalog.catalog import Space
from kvstored.catalog.leases import Session
from kvstored.errors import InvalidArgument
from kvstored.keys import BLOCK_BYTES_MAX
from kvstored.lifetime import Expiry


class Chain(msgspec.Struct, frozen=True):
    """What one reserve call is about: consecutive blocks, and the hash of the one before the first."""

    session: Session
    space: Space
    hashes: Sequence[bytes]
    sizes: Sequence[int]
    parent: bytes
    durable: bool = False
    expiry: Expiry | None = None  # of those that are stored by it

    def check(self) -> None:
        """Raises InvalidArgument where it makes no sense."""
        if len(self.sizes) != len(self.hashes):
            raise InvalidArgument(
                f"{len(self.sizes)} sizes for {len(self.hashes)} hashes: give one size a block, or block_bytes"
            )
        if not min(self.sizes) > 0 or max(self.sizes) > BLOCK_BYTES_MAX:
            raise InvalidArgument(f"a block has 1 to {BLOCK_BYTES_MAX} bytes")
        if self.parent and len(self.parent) != len(self.hashes[0]):
            raise InvalidArgument(f"parent has {len(self.parent)} bytes, the hashes {len(self.hashes[0])}")
        if len(set(self.hashes)) != len(self.hashes):
            raise InvalidArgument("a hash stands twice in one chain")

    def above(self, index: int) -> bytes:
        """The parent of a block."""
        return self.hashes[index - 1] if index else self.parent
