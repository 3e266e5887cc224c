"""The DRAM tier's memory in device workers: given to them and pinned when it is first needed, or ahead of that."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from typing import Final

from kvstored.device import worker_messages as messages
from kvstored.tiers.dram import DramTier
from kvstored.tiers.gpu_worker import GpuWorker

LOOK_EVERY_S: Final = 5.0  # for segments that are new


def give(dram: DramTier, worker: GpuWorker, needed: Iterable[int]) -> None:
    """Let a worker have these segments. Raises OSError where descriptors are short."""
    for number in set(needed) - worker.sent_segments:
        fd = os.dup(dram.writable_fd(number))
        worker.sent_segments.add(number)
        worker.send(messages.Segment(number, dram.segment_bytes(number)), (fd,))


async def pin_ahead(dram: DramTier, worker: GpuWorker) -> None:
    """Have all segments pinned while the worker has nothing else to do, new ones too; ends with the worker.

    One after the other, so that a transfer that comes meanwhile waits for no more than that one.
    """
    asked: set[int] = set()
    while worker.alive:
        segments = {segment.segment_id for segment in dram.segments()}
        asked &= segments
        worker.pins_ahead_bytes = dram.capacity_bytes
        missing = segments - asked
        if not missing:
            await _gone_within(worker, LOOK_EVERY_S)
            continue
        number = min(missing)
        asked.add(number)
        try:
            give(dram, worker, [number])
        except OSError as failure:
            worker.why_not_pinned = f"memory of the tier cannot be given to the device worker: {failure.strerror}"
            return
        error = await worker.ask(messages.Pin(number), messages.Pinned, number)
        if error and worker.alive and dram.in_service(number):
            worker.why_not_pinned = error  # as it is of the others; transfers try again, each what it needs
            return


async def _gone_within(worker: GpuWorker, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await worker.gone.wait()
    except TimeoutError:
        pass
