"""GPUs: the engines' memory that is registered with their workers, and copies from it and to it.

The daemon keeps what each registration consists of, so a worker that ended is replaced and told
again when the next transfer comes; sessions notice nothing but the transfers that it took along.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from array import array
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from kvstored_proto import frames

from kvstored.device import worker_messages as messages
from kvstored.errors import InvalidArgument
from kvstored.tiers import gpu_segments
from kvstored.tiers.dram import DramTier
from kvstored.tiers.gpu_devices import GpuDevices
from kvstored.tiers.gpu_worker import GpuWorker
from kvstored.tiers.segment import INDEX_BITS, INDEX_MASK
from kvstored.tiers.stop import Stop

Runs = Sequence[tuple[int, int]]


class Registration(msgspec.Struct, eq=False):
    """An engine's memory."""

    number: int
    uuid: bytes
    regions: list[messages.Region]
    fragments: list[tuple[int, int, int, int]]
    blocks: int
    block_bytes: int
    chunk_bytes: list[int]  # of memory by chunks, and their descriptors, which are kept for the next worker
    chunk_fds: list[int]
    owner: int = 0  # the same number for all of one session
    cuts: list[int] = []  # of the fragments: layer i has those from cuts[i] to cuts[i + 1]
    ended: bool = False
    transfers: int = 0  # under way

    def check_layers(self, first: int, count: int) -> None:
        """Raises InvalidArgument for layers that it does not have."""
        if not 0 <= first < len(self.cuts) - 1 or first + count > len(self.cuts) - 1:
            raise InvalidArgument(f"layers {first} to {first + count}: the memory has {len(self.cuts) - 1}")


class How(msgspec.Struct, frozen=True):
    """Of a transfer: its direction, which layers, and who is told what is copied (see `messages.Transfer`)."""

    to_device: bool
    cuts: list[int] = []
    tells: int = messages.TELLS_NOTHING
    copied: Callable[[int], None] | None = None
    stop: Stop | None = None


class Gpus:
    """All GPUs of the node."""

    def __init__(
        self,
        dram: DramTier,
        *,
        silence_max_s: float,
        drain_max_s: float,
        note: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """`note` writes down the workers that live, for the daemon after this one; raises OSError, KVStoredError."""
        self._dram = dram
        self._drain_max_s = drain_max_s
        self.devices = GpuDevices(silence_max_s, note)
        self._registrations: dict[int, Registration] = {}
        self._last_number = 0
        self.bytes_loaded = self.bytes_stored = self.failed_transfers = self.refused = 0

    # ---- registrations ----

    async def register(
        self,
        uuid: bytes,
        regions: list[messages.Region],
        fragments: list[tuple[int, int, int, int]],
        blocks: int,
        chunk_bytes: list[int],
        chunk_fds: list[int],
    ) -> tuple[Registration | None, str]:
        """Open an engine's memory on its GPU; or None, and why not. The descriptors stay the caller's, open until
        it is unregistered."""
        self._last_number += 1
        block_bytes = sum(size for _, _, _, size in fragments)
        made = Registration(self._last_number, uuid, regions, fragments, blocks, block_bytes, chunk_bytes, chunk_fds)
        worker, error = await self.devices.worker(uuid)
        if worker is not None:
            error = await self._open(worker, made)
        if error:
            self.refused += 1
            return None, error
        # For a worker after this one: the engine may have written to its memory by then.
        made.regions = [messages.Region(each.handle, each.offset, each.size_bytes) for each in regions]
        self._registrations[made.number] = made
        return made, ""

    async def _open(self, worker: GpuWorker, made: Registration) -> str:
        if not worker.owes(messages.Registered, made.number):  # else another transfer has given them
            try:
                fds = _duplicates(made.chunk_fds)
            except OSError as error:
                return f"the descriptors of the memory's chunks: {error.strerror}"
            for start in range(0, len(fds), frames.MAX_FDS_PER_FRAME):
                worker.send(messages.Chunks(made.number), tuple(fds[start : start + frames.MAX_FDS_PER_FRAME]))
        wanted = messages.Register(made.number, made.regions, made.fragments, made.blocks, made.chunk_bytes)
        return await worker.ask(wanted, messages.Registered, made.number)

    async def unregister(self, registration: Registration) -> None:
        """Let go of an engine's memory: when this returns nothing here touches or holds it, if need be by force."""
        registration.ended = True
        if self._registrations.pop(registration.number, None) is None:
            return
        worker, number = self.devices.known(registration.uuid), registration.number
        # A worker that is being told of it opens it, and then hears of this.
        if worker is None or not (number in worker.registered or worker.owes(messages.Registered, number)):
            return
        asking = asyncio.ensure_future(worker.ask(messages.Unregister(number), messages.Unregistered, number))
        done, _ = await asyncio.wait([asking], timeout=self._drain_max_s)
        if not done:
            worker.kill(f"memory was not let go of within {self._drain_max_s:g} s")
            await asking

    # ---- transfers ----

    async def transfer(self, registration: Registration, ids: bytes, runs: Runs, how: How) -> str:
        """Copy between slots and an engine's blocks; the error, or "". When it returns nothing of it runs any more.

        `ids`: 32-bit numbers, as many for each slot. `runs`: first slot and number of those side by side. The caller
        must hold the slots, and wait.
        """
        registration.transfers += 1
        try:
            error = await self._transfer(registration, ids, runs, how)
        finally:
            registration.transfers -= 1
        if error:
            self.failed_transfers += 1
        elif how.to_device:
            self.bytes_loaded += len(ids) // 4 * registration.block_bytes
        else:
            self.bytes_stored += len(ids) // 4 * registration.block_bytes
        return error

    async def _transfer(self, registration: Registration, ids: bytes, runs: Runs, how: How) -> str:
        worker, error = await self.devices.worker(registration.uuid)
        if worker is None:
            return error
        if registration.number not in worker.registered and not registration.ended:
            error = await self._open(worker, registration)  # a fresh worker
            if error:
                return error
            if registration.ended:  # meanwhile, and nobody else knows that it is open
                await worker.ask(messages.Unregister(registration.number), messages.Unregistered, registration.number)
        if registration.ended:
            return "the memory is not registered any more"
        segments, offsets = array("Q"), array("Q")
        for first, count in runs:
            stride = self._dram.class_of(first)
            start = (first & INDEX_MASK) * stride
            segments.extend(itertools.repeat(first >> INDEX_BITS, count))
            offsets.extend(range(start, start + count * stride, stride))
        try:
            gpu_segments.give(self._dram, worker, {first >> INDEX_BITS for first, _ in runs})
        except OSError as failure:  # descriptors are short
            return f"memory of the tier cannot be given to the device worker: {failure.strerror}"
        self._last_number += 1
        request = messages.Transfer(
            self._last_number,
            registration.number,
            how.to_device,
            ids,
            segments.tobytes(),
            offsets.tobytes(),
            registration.owner,
            how.cuts,
            how.tells,
        )
        error = await worker.ask(request, messages.Done, request.transfer, how.copied, how.stop)
        worker.transfers += not error
        return error

    async def drop_segment(self, segment_id: int) -> None:
        """Nothing uses the segment any more: when this returns no worker has it mapped."""
        for worker in self.devices.workers():
            if segment_id in worker.sent_segments:
                await worker.ask(messages.DropSegment(segment_id), messages.Dropped, segment_id)

    # ---- the daemon's own ----

    def keep(self, uuids: Sequence[bytes]) -> None:
        """Start workers now, and again whenever one has ended, and have the tier's memory pinned (see `GpuDevices`)."""
        self.devices.keep(uuids, partial(gpu_segments.pin_ahead, self._dram))

    def status(self) -> dict[str, str]:
        """What there is, in words."""
        return {"registrations": str(len(self._registrations)), **self.devices.status()}

    @property
    def registrations(self) -> int:
        """How many are open."""
        return len(self._registrations)

    def counters(self) -> dict[str, int]:
        """Since the start."""
        return {
            "gpu_bytes_loaded": self.bytes_loaded,
            "gpu_bytes_stored": self.bytes_stored,
            "gpu_failed_transfers": self.failed_transfers,
            "gpu_refused_registrations": self.refused,
            "gpu_worker_starts": self.devices.starts,
        }

    async def close(self) -> None:
        """End the workers; when this returns nothing of them touches memory."""
        await self.devices.close()


def _duplicates(fds: Sequence[int]) -> list[int]:
    """Of all, or of none. Raises OSError."""
    made: list[int] = []
    try:
        for fd in fds:
            made.append(os.dup(fd))  # noqa: PERF401 - what there is when it raises is closed
    except OSError:
        frames.close_all(made)
        raise
    return made
