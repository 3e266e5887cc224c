"""The pieces in which memory changes hands."""

from __future__ import annotations

from typing import Final

DRAM_SEGMENT_BYTES_MIN: Final = 64 << 20
# So many segments unless the configuration sets a size: descriptors are limited, per process and per message.
DRAM_SEGMENTS_USUAL: Final = 512
DRAM_SEGMENT_STEP_BYTES: Final = 2 << 20  # a huge page
DRAM_SEGMENTS_MAX: Final = 4096
DRAM_SEGMENT_BYTES_MAX: Final = 4 << 30  # a slot's number has 20 bits for its place, of 4 KiB each


def dram_segment_bytes(capacity_bytes: int) -> int:
    """The size of a DRAM segment where none is configured: a 512th of the tier, 64 MiB at least, whole huge pages."""
    wanted = max(DRAM_SEGMENT_BYTES_MIN, capacity_bytes // DRAM_SEGMENTS_USUAL)
    return -(-wanted // DRAM_SEGMENT_STEP_BYTES) * DRAM_SEGMENT_STEP_BYTES


def check_segments(capacity_bytes: int, segment_bytes: int) -> None:
    """Raises ValueError where a tier has too many segments, or too large ones; 0: of the usual size."""
    if segment_bytes > DRAM_SEGMENT_BYTES_MAX:
        raise ValueError(f"dram.segment_bytes is {segment_bytes}: at most {DRAM_SEGMENT_BYTES_MAX} are allowed")
    segment_bytes = min(segment_bytes or dram_segment_bytes(capacity_bytes), DRAM_SEGMENT_BYTES_MAX)
    segments = capacity_bytes // segment_bytes
    if segments > DRAM_SEGMENTS_MAX:
        raise ValueError(
            f"dram.capacity_bytes is {capacity_bytes}: that makes {segments} segments of {segment_bytes} bytes, "
            f"{DRAM_SEGMENTS_MAX} are allowed: make it smaller, or its segments larger (dram.segment_bytes)"
        )
