"""Block hashes of token ids, and how hashes travel.

`proto/README.md` describes it for other languages (test vectors: `proto/vectors/chain.json`). In short:

    h[i]     := SHA-256(u8 len(previous) | previous | u8 width | u32 count | tokens | extra)
    previous := h[i-1]; for the first block the parent's hash, or the namespace's chain seed
                where the sequence starts here
    tokens   := count ids of `width` bytes each, little endian; width is 4, or 8 in a block that
                holds an id of 2^32 or more
    extra    := bytes that must be equal too (say, the hash of an image among the tokens)

Only full blocks have a hash. Hashes are cryptographic, because with crafted collisions one
user's context could be served to another.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

HASH_BYTES_MIN: Final = 8
HASH_BYTES_MAX: Final = 64
# Starts hashes that were made without a seed: nobody else could find what was stored under them.
UNSEEDED: Final = b"kvstored:no-seed"
_HEAD: Final = struct.Struct("<BI")


def chain(
    seed: bytes, token_ids: Iterable[int], block_tokens: int, parent: bytes = b"", extra: bytes | Sequence[bytes] = b""
) -> list[bytes]:
    """Hashes (32 bytes each) of the full blocks of `token_ids`.

    Args:
        seed: the namespace's chain seed.
        token_ids: a list, array, numpy array or torch tensor of ids, not negative.
        block_tokens: tokens in one block.
        parent: hash of the block before the first one; empty where the sequence starts here.
        extra: goes into every block's hash; a sequence of bytes has one per block.

    Raises ValueError for a negative id, a `block_tokens` below 1 or too few extras.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens is {block_tokens}: it must be at least 1")
    ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    ids = ids if isinstance(ids, list) else list(ids)
    count = len(ids) // block_tokens
    extras = [extra] * count if isinstance(extra, bytes) else list(extra)
    if len(extras) < count:
        raise ValueError(f"{count} blocks, and extra for {len(extras)} of them")
    previous, hashes = parent or seed, []
    for block, more in zip(_packed(ids, count, block_tokens), extras, strict=False):
        previous = hashlib.sha256(bytes((len(previous),)) + previous + block + more).digest()
        hashes.append(previous)
    return hashes


def _packed(ids: list[int], count: int, block_tokens: int) -> Iterable[bytes]:
    """Width, count and tokens of each full block."""
    head = _HEAD.pack(4, block_tokens)
    try:
        whole = _little_endian("I", ids[: count * block_tokens])
    except OverflowError:  # a rare id: then block by block, so that a block's hash never depends on a later one
        return [_pack_block(ids[i * block_tokens : (i + 1) * block_tokens]) for i in range(count)]
    size = 4 * block_tokens
    return [head + whole[i * size : (i + 1) * size] for i in range(count)]


def _pack_block(ids: list[int]) -> bytes:
    if min(ids) < 0:
        raise ValueError(f"token id {min(ids)} is negative")
    wide = max(ids) >= 1 << 32
    return _HEAD.pack(8 if wide else 4, len(ids)) + _little_endian("Q" if wide else "I", ids)


def _little_endian(code: str, ids: list[int]) -> bytes:
    packed: array[int] = array(code, ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class Packed(NamedTuple):
    """Hashes of one size in one field, as they travel."""

    data: bytes
    hash_bytes: int
    length: int

    def part(self, start: int, end: int) -> Packed:
        """Hashes `start` up to `end`."""
        if start <= 0 and end >= self.length:
            return self
        end = min(end, self.length)
        return Packed(self.data[start * self.hash_bytes : end * self.hash_bytes], self.hash_bytes, end - start)

    def one(self, index: int) -> bytes:
        """One hash."""
        return self.data[index * self.hash_bytes : (index + 1) * self.hash_bytes]


def pack(hashes: Sequence[bytes]) -> Packed:
    """Pack hashes. Raises TypeError where they are not bytes, ValueError where sizes differ or are out of bounds."""
    if isinstance(hashes, (bytes, str, bytearray)):
        raise TypeError("hashes must be a sequence of bytes, one per block")
    if not hashes:
        return Packed(b"", 0, 0)
    data, size = b"".join(hashes), len(hashes[0])
    if set(map(len, hashes)) != {size}:
        raise ValueError("the hashes of one call must all have the same size")
    if not HASH_BYTES_MIN <= size <= HASH_BYTES_MAX:
        raise ValueError(f"hashes of {size} bytes: {HASH_BYTES_MIN} to {HASH_BYTES_MAX} are allowed")
    return Packed(data, size, len(hashes))
