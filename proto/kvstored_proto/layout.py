"""Where the bytes of a block lie in an engine's paged KV memory: strided fragments. Pure; needs numpy.

An engine keeps the KV of all its blocks in a few tensors ("regions"), each with one axis that
counts blocks. The bytes of one block are fragments of them: fragment k of block b starts at
`offset + b * stride` of its region and has `size` bytes. K/V-first, blocks-first, MLA, cross-layer
and permuted tensors differ in this list and in nothing else.

Stored, the fragments of a block lie one after the other, in the order of the list. Made by
`fragments_of`, that is each tensor's part of the block in the order of its axes, as
`numpy.take(tensor, block, block_axis).tobytes()` gives it, whatever the strides: two engines whose
axes agree can share blocks although their memory differs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

FRAGMENTS_MAX: Final = 1 << 16  # of one block
BLOCKS_MAX: Final = 1 << 31
REGIONS_MAX: Final = 4096
SPAN_BYTES_MAX: Final = 1 << 48  # of one region: sums of two stay far inside of 64 bits

ALL: Final = slice(None)

Addresses = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]


class Fragment(NamedTuple):
    """One piece of every block, in bytes."""

    region: int  # which tensor
    offset: int  # where it starts for block 0
    stride: int  # from one block to the next
    size: int


class Layout:
    """The fragments of every block of a paged KV memory."""

    def __init__(self, fragments: Sequence[Fragment], blocks: int, region_bytes: Sequence[int]) -> None:
        """`region_bytes`: how much of each region there is. Raises ValueError where a block would leave it."""
        _check(fragments, blocks, region_bytes)
        self.fragments = tuple(fragments)
        self.blocks = blocks
        self.region_bytes = tuple(region_bytes)
        self.block_bytes = sum(fragment.size for fragment in fragments)
        columns = np.array(fragments, np.int64)
        self.regions = columns[:, 0]
        self._offsets = columns[:, 1].astype(np.uint64)
        self._strides = columns[:, 2].astype(np.uint64)
        self.sizes = columns[:, 3].astype(np.uint64)
        self.within = np.cumsum(self.sizes) - self.sizes  # where each lies in the stored block

    def check_ids(self, block_ids: Any, keys: int) -> Indices:
        """Block ids as an array with one row a key. Raises ValueError for ids that are none, or not so many a key."""
        ids = np.asarray(block_ids)
        if ids.size and ids.dtype.kind not in "iu":
            raise ValueError(f"block ids are integers, these are {ids.dtype}")
        if not keys or ids.size % keys or (not ids.size and keys):
            raise ValueError(f"{ids.size} block ids for {keys} keys: each key needs as many")
        ids = ids.astype(np.int64).reshape(keys, -1)
        if ids.size and int(ids.view(np.uint64).max()) >= self.blocks:  # negative ones are larger than any
            raise ValueError(f"block ids from {ids.min()} to {ids.max()}: there are {self.blocks} blocks")
        return ids

    def plan(
        self, ids: Indices, bases: Sequence[int], slots: Addresses, part: slice = ALL
    ) -> tuple[Addresses, Addresses, Addresses]:
        """Each fragment's address in the engine's memory, its address in the stored block, and its size.

        Args:
            ids: one row a key, of one block or several (whose bytes then follow one another).
            bases: address of each region.
            slots: address of each key's stored block.
            part: of the fragments, one after the other.
        """
        each = ids.shape[1]
        starts = np.asarray(bases, np.uint64)[self.regions[part]] + self._offsets[part]
        engine = starts + ids.reshape(-1, 1).astype(np.uint64) * self._strides[part]
        stored = np.asarray(slots, np.uint64).reshape(-1, 1, 1)
        stored = stored + (np.arange(each, dtype=np.uint64) * np.uint64(self.block_bytes)).reshape(1, -1, 1)
        stored = stored + self.within[part]
        sizes = np.broadcast_to(self.sizes[part], engine.shape).reshape(-1)
        if len(starts) == 1:
            return joined(engine.reshape(-1), stored.reshape(-1), sizes)
        return engine.reshape(-1), stored.reshape(-1), np.ascontiguousarray(sizes)


def joined(first: Addresses, second: Addresses, sizes: Addresses) -> tuple[Addresses, Addresses, Addresses]:
    """Neighbours on both sides as one piece. Worth it where blocks are one fragment; else there are none."""
    if len(sizes) < 2:
        return first, second, np.ascontiguousarray(sizes)
    apart = (first[1:] != first[:-1] + sizes[:-1]) | (second[1:] != second[:-1] + sizes[:-1])
    starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return first[starts], second[starts], np.add.reduceat(sizes, starts)


def fragments_of(
    region: int,
    shape: Sequence[int],
    strides_bytes: Sequence[int],
    item_bytes: int,
    block_axis: int = 0,
    *,
    memory_order: bool = False,
) -> list[Fragment]:
    """One tensor's fragments of a block.

    Args:
        region: the tensor's number.
        shape: its axes.
        strides_bytes: from one index of each axis to the next, in bytes.
        item_bytes: size of an element.
        block_axis: which of the axes counts blocks.
        memory_order: store a block's elements as they lie in memory, the farthest axis first, instead of in the order
            of the axes: fewer and larger fragments for permuted tensors, and bytes that only an engine with the same
            strides understands.

    Raises ValueError for negative strides, no elements, or more fragments than FRAGMENTS_MAX.
    """
    if not shape or len(shape) != len(strides_bytes) or not -len(shape) <= block_axis < len(shape):
        raise ValueError(f"axis {block_axis} of a tensor of {len(shape)} axes")
    if min(shape) <= 0 or min(strides_bytes) < 0 or item_bytes <= 0:
        raise ValueError(f"a tensor of shape {tuple(shape)} and strides {tuple(strides_bytes)} holds no blocks")
    block_axis %= len(shape)
    axes = [(n, s) for i, (n, s) in enumerate(zip(shape, strides_bytes, strict=True)) if i != block_axis and n > 1]
    if memory_order:
        axes.sort(key=lambda axis: -axis[1])
    size = item_bytes
    while axes and axes[-1][1] == size:  # what lies side by side is one piece
        size *= axes.pop()[0]
    if math.prod(n for n, _ in axes) > FRAGMENTS_MAX:
        raise ValueError(f"over {FRAGMENTS_MAX} pieces a block: give its axes in the order of memory, or memory_order")
    offsets = [sum(place) for place in itertools.product(*(range(0, n * s, s) for n, s in axes if s))]
    if len(offsets) != math.prod(n for n, _ in axes):
        raise ValueError("an axis of stride 0 shows the same bytes again")
    return _merged([Fragment(region, offset, strides_bytes[block_axis], size) for offset in offsets])


def _merged(fragments: list[Fragment]) -> list[Fragment]:
    """Fragments that follow one another in memory as in the list are one."""
    merged = fragments[:1]
    for fragment in fragments[1:]:
        last = merged[-1]
        if fragment.offset == last.offset + last.size:
            merged[-1] = last._replace(size=last.size + fragment.size)
        else:
            merged.append(fragment)
    return merged


def _check(fragments: Sequence[Fragment], blocks: int, region_bytes: Sequence[int]) -> None:
    if not 0 < len(fragments) <= FRAGMENTS_MAX or not 0 < blocks <= BLOCKS_MAX:
        raise ValueError(f"{len(fragments)} fragments and {blocks} blocks: 1 to {FRAGMENTS_MAX}, 1 to {BLOCKS_MAX}")
    if not 0 < len(region_bytes) <= REGIONS_MAX or not all(0 < size <= SPAN_BYTES_MAX for size in region_bytes):
        raise ValueError(f"{len(region_bytes)} regions: 1 to {REGIONS_MAX}, each of 1 byte to {SPAN_BYTES_MAX}")
    for number, (region, offset, stride, size) in enumerate(fragments):
        if not 0 <= region < len(region_bytes) or offset < 0 or size <= 0 or not 0 <= stride <= SPAN_BYTES_MAX:
            raise ValueError(f"fragment {number} makes no sense: {fragments[number]}")
        if blocks > 1 and stride < size:  # blocks would lie over one another
            raise ValueError(f"fragment {number} makes no sense: {fragments[number]}")
        if offset + (blocks - 1) * stride + size > region_bytes[region]:
            end = offset + (blocks - 1) * stride + size
            raise ValueError(f"fragment {number} ends at byte {end} of a region of {region_bytes[region]}")
