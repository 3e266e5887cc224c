"""Keys: namespaces, packed hashes, and the bounds on both.

A key is (tenant, namespace digest, block hash). Hashes are opaque bytes from the engine;
only their size is checked. Keys are never compared across tenants: every namespace object
belongs to one tenant.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from struct import Struct
from typing import Final, TypeVar

import msgspec

from kvstored.errors import InvalidArgument

HASH_BYTES_MIN: Final = 8
HASH_BYTES_MAX: Final = 64
BLOCKS_PER_CALL_MAX: Final = 8192
BLOCK_BYTES_MAX: Final = 16 << 20
NAMESPACE_BYTES_MAX: Final = 16 << 10
SLOT_ALIGN_BYTES: Final = 4096
T = TypeVar("T")


class Namespace(msgspec.Struct, frozen=True, gc=False):
    """One tenant's namespace: its digest, its canonical encoding and its fields for people."""

    tenant: str
    digest: bytes
    encoding: bytes
    fields: dict[str, str]

    def __hash__(self) -> int:
        return hash((self.tenant, self.digest))


def split_hashes(packed: bytes, hash_bytes: int) -> list[bytes]:
    """The hashes of a packed field, in order.

    Raises InvalidArgument where the size is out of bounds, the field is not a whole number of
    hashes, or there are none or too many.
    """
    if not HASH_BYTES_MIN <= hash_bytes <= HASH_BYTES_MAX:
        raise InvalidArgument(f"hash_bytes is {hash_bytes}: {HASH_BYTES_MIN} to {HASH_BYTES_MAX} are allowed")
    count, rest = divmod(len(packed), hash_bytes)
    if rest or not 0 < count <= BLOCKS_PER_CALL_MAX:
        raise InvalidArgument(
            f"hashes has {len(packed)} bytes: it must hold 1 to {BLOCKS_PER_CALL_MAX} hashes of {hash_bytes} bytes each"
        )
    return list(_cutter(hash_bytes, count).unpack(packed))


@lru_cache(maxsize=32)
def _cutter(hash_bytes: int, count: int) -> Struct:
    return Struct(f"{hash_bytes}s" * count)


def slot_bytes(size_bytes: int) -> int:
    """Size of the slot that holds a block: the next multiple of 4 KiB, the unit of direct I/O."""
    return -(-size_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


def in_pieces(
    items: Iterable[T], size_of: Callable[[T], int], piece_bytes: int, blocks_max: int = sys.maxsize
) -> Iterator[list[T]]:
    """Cut into pieces of about so many bytes of blocks, at least one block and at most so many each.

    `size_of`: the bytes of what an item says of a block, without the padding of its slot.
    """
    piece: list[T] = []
    filled_bytes = 0
    for item in items:
        size_bytes = slot_bytes(size_of(item))
        if piece and (filled_bytes + size_bytes > piece_bytes or len(piece) >= blocks_max):
            yield piece
            piece, filled_bytes = [], 0
        piece.append(item)
        filled_bytes += size_bytes
    if piece:
        yield piece
