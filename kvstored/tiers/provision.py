"""Making the memory of DRAM segments: how many, of which pages, locked or not, and what is missing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal

import msgspec

from kvstored.device import numa
from kvstored.device.memory import HUGE_PAGE_BYTES, Mapping, available_bytes, descriptors_max
from kvstored.errors import ConfigError
from kvstored.keys import SLOT_ALIGN_BYTES
from kvstored.segment_size import DRAM_SEGMENT_BYTES_MAX, check_segments, dram_segment_bytes
from kvstored.tiers.segment import INDEX_BITS, Segment
from kvstored.tiers.slots import SlotRecords

Wish = Literal["auto", "never", "require"]

assert DRAM_SEGMENT_BYTES_MAX == SLOT_ALIGN_BYTES << INDEX_BITS, "every place in a segment has a number"
DESCRIPTORS_OWN: Final = 64  # at least, beside those of segments: sockets, files of NVMe, some clients
_THREADS_MAX: Final = 4


class DramConfig(msgspec.Struct, frozen=True):
    """How much memory and of what kind.

    `segment_bytes` 0 takes the larger of 64 MiB and a 512th of the capacity. "require" makes
    it an error at start where the machine refuses; "auto" runs without and says so.
    """

    capacity_bytes: int
    segment_bytes: int = 0
    huge_pages: Wish = "auto"
    lock: Wish = "auto"
    places: dict[int, frozenset[int]] = {}  # memory nodes for segments, by turns, and their CPUs; none: anywhere


def segment_sizes(config: DramConfig, adopted_bytes: int = 0) -> list[int]:
    """Sizes of the segments to make: full ones, and a smaller last one for the rest of the capacity.

    `adopted_bytes` of it are there already. The capacity counts in whole 4 KiB. Raises ConfigError.
    """
    capacity_bytes = config.capacity_bytes // SLOT_ALIGN_BYTES * SLOT_ALIGN_BYTES
    if capacity_bytes <= 0:
        raise ConfigError(f"dram.capacity_bytes is {config.capacity_bytes}: it must be at least {SLOT_ALIGN_BYTES}")
    segment_bytes = _segment_bytes(config)
    try:
        check_segments(capacity_bytes - adopted_bytes, segment_bytes)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    full, rest = divmod(capacity_bytes - adopted_bytes, segment_bytes)
    return [segment_bytes] * full + [rest] * bool(rest)


def _segment_bytes(config: DramConfig) -> int:
    if config.segment_bytes % SLOT_ALIGN_BYTES or config.segment_bytes < 0:
        raise ConfigError(
            f"dram.segment_bytes is {config.segment_bytes}: it must be 0 (chosen for you) "
            f"or a multiple of {SLOT_ALIGN_BYTES} up to {DRAM_SEGMENT_BYTES_MAX}"
        )
    return config.segment_bytes or min(dram_segment_bytes(config.capacity_bytes), DRAM_SEGMENT_BYTES_MAX)


def check_descriptors(segments: int) -> None:
    """Raises ConfigError where the process may not open as many descriptors as so many segments need."""
    needed, allowed = 3 * segments + DESCRIPTORS_OWN, descriptors_max()
    if needed > allowed:
        raise ConfigError(
            f"dram: {segments} segments need {needed} descriptors, this process may have {allowed}: "
            "raise the limit (systemd: LimitNOFILE; shell: ulimit -n), or dram.segment_bytes for fewer segments"
        )


async def make_all(sizes: Sequence[int], config: DramConfig, first_id: int) -> list[Segment]:
    """Segments of these sizes, made in a few threads; raises ConfigError or DeviceError and keeps none then."""
    there = available_bytes()
    if sum(sizes) > there:
        # Checked first: populating what is not there ends in the kernel's out-of-memory killer.
        raise ConfigError(f"dram.capacity_bytes is {config.capacity_bytes}: this machine has {there} bytes available")
    loop = asyncio.get_running_loop()
    executor = ThreadPoolExecutor(min(_THREADS_MAX, len(os.sched_getaffinity(0))), "kvstored-populate")
    try:
        jobs = [loop.run_in_executor(executor, make, i, size, config) for i, size in enumerate(sizes, first_id)]
        results = await asyncio.gather(*jobs, return_exceptions=True)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
    made = [result for result in results if isinstance(result, Segment)]
    for result in results:
        if isinstance(result, BaseException):
            for segment in made:
                segment.close()
            raise result
    return made


def make(segment_id: int, size_bytes: int, config: DramConfig) -> Segment:
    """One segment, its memory populated; raises ConfigError or DeviceError."""
    mapping = Mapping(size_bytes, name="kvstored-dram", huge_pages=config.huge_pages != "never")
    try:
        with numa.near(config.places, segment_id):
            mapping.populate()
        if config.huge_pages == "require" and mapping.pages == "4k":
            raise ConfigError(_no_huge_pages("dram.require_huge_pages is true, but", size_bytes))
        locked = config.lock != "never" and mapping.lock()
        if config.lock == "require" and not locked:
            raise ConfigError(_not_locked("dram.require_lock is true, but"))
        return Segment(segment_id, mapping, SlotRecords(size_bytes, segment_id), locked=locked)
    except BaseException:
        mapping.close()
        raise


def check_locked(config: DramConfig, segments: Sequence[Segment]) -> None:
    """Raises ConfigError where memory that was taken over must be locked and is not."""
    if config.lock == "require" and not all(segment.locked for segment in segments):
        raise ConfigError(_not_locked("dram.require_lock is true, but"))


def renew(segment: Segment, segment_id: int, config: DramConfig) -> Segment:
    """A new segment in place of a retired one, zeroed; raises ConfigError or DeviceError.

    What a client may still have mapped is given back to the kernel and never used again; a
    client that touches its old mapping finds zeros.
    """
    mapping = segment.detach()
    if not segment.exposed:
        mapping.zero()
        return Segment(segment_id, mapping, SlotRecords(segment.size_bytes, segment_id), locked=segment.locked)
    mapping.punch()
    mapping.close()
    return make(segment_id, segment.size_bytes, config)


def shortcomings(config: DramConfig, segments: Sequence[Segment]) -> list[str]:
    """Warnings: what the configuration wanted and the machine refused, and what helps."""
    warnings = []
    plain_bytes = sum(s.size_bytes for s in segments if s.pages == "4k" and s.size_bytes % HUGE_PAGE_BYTES == 0)
    if config.huge_pages != "never" and plain_bytes:
        warnings.append(_no_huge_pages("dram:", plain_bytes))
    if config.lock != "never" and not all(s.locked for s in segments):
        warnings.append(_not_locked("dram:"))
    return warnings


def _no_huge_pages(prefix: str, size_bytes: int) -> str:
    return (
        f"{prefix} {size_bytes} bytes got 4 KiB pages: reserve huge pages (sysctl vm.nr_hugepages, 2 MiB each; "
        "dram.capacity_bytes a multiple of 2 MiB), allow transparent ones "
        "(echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled), or use Linux 6.1 or newer"
    )


def _not_locked(prefix: str) -> str:
    return f"{prefix} memory could not be locked: raise the limit (systemd: LimitMEMLOCK=infinity; shell: ulimit -l)"


def properties(segments: Sequence[Segment]) -> dict[str, str]:
    """What the tier is made of, for status."""
    locked = sum(segment.locked for segment in segments)
    return {
        "segments": str(len(segments)),
        "segment_bytes": str(max((segment.size_bytes for segment in segments), default=0)),
        "pages": "+".join(sorted({segment.pages for segment in segments})),
        "locked": "no" if not locked else "yes" if locked == len(segments) else "partly",
    }
