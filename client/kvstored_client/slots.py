"""Where the blocks of a lease lie, as the daemon packs it (see `kvstored_proto.frames`)."""

from __future__ import annotations

import struct
from collections.abc import Mapping as MappingOf
from typing import Final

from kvstored_proto import frames
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored_client.errors import Unavailable
from kvstored_client.mapping import Mapping

BYTES_PER_BLOCK: Final = 8 + frames.HEAD.size  # in a reply
_INDEX_MASK: Final = (1 << frames.SLOT_INDEX_BITS) - 1


class Slots:
    """The places, sizes and content hashes of a lease's blocks, in chain order."""

    __slots__ = ("_heads", "_places", "sizes_bytes")

    def __init__(self, lease: pb.Lease) -> None:
        """Unpack. Raises Unavailable for a lease that is not whole."""
        count, rest = divmod(len(lease.slots), 8)
        if rest or len(lease.heads) != count * frames.HEAD.size:
            raise Unavailable(f"a lease of {len(lease.slots)} and {len(lease.heads)} bytes is not whole")
        self._places: tuple[int, ...] = struct.unpack(f"<{count}Q", lease.slots)
        self._heads = lease.heads
        self.sizes_bytes: list[int] = [size for _, _, size, _ in frames.HEAD.iter_unpack(lease.heads)]

    def __len__(self) -> int:
        return len(self._places)

    @property
    def segment_ids(self) -> set[int]:
        """The segments that they lie in."""
        return {place >> frames.SLOT_INDEX_BITS for place in self._places}

    @property
    def content_hashes(self) -> list[bytes]:
        """xxh3-128 of each block."""
        return [content_hash for _, _, _, content_hash in frames.HEAD.iter_unpack(self._heads)]

    def place(self, index: int) -> tuple[int, int, int]:
        """Segment, offset in it and size of one block."""
        place, size = self._places[index], self.sizes_bytes[index]
        return place >> frames.SLOT_INDEX_BITS, (place & _INDEX_MASK) * _slot_bytes(size), size

    def addresses(self, mappings: MappingOf[int, Mapping]) -> list[int]:
        """Where each block is in this process. Raises Unavailable for one that is outside of its segment."""
        found = []
        for place, size in zip(self._places, self.sizes_bytes, strict=True):
            mapping = mappings[place >> frames.SLOT_INDEX_BITS]
            offset = (place & _INDEX_MASK) * _slot_bytes(size)
            if offset + size > mapping.size_bytes:
                raise Unavailable(f"a block at {offset} of a segment of {mapping.size_bytes} bytes")
            found.append(mapping.address + offset)
        return found


def _slot_bytes(size_bytes: int) -> int:
    return -(-size_bytes // frames.SLOT_ALIGN_BYTES) * frames.SLOT_ALIGN_BYTES
