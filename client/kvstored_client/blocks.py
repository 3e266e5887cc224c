"""Leased blocks: read where they lie in the daemon's memory.

What `blocks[i]`, `numpy` and `torch` give is a window on shared memory, valid inside the `with`
block only. At its end memoryviews are released, so that a later use raises ValueError. A numpy
array or tensor cannot be taken back: afterwards it may show other blocks of the same tenant.
Copy what must stay.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored_client import buffers as memory
from kvstored_client.connection import Connection
from kvstored_client.errors import FAILURES, Unavailable
from kvstored_client.holds import Hold
from kvstored_client.mapping import Mapping, Segments
from kvstored_client.results import Outcome, outcome
from kvstored_client.slots import SlotRun, Slots

_NO_SLOTS = Slots(b"", b"")


def deliver(slots: Slots, mappings: dict[int, Mapping], place: memory.Place) -> None:
    """Copy blocks to the leading places. Raises as `copy_plan` does."""
    if isinstance(place, memory.Spans):
        memory.copy_runs(copy_plan(slots, mappings, place))
        return
    _check_sizes(slots, place.sizes_bytes)
    for run in slots.runs:
        place.write(run.first, run.length, _source(run, mappings), run.stride)


def copy_plan(slots: Slots, mappings: dict[int, Mapping], targets: memory.Spans) -> list[memory.Run]:
    """The memmoves that bring blocks to the leading targets.

    Raises ValueError where buffers are too few or of another size, Unavailable where a block is
    outside of its segment.
    """
    _check_sizes(slots, targets.sizes_bytes)
    step = targets.addresses.step if isinstance(targets.addresses, range) else 0
    runs: list[memory.Run] = []
    for run in slots.runs:
        source, size, length = _source(run, mappings), run.size_bytes, run.length
        if size == run.stride == step:
            runs.append((targets.addresses[run.first], source, size * length))
        else:
            places = targets.addresses[run.first : run.first + length]
            runs += [(target, source + i * run.stride, size) for i, target in enumerate(places)]
    return memory.merge(runs)


def _source(run: SlotRun, mappings: dict[int, Mapping]) -> int:
    """Address of a run's first block. Raises Unavailable where it is not inside of its segment."""
    mapping = mappings[run.segment_id]
    if run.offset + (run.length - 1) * run.stride + run.size_bytes > mapping.size_bytes:
        raise Unavailable(f"{run.length} blocks at {run.offset} of a segment of {mapping.size_bytes} bytes")
    return mapping.address + run.offset


def _check_sizes(slots: Slots, targets: Sequence[int]) -> None:
    count = len(slots)
    if len(targets) < count:
        raise ValueError(f"{len(targets)} buffers for {count} blocks")
    if len(targets) == count and targets.count(slots.uniform_bytes) == count:
        return
    blocks = slots.sizes_bytes
    if blocks != tuple(targets[:count]):
        index = next(i for i, size in enumerate(blocks) if size != targets[i])
        raise ValueError(f"block {index} has {blocks[index]} bytes, its buffer {targets[index]}")


def map_segments(segments: Segments, slots: Slots) -> dict[int, Mapping]:
    """The mappings behind `slots`; made now where this is their first use. Raises Unavailable."""
    return {segment_id: segments.get(segment_id) for segment_id in slots.segment_ids}


class Shard:
    """The blocks of one namespace under one lease."""

    def __init__(self, lease: pb.Lease, slots: Slots, mappings: dict[int, Mapping]) -> None:
        self.lease_id = lease.lease_id
        self._slots = slots
        self._mappings = mappings
        self._views: list[memoryview] = []

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: int) -> memoryview:
        """Block `index` as a read-only memoryview."""
        segment, offset, size = self._slots.place(index)
        view = self._mappings[segment].view(offset, size)
        self._views.append(view)
        return view

    def __iter__(self) -> Iterator[memoryview]:
        return (self[i] for i in range(len(self)))

    @property
    def content_hashes(self) -> list[bytes]:
        """xxh3-128 of each block's bytes, taken by the daemon when it was put."""
        return self._slots.content_hashes

    @property
    def sizes_bytes(self) -> list[int]:
        """Size of each block."""
        return list(self._slots.sizes_bytes)

    def numpy(self, index: int, dtype: Any, shape: Sequence[int]) -> Any:
        """Block `index` as a read-only array, without a copy. Raises ValueError where the shape does not fit."""
        import numpy as np

        return np.frombuffer(self[index], dtype).reshape(shape)

    def torch(self, index: int, dtype: Any, shape: Sequence[int]) -> Any:
        """Block `index` as a CPU tensor, without a copy; `dtype` is torch's or its name.

        The memory is read-only although torch cannot know it: an in-place operation on this
        tensor kills the process. Raises ValueError or RuntimeError where the shape does not fit.
        """
        import torch

        segment, offset, size = self._slots.place(index)
        part = (ctypes.c_ubyte * size).from_buffer(self._mappings[segment].array, offset)
        kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return torch.frombuffer(part, dtype=kind).reshape(tuple(shape))

    def deliver(self, place: memory.Place) -> None:
        """Copy the blocks to the leading places."""
        deliver(self._slots, self._mappings, place)

    def release(self) -> None:
        """Take back the memoryviews and let go of the mappings."""
        for view in self._views:
            try:
                view.release()
            except BufferError:  # exported by something that outlives us: valid memory until it goes
                pass
        self._views.clear()
        self._slots = _NO_SLOTS
        self._mappings = {}


class Blocks:
    """The leading blocks of a prefix, held until the `with` block ends.

    For one namespace it behaves as its shard: `len`, indexing, `numpy`, `torch`, `copy_into`. For
    several, `shards` has one per namespace, all of the same length.
    """

    def __init__(self, connection: Connection | None, shards: list[Shard], ended_by: Outcome) -> None:
        self.outcome = ended_by  # what ended the run; HIT: nothing, all are held
        self.shards = shards
        self._count = len(shards[0]) if shards else 0
        self._hold: Hold | None = None
        self._release = None
        if connection is not None and shards:
            self._hold = Hold(connection, [s.lease_id for s in shards])
            self._release = weakref.finalize(self, self._hold.release)
            self._release.atexit = False  # the end of the process is the end of the session

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> memoryview:
        return self._only[index]

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self._only) if self.shards else iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    @property
    def _only(self) -> Shard:
        if len(self.shards) != 1:
            raise IndexError("no block is held" if not self.shards else "several namespaces: use blocks.shards")
        return self.shards[0]

    @property
    def lease_id(self) -> int:
        """The daemon's number for this hold; 0 where nothing is held."""
        return self.shards[0].lease_id if self.shards else 0

    @property
    def content_hashes(self) -> list[bytes]:
        """See `Shard.content_hashes`."""
        return self._only.content_hashes if self.shards else []

    @property
    def sizes_bytes(self) -> list[int]:
        """Size of each block."""
        return self._only.sizes_bytes if self.shards else []

    def numpy(self, index: int, dtype: Any, shape: Sequence[int]) -> Any:
        """See `Shard.numpy`."""
        return self._only.numpy(index, dtype, shape)

    def torch(self, index: int, dtype: Any, shape: Sequence[int]) -> Any:
        """See `Shard.torch`."""
        return self._only.torch(index, dtype, shape)

    def valid(self) -> bool:
        """Whether the blocks are still held. Ask after reading: a yes says that what was read is right.

        While the daemon restarts it is no, and yes again when the client is connected and the daemon kept them.
        """
        return self._release is not None and self._release.alive and self._held()

    def copy_into(self, buffers: Any, block_bytes: int = 0) -> int:
        """Copy the blocks of the one namespace into the caller's buffers (see `buffers`), of which there may be more.

        Returns how many leading blocks were delivered: all, or 0 where the hold ended meanwhile or a GPU did not copy.
        Raises ValueError or TypeError for buffers that do not fit. Blocks while it copies.
        """
        if not self.shards:
            return 0
        several = isinstance(buffers, (list, tuple, memory.Addresses))
        count = len(buffers) if several else self._count  # of a paged memory: one block or more each
        place = memory.place_of(buffers, count, block_bytes or self.sizes_bytes[0], writable=True)
        try:
            self._only.deliver(place)
        except FAILURES:
            return 0
        return self._count if self.valid() else 0

    def release(self) -> None:
        """End the hold now; views of it become invalid. Safe to call twice."""
        for shard in self.shards:
            shard.release()
        self.shards = []
        if self._release is not None:
            self._release()

    def hand_over(self) -> list[int]:
        """Keep the hold for another session of the same group (`Client.attach`), which must release it.

        Returns the lease ids, one per namespace. The blocks cannot be used here any more.
        """
        lease_ids = [shard.lease_id for shard in self.shards]
        if self._release is not None and self._release.detach() and self._hold is not None:
            self._hold.forget()
        self.release()
        return lease_ids

    def _held(self) -> bool:
        return self._hold is not None and self._hold.connection.alive()


def blocks_of(connection: Connection, reply: pb.GetReply, slots: list[Slots]) -> Blocks:
    """What a reply holds. Maps segments where this is their first use; raises Unavailable."""
    shards = [
        Shard(lease, each, map_segments(connection.segments, each))
        for lease, each in zip(reply.leases, slots, strict=True)
    ]
    return Blocks(connection, shards, outcome(reply.next))
