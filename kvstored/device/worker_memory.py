"""What a device worker has open: segments of the tier, pinned at their first use, and engines' memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from kvstored_proto.frames import close_all
from kvstored_proto.layout import SPAN_BYTES_MAX, Addresses, Fragment, Layout

from kvstored.device import cuda_chunks
from kvstored.device.cuda import IPC_HANDLE_BYTES, REGISTER_BYTES_MAX, CudaError, Driver
from kvstored.device.cuda_chunks import Mapped
from kvstored.device.inherited import InheritedMapping
from kvstored.device.worker_messages import Region, Register

PROBE_BYTES_MAX = 4096


class Refused(Exception):
    """An engine's memory cannot be used; the text says why."""


class Segments:
    """Mappings of the DRAM tier's memory."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._mapped: dict[int, InheritedMapping] = {}
        self._pinned: set[int] = set()
        self.pinned_bytes = 0

    def add(self, segment_id: int, fd: int, size_bytes: int) -> None:
        """Map a segment, by huge pages where it has them; takes its descriptor. Raises DeviceError."""
        mapping = InheritedMapping(fd)
        assert mapping.size_bytes == size_bytes, "the daemon knows its segments"
        self._mapped[segment_id] = mapping

    def addresses(self, segments: Addresses, offsets: Addresses, size_bytes: int) -> tuple[Addresses, set[int]]:
        """Where blocks of a size lie here, and in which segments; pins what is not pinned yet.

        Raises CudaError, Refused.
        """
        found, named = offsets.copy(), set(segments.tolist())
        for segment_id in sorted(named):
            mapping = self._of(segment_id)
            of_it = segments == segment_id if len(named) > 1 else slice(None)
            if int(offsets[of_it].max()) + size_bytes > mapping.size_bytes:
                raise Refused(f"a block ends past its segment of {mapping.size_bytes} bytes")
            self.pin(segment_id)
            found[of_it] += np.uint64(mapping.address)
        return found, named

    def _of(self, segment_id: int) -> InheritedMapping:
        mapping = self._mapped.get(segment_id)
        if mapping is None:
            raise Refused(f"segment {segment_id} is not mapped here")
        return mapping

    def pin(self, segment_id: int) -> None:
        """Pin a segment, if it is not. Raises CudaError, Refused."""
        mapping = self._of(segment_id)
        if segment_id in self._pinned:
            return
        if mapping.size_bytes > REGISTER_BYTES_MAX:
            raise Refused(f"a segment of {mapping.size_bytes} bytes: {REGISTER_BYTES_MAX} can be registered")
        self._driver.pin(mapping.address, mapping.size_bytes)
        self._pinned.add(segment_id)
        self.pinned_bytes += mapping.size_bytes

    def drop(self, segment_id: int) -> None:
        """Unmap a segment, if there is one. No copy may use it."""
        found = self._mapped.pop(segment_id, None)
        if found is None:
            return
        if segment_id in self._pinned:
            self._driver.unpin(found.address)
            self._pinned.discard(segment_id)
            self.pinned_bytes -= found.size_bytes
        found.close()


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """An engine's registered memory, open here."""

    layout: Layout
    bases: list[int]
    handles: list[bytes]
    chunks: Mapped | None


class Engines:
    """Open memory of engines. An allocation that several regions are in is opened once."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._open: dict[bytes, list[int]] = {}  # handle -> pointer, users
        self._descriptors: dict[int, list[int]] = {}  # of chunks, by the registration that will name them

    def take(self, registration: int, descriptors: Sequence[int]) -> None:
        """Keep descriptors until the registration comes."""
        self._descriptors.setdefault(registration, []).extend(descriptors)

    def open(self, wanted: Register) -> EngineMemory:
        """Open, check and probe. Raises Refused or CudaError, and nothing is open then."""
        descriptors = self._descriptors.pop(wanted.registration, [])
        try:
            return self._opened(wanted, descriptors)
        finally:
            close_all(descriptors)

    def _opened(self, wanted: Register, descriptors: Sequence[int]) -> EngineMemory:
        try:
            layout = Layout(
                [Fragment(*each) for each in wanted.fragments],
                wanted.blocks,
                [region.size_bytes for region in wanted.regions],
            )
        except (ValueError, OverflowError) as error:
            raise Refused(str(error)) from None
        handles: list[bytes] = []
        chunks: Mapped | None = None
        try:
            if wanted.chunk_bytes:
                chunks = self._chunks(descriptors, wanted.chunk_bytes)
            bases = [self._base(region, handles, chunks) for region in wanted.regions]
        except (Refused, CudaError):
            self._let_go(handles, chunks)
            raise
        return EngineMemory(layout, bases, handles, chunks)

    def _chunks(self, descriptors: Sequence[int], sizes: Sequence[int]) -> Mapped:
        if len(descriptors) != len(sizes) or min(sizes) <= 0 or sum(sizes) > SPAN_BYTES_MAX:
            raise Refused(f"{len(descriptors)} descriptors came for {len(sizes)} chunks of {sum(sizes)} bytes")
        return cuda_chunks.imported(self._driver, descriptors, sizes)

    def _base(self, region: Region, handles: list[bytes], chunks: Mapped | None) -> int:
        """Where a region starts here. A handle that is opened for it is added to `handles`."""
        if region.handle or chunks is None:
            if len(region.handle) != IPC_HANDLE_BYTES:
                raise Refused(f"a handle of {len(region.handle)} bytes: one has {IPC_HANDLE_BYTES}")
            pointer = self._take(region.handle)
            handles.append(region.handle)
            base, size = self._driver.range_of(pointer)
        else:
            base, size = chunks
        if not 0 <= region.offset <= size or region.offset + region.size_bytes > size:
            raise Refused(f"bytes {region.offset} to {region.offset + region.size_bytes} of {size}")
        start, most = base + region.offset, min(PROBE_BYTES_MAX, region.size_bytes)
        if most:
            last = region.probe_end[-most:]
            self._probe(start, region.probe[:most])
            self._probe(start + region.size_bytes - max(1, len(last)), last)
        return start

    def _take(self, handle: bytes) -> int:
        found = self._open.get(handle)
        if found is None:
            found = self._open[handle] = [self._driver.open(handle), 0]
        found[1] += 1
        return found[0]

    def _probe(self, pointer: int, expected: bytes) -> None:
        """Read, in any case, and compare where it is known what stands there."""
        seen = ctypes.create_string_buffer(max(1, len(expected)))
        self._driver.read(ctypes.addressof(seen), pointer, len(seen))
        if expected and seen.raw != expected:
            raise Refused("the memory that opened is not the one that was meant: its bytes differ")

    def close(self, memory: EngineMemory) -> None:
        """Let go of it. No copy may use it. Raises CudaError."""
        self._let_go(memory.handles, memory.chunks)

    def _let_go(self, handles: list[bytes], chunks: Mapped | None) -> None:
        if chunks is not None:
            cuda_chunks.unmap(self._driver, chunks)
        for handle in handles:
            found = self._open[handle]
            found[1] -= 1
            if not found[1]:
                del self._open[handle]
                self._driver.close(found[0])
