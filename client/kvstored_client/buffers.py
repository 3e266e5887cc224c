"""Callers' memory as addresses, and copying between it and the tier.

Buffers may be: a list with one bytes-like object (bytes, bytearray, memoryview, numpy array, CPU
torch tensor) per block, one contiguous such object for all blocks, `Addresses`, for engines that
know their memory by pointer only, or blocks of a `PagedKV`.
"""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

_memmove: Final = ctypes.memmove  # a foreign function: runs without the GIL
_from_buffer: Final = ctypes.c_ubyte.from_buffer
_addressof: Final = ctypes.addressof


class Addresses:
    """Blocks at raw addresses of this process. The caller keeps the memory alive and, to read into it, writable."""

    __slots__ = ("addresses", "sizes_bytes")

    def __init__(self, addresses: Sequence[int], sizes_bytes: Sequence[int] | int) -> None:
        """One address per block; one size for all, or one per block. Raises ValueError where they do not match."""
        sizes = [sizes_bytes] * len(addresses) if isinstance(sizes_bytes, int) else list(sizes_bytes)
        if len(sizes) != len(addresses):
            raise ValueError(f"{len(addresses)} addresses and {len(sizes)} sizes")
        if addresses and (min(addresses) <= 0 or min(sizes) <= 0):
            raise ValueError("addresses and sizes must be positive")
        self.addresses = list(addresses)
        self.sizes_bytes = sizes

    def __len__(self) -> int:
        return len(self.addresses)


class Place(Protocol):
    """Where a call's blocks lie in this process, and how they get there and away."""

    @property
    def sizes_bytes(self) -> Sequence[int]:
        """Size of each block."""

    def part(self, start: int, end: int) -> Place:
        """Those of blocks `start` to `end`."""

    def read(self, indices: Sequence[int], targets: Sequence[int]) -> None:
        """Copy these blocks, one after the other, to these addresses, one for each."""

    def write(self, first: int, count: int, source: int, stride: int) -> None:
        """Fill `count` blocks from `first` on from what lies at `source`, `stride` bytes from one to the next."""


class PlacedBlocks(abc.ABC):
    """A caller's blocks that know themselves where they lie (see `paged`)."""

    @abc.abstractmethod
    def place(self, count: int, *, writable: bool) -> Place:
        """The place of `count` blocks. Raises TypeError or ValueError."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many engine blocks there are."""


class Spans(NamedTuple):
    """Blocks that are one piece each. `keep` holds the buffers in place while the spans are in use."""

    addresses: Sequence[int]
    sizes_bytes: list[int]
    keep: object

    def part(self, start: int, end: int) -> Spans:
        """See `Place`."""
        return Spans(self.addresses[start:end], self.sizes_bytes[start:end], self.keep)

    def read(self, indices: Sequence[int], targets: Sequence[int]) -> None:
        """See `Place`."""
        pairs = zip(targets, indices, strict=True)
        copy_runs(merge((target, self.addresses[i], self.sizes_bytes[i]) for target, i in pairs))

    def write(self, first: int, count: int, source: int, stride: int) -> None:
        """See `Place`."""
        targets = enumerate(self.addresses[first : first + count])
        copy_runs(merge((t, source + i * stride, self.sizes_bytes[first + i]) for i, t in targets))


# One memmove: target, source, size in bytes. A plain tuple, since there may be one per block.
Run = tuple[int, int, int]


class _PyBuffer(ctypes.Structure):
    """Python's `Py_buffer`, to learn the address of memory that is read-only."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer: Final = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer: Final = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)


def place_of(buffers: Any, count: int, block_bytes: int = 0, *, writable: bool) -> Place:
    """Where the `count` blocks of a call are; arguments and errors as of `spans_of`."""
    if isinstance(buffers, PlacedBlocks):
        return buffers.place(count, writable=writable)
    return spans_of(buffers, count, block_bytes, writable=writable)


def spans_of(buffers: Any, count: int, block_bytes: int = 0, *, writable: bool) -> Spans:
    """The spans of `count` blocks.

    Args:
        buffers: see the module's docstring.
        count: how many blocks there are.
        block_bytes: size of a block in one contiguous buffer; 0: its size divided by `count`.
        writable: whether the blocks are to be written.

    Raises TypeError for what is not memory (or read-only, or on a device), ValueError where
    numbers or sizes do not match.
    """
    if isinstance(buffers, Addresses):
        _check_count(len(buffers), count)
        return Spans(buffers.addresses, buffers.sizes_bytes, buffers)
    if not isinstance(buffers, (list, tuple)):
        return _cut(buffers, count, block_bytes, writable)
    _check_count(len(buffers), count)
    located = [_locate(buffer, writable) for buffer in buffers]
    if located and min(size for _, size, _ in located) == 0:
        raise ValueError("an empty buffer: every block has at least one byte")
    return Spans([a for a, _, _ in located], [s for _, s, _ in located], [k for _, _, k in located])


def _check_count(buffers: int, count: int) -> None:
    if buffers != count:
        raise ValueError(f"{buffers} buffers for {count} blocks")


def _cut(buffer: Any, count: int, block_bytes: int, writable: bool) -> Spans:
    """One contiguous buffer, cut into blocks."""
    address, size, keep = _locate(buffer, writable)
    each = block_bytes or (size // count if count else 0)
    if each <= 0 or each * count > size or (not block_bytes and each * count != size):
        raise ValueError(f"a buffer of {size} bytes does not hold {count} blocks of {block_bytes or 'equal'} bytes")
    return Spans(range(address, address + each * count, each), [each] * count, keep)


def _locate(buffer: Any, writable: bool) -> tuple[int, int, object]:
    """Address, size in bytes, and what keeps both true."""
    if hasattr(buffer, "data_ptr"):
        return _locate_tensor(buffer)
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("a buffer is not contiguous")
    if not view.nbytes:
        return 0, 0, view
    if not view.readonly:
        held = _from_buffer(view)
        return _addressof(held), view.nbytes, held
    if writable:
        raise TypeError("a buffer to read into is read-only")
    return _read_only_address(view), view.nbytes, view


def _locate_tensor(tensor: Any) -> tuple[int, int, object]:
    if tensor.device.type != "cpu":
        raise TypeError(f"a tensor on {tensor.device}: copy it to the CPU first")
    if not tensor.is_contiguous():
        raise ValueError("a tensor is not contiguous")
    return tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor


def _read_only_address(view: memoryview) -> int:
    described = _PyBuffer()
    _get_buffer(view, described, 0)
    address = int(described.buf or 0)
    _release_buffer(described)  # `view` itself keeps the memory where it is
    return address


def merge(runs: Iterable[Run]) -> list[Run]:
    """Join neighbours: a run that continues the one before it in both places becomes part of it."""
    merged: list[Run] = []
    start_target = start_source = length = 0
    for target, source, size in runs:
        if target == start_target + length and source == start_source + length:
            length += size
            continue
        if length:
            merged.append((start_target, start_source, length))
        start_target, start_source, length = target, source, size
    if length:
        merged.append((start_target, start_source, length))
    return merged


def copy_runs(runs: Iterable[Run]) -> None:
    """Copy, one memmove per run, without the GIL."""
    for target, source, size in runs:
        _memmove(target, source, size)
