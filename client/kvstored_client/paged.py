"""An engine's paged KV memory: from its tensors to places that blocks are copied to and from. Needs numpy.

    kv = PagedKV([layer.kv_cache for layer in layers], block_axis=1)
    client.get_into(namespace, hashes, kv.at(block_ids))
    client.put(namespace, hashes, kv.at(block_ids))

What is stored of a block, and in which order, is said in `kvstored_proto.layout`. Tensors are
looked at through `__cuda_array_interface__`, `data_ptr` (torch) or `__array_interface__` (numpy):
nothing is imported for them, pickled or shared by their own library.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from kvstored_proto.layout import Fragment, Indices, Layout, fragments_of

from kvstored_client import buffers as memory
from kvstored_client.cuda_driver import CudaFailed
from kvstored_client.uses import UsedPlace, Uses

if TYPE_CHECKING:
    from kvstored_client.device_copies import DeviceCopier

CPU: Final = "cpu"
MEMMOVE_BYTES: Final = 8 << 10  # from this size on a call a piece costs less than a second copy


@dataclass(frozen=True, slots=True)
class Tensor:
    """What is known of one tensor: where it is and how its elements lie."""

    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    item_bytes: int
    device: str  # cpu, or cuda
    writable: bool
    keep: object

    @property
    def span_bytes(self) -> int:
        """From its first byte to its last."""
        return sum((n - 1) * s for n, s in zip(self.shape, self.strides_bytes, strict=True)) + self.item_bytes


def tensor_of(thing: Any) -> Tensor:
    """Look at a tensor or array. Raises TypeError for what is none."""
    if hasattr(thing, "data_ptr"):  # torch; before the interface, which it refuses for some types
        item = int(thing.element_size())
        strides = tuple(int(stride) * item for stride in thing.stride())
        return Tensor(int(thing.data_ptr()), tuple(thing.shape), strides, item, str(thing.device.type), True, thing)
    for name, device in (("__cuda_array_interface__", "cuda"), ("__array_interface__", CPU)):
        interface = getattr(thing, name, None)
        if interface is not None:
            address, read_only = interface["data"]
            item, shape = np.dtype(interface["typestr"]).itemsize, tuple(interface["shape"])
            strides = interface.get("strides") or _packed_strides(shape, item)
            return Tensor(int(address), shape, tuple(strides), item, device, not read_only, thing)
    raise TypeError(f"a {type(thing).__name__} is no tensor: it has no address, shape and strides")


def _packed_strides(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    strides = [item_bytes]
    for length in reversed(shape[1:]):
        strides.insert(0, strides[0] * length)
    return tuple(strides[: len(shape)])


class PagedKV:
    """The tensors that hold an engine's KV blocks. Keeps them alive, and never copies them."""

    def __init__(
        self,
        tensors: Sequence[Any] | Any,
        block_axis: int | Sequence[int] = 0,
        *,
        memory_order: bool = False,
        tensors_per_layer: int = 1,
    ) -> None:
        """Look at the tensors; all have the same number of blocks.

        Args:
            tensors: one per layer, or one for all; their order is part of what is stored.
            block_axis: which of a tensor's axes counts blocks; one for all, or one each.
            memory_order: store blocks as they lie in memory, not in the order of the axes (see `layout`).
            tensors_per_layer: how many tensors, one after the other, are one layer of loads by layers. One tensor for
                all layers is one layer: give a view of it per layer instead, which is stored alike.

        Raises TypeError for what is no tensor, ValueError for tensors that hold no blocks or not the same number.
        """
        listed = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        if not listed:
            raise ValueError("no tensor given")
        self.tensors = [tensor_of(each) for each in listed]
        axes = [block_axis] * len(listed) if isinstance(block_axis, int) else list(block_axis)
        if len(axes) != len(listed):
            raise ValueError(f"{len(axes)} block axes for {len(listed)} tensors")
        if len({tensor.device for tensor in self.tensors}) != 1:
            raise ValueError("the tensors are on different devices")
        if tensors_per_layer < 1 or len(listed) % tensors_per_layer:
            raise ValueError(f"{len(listed)} tensors, {tensors_per_layer} for each layer")
        fragments: list[Fragment] = []
        ends = []  # of each tensor's fragments
        for number, (tensor, axis) in enumerate(zip(self.tensors, axes, strict=True)):
            fragments += fragments_of(
                number, tensor.shape, tensor.strides_bytes, tensor.item_bytes, axis, memory_order=memory_order
            )
            ends.append(len(fragments))
        self._cuts = [0, *ends[tensors_per_layer - 1 :: tensors_per_layer]]
        counts = {tensor.shape[axis] for tensor, axis in zip(self.tensors, axes, strict=True)}
        if len(counts) != 1:
            raise ValueError(f"the tensors have {sorted(counts)} blocks: they must have the same number")
        self.layout = Layout(fragments, counts.pop(), [tensor.span_bytes for tensor in self.tensors])
        self._uses: Uses | None = None

    def used(self, uses: Uses) -> PagedKV:
        """The same memory, whose copies are counted in `uses`."""
        same = copy.copy(self)
        same._uses = uses
        return same

    @property
    def device(self) -> str:
        """Where the tensors are: cpu or cuda."""
        return self.tensors[0].device

    @property
    def block_bytes(self) -> int:
        """Size of a stored block of one engine block."""
        return self.layout.block_bytes

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return len(self._cuts) - 1

    @property
    def layer_fragments(self) -> list[int]:
        """How many of the layout's fragments each layer has."""
        return [end - start for start, end in pairwise(self._cuts)]

    def check_layers(self, layers: tuple[int, int] | None) -> tuple[int, int]:
        """A range of layers, `None` for all. Raises ValueError for one that it does not have."""
        first, end = layers or (0, self.layers)
        if not 0 <= first < end <= self.layers:
            raise ValueError(f"layers {first} to {end}: there are {self.layers}")
        return first, end

    def at(self, block_ids: Any, layers: tuple[int, int] | None = None) -> PagedBlocks:
        """Some of its blocks, as a verb's `buffers`: as many for each hash, in the order of the hashes.

        `block_ids`: a sequence of integers, or an integer array. `layers`: only those from the first on and before the
        second, to be read into. Raises ValueError for layers that there are not.
        """
        first, end = self.check_layers(layers)
        return PagedBlocks(self, block_ids, slice(self._cuts[first], self._cuts[end]))

    def place_of_layers(self, ids: Indices, layers: tuple[int, int]) -> memory.Place:
        """Of stored blocks what these layers have of them, at its place in each. Raises CudaFailed."""
        return self.place_of(ids, slice(self._cuts[layers[0]], self._cuts[layers[1]]))

    def place_of(self, ids: Indices, part: slice) -> memory.Place:
        """Some of the fragments of stored blocks. Raises CudaFailed where they are on a GPU that is out of reach."""
        place = self._place_of(ids, part)
        return place if self._uses is None else UsedPlace(place, self._uses)

    def _place_of(self, ids: Indices, part: slice) -> memory.Place:
        if self.device == CPU:
            return PagedPlace(self, ids, part)
        from kvstored_client.device_copies import DevicePlace

        return DevicePlace(self.copier, self.layout, [tensor.address for tensor in self.tensors], ids, part)

    @cached_property
    def copier(self) -> DeviceCopier:
        """What copies memory of a GPU from here. Raises `cuda_driver.CudaFailed` where there is no driver."""
        from kvstored_client.device_copies import DeviceCopier

        return DeviceCopier([tensor.address for tensor in self.tensors])

    @cached_property
    def rows(self) -> list[npt.NDArray[np.void]]:
        """For each fragment an array whose element b is that of block b. Only for memory of the CPU."""
        made = []
        for region, offset, stride, size in self.layout.fragments:
            tensor = self.tensors[region]
            made.append(rows_at(tensor.address + offset, self.layout.blocks, stride, size))
        return made


class PagedBlocks(memory.PlacedBlocks):
    """Blocks of a paged KV memory, as `get_into`, `put` and `Blocks.copy_into` take them."""

    def __init__(self, kv: PagedKV, block_ids: Any, part: slice) -> None:
        self.kv = kv
        self._part = part  # of the fragments
        self.block_ids = np.asarray(block_ids)

    def __len__(self) -> int:
        return int(self.block_ids.size)

    def place(self, count: int, *, writable: bool) -> memory.Place:
        """The place of `count` stored blocks. Raises TypeError or ValueError."""
        if writable and not all(tensor.writable for tensor in self.kv.tensors):
            raise TypeError("a tensor to read into is read-only")
        if not writable and self._part != slice(0, len(self.kv.layout.fragments)):
            raise ValueError("blocks are stored whole, not some of their layers")
        ids = self.kv.layout.check_ids(self.block_ids, count)
        try:
            return self.kv.place_of(ids, self._part)
        except CudaFailed as error:
            raise TypeError(f"the tensors are on {self.kv.device}, and only the CPU's can be copied: {error}") from None


class PagedPlace:
    """See `buffers.Place`: stored blocks in an engine's memory, of one engine block or several each.

    One numpy assignment a fragment moves it for all blocks, mostly without the GIL.
    """

    def __init__(self, kv: PagedKV, ids: Indices, part: slice) -> None:
        self._kv = kv
        self._ids = ids
        self._part = part
        self.sizes_bytes: Sequence[int] = [kv.block_bytes * ids.shape[1]] * ids.shape[0]

    def part(self, start: int, end: int) -> PagedPlace:
        """See `Place`."""
        return PagedPlace(self._kv, self._ids[start:end], self._part)

    def read(self, indices: Sequence[int], targets: Sequence[int]) -> None:
        """See `Place`."""
        first = 0
        while first < len(targets):  # what is equally far apart is one piece of work
            end, stride = _evenly(targets, first)
            self._move(self._ids[list(indices[first:end])], targets[first], stride, to_engine=False)
            first = end

    def write(self, first: int, count: int, source: int, stride: int) -> None:
        """See `Place`."""
        self._move(self._ids[first : first + count], source, stride, to_engine=True)

    def _move(self, ids: Indices, address: int, stride: int, *, to_engine: bool) -> None:
        count, each = ids.shape
        layout, part = self._kv.layout, self._part
        rows, places, sizes = self._kv.rows[part], layout.within[part].tolist(), layout.sizes[part].tolist()
        for number in range(each):
            chosen = _as_slice(ids[:, number])
            start = address + number * layout.block_bytes
            for row, within, size in zip(rows, places, sizes, strict=True):
                if not to_engine and size >= MEMMOVE_BYTES and not isinstance(chosen, slice):
                    _gather(row, chosen, start + within, stride, size)
                    continue
                stored = rows_at(start + within, count, stride, size)
                if to_engine:
                    row[chosen] = stored
                else:
                    stored[:] = row[chosen]


def _gather(row: npt.NDArray[np.void], ids: Indices, target: int, stride: int, size: int) -> None:
    """Pieces by one memmove each: numpy would take them out into memory of its own first."""
    sources = row.ctypes.data + ids * row.strides[0]
    memory.copy_runs((target + i * stride, source, size) for i, source in enumerate(sources.tolist()))


def _evenly(targets: Sequence[int], first: int) -> tuple[int, int]:
    """End of the stretch of addresses from `first` on that are equally far apart, and how far."""
    if first + 1 == len(targets):
        return first + 1, 0
    stride = targets[first + 1] - targets[first]
    if stride <= 0:
        return first + 1, 0
    end = first + 2
    while end < len(targets) and targets[end] - targets[end - 1] == stride:
        end += 1
    return end, stride


def _as_slice(ids: Indices) -> Any:
    """Consecutive ids as a slice: then nothing is looked up."""
    first, count = int(ids[0]), len(ids)
    return slice(first, first + count) if int(ids[-1]) - first == count - 1 and bool((np.diff(ids) == 1).all()) else ids


def rows_at(address: int, count: int, stride: int, size: int) -> npt.NDArray[np.void]:
    """`count` pieces of `size` bytes, `stride` bytes apart, as an array with one element each."""
    span = (count - 1) * stride + size
    held: Any = (ctypes.c_ubyte * span).from_address(address)
    return np.ndarray((count,), np.dtype((np.void, size)), held, 0, (stride,))
