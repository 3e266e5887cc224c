"""Settings of the NVMe tier."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvstored.device.file import ALIGN_BYTES
from kvstored.errors import ConfigError

EXTENT_BYTES_MIN: Final = 64 << 10
VOLUMES_MAX: Final = 64
IO_THREADS_MAX: Final = 64


class NvmeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the tier; `capacity_bytes` is for each path, and rounded down to whole extents.

    `run_bytes`: about how much one system call moves. `share_blocks`: how many blocks a store
    must have for each volume that it is spread over, so that a sync is paid by that many.
    `io_deadline_s`: the longest that a call to the device may take (0: as long as it likes).
    `retry_s`: how often a path is looked after, at first; `scrub_bytes_per_s`: for each path, 0 is off.
    `write_budget_bytes_per_day`: for each path, 0 is none. `endurance_bytes`: what each path's drive takes, 0: unknown.
    `reinsert_share`: of an extent that is to be recycled, so much is written again that was read; 0: nothing.
    """

    paths: Sequence[Path]
    capacity_bytes: int
    extent_bytes: int = 256 << 20
    io_threads: int = 0  # for loads, per path; 0: by the number of CPUs
    require_direct_io: bool = False
    run_bytes: int = 4 << 20
    share_blocks: int = 16
    index_map_bytes: int = 1 << 30
    open_files_max: int = 128
    io_deadline_s: float = 10.0
    retry_s: float = 5.0
    scrub_bytes_per_s: int = 32 << 20
    write_budget_bytes_per_day: int = 0
    endurance_bytes: Sequence[int] = ()
    reinsert_share: float = 0.25

    def threads(self) -> int:
        """Load threads of one path: more than four gained nothing at 4 MiB a call."""
        return self.io_threads or min(4, 2 + (os.cpu_count() or 1))

    def check(self) -> None:
        """Raises ConfigError where a setting is wrong."""
        if not 0 < len(self.paths) <= VOLUMES_MAX:
            raise ConfigError(f"nvme.paths names {len(self.paths)} directories: 1 to {VOLUMES_MAX} are allowed")
        if self.extent_bytes < EXTENT_BYTES_MIN or self.extent_bytes % ALIGN_BYTES:
            raise ConfigError(
                f"nvme.extent_bytes is {self.extent_bytes}: a multiple of {ALIGN_BYTES}, {EXTENT_BYTES_MIN} or more"
            )
        if not 0 <= self.io_threads <= IO_THREADS_MAX:
            raise ConfigError(f"nvme.io_threads is {self.io_threads}: 0 to {IO_THREADS_MAX} are allowed")
        if self.capacity_bytes < 2 * self.extent_bytes:
            raise ConfigError(
                f"nvme.capacity_bytes is {self.capacity_bytes}: two extents of {self.extent_bytes} bytes or more"
            )
