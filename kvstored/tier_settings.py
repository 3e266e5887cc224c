"""The tiers' own settings, out of the configuration."""

from __future__ import annotations

from kvstored.config import Config
from kvstored.tiers.dram import DramConfig
from kvstored.tiers.nvme import NvmeConfig


def dram_config(config: Config) -> DramConfig:
    """Of the DRAM tier."""
    dram = config.dram
    return DramConfig(
        capacity_bytes=dram.capacity_bytes,
        segment_bytes=dram.segment_bytes,
        huge_pages="require" if dram.require_huge_pages else dram.huge_pages,
        lock="require" if dram.require_lock else dram.lock,
    )


def nvme_config(config: Config) -> NvmeConfig:
    """Of the NVMe tier."""
    nvme = config.nvme
    return NvmeConfig(
        paths=nvme.paths,
        capacity_bytes=nvme.capacity_bytes,
        extent_bytes=nvme.extent_bytes,
        io_threads=nvme.io_threads,
        require_direct_io=nvme.require_direct_io,
        io_deadline_s=nvme.io_deadline_s,
        retry_s=nvme.retry_s,
        scrub_bytes_per_s=nvme.scrub_bytes_per_s,
    )
