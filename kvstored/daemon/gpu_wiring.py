"""GPUs as the daemon sets them up, and what must be over before memory that was kept is used again."""

from __future__ import annotations

import asyncio

from kvstored.config.config import Config
from kvstored.config.types import uuid_bytes
from kvstored.device.processes import end_noted, noted
from kvstored.device.state_directory import StateDirectory
from kvstored.errors import DeviceError
from kvstored.tiers.dram import DramTier
from kvstored.tiers.gpu import Gpus

WORKERS_FILE = "gpu_workers"


def make_gpus(config: Config, dram: DramTier, state: StateDirectory) -> Gpus | None:
    """The GPUs, or None where the configuration wants none."""
    if not config.gpu.enabled:
        return None
    return Gpus(
        dram,
        silence_max_s=config.gpu.silence_max_s,
        drain_max_s=config.gpu.drain_max_s,
        note=lambda pids: state.replace(WORKERS_FILE, noted(pids)),
    )


def start_workers(config: Config, gpus: Gpus | None) -> None:
    """Those that the configuration wants from the start; nobody waits for them."""
    if gpus is not None and config.gpu.start == "now":
        gpus.keep([uuid_bytes(uuid) for uuid in config.gpu.devices])


async def end_leftovers(state: StateDirectory) -> None:
    """End the device workers of a daemon that died: they may still write to memory that this one is about to use.

    Raises DeviceError where one does not end.
    """
    text = await asyncio.to_thread(state.read, WORKERS_FILE)
    if text and not await asyncio.to_thread(end_noted, text):
        raise DeviceError("a device worker of an earlier daemon does not end: it may still write to the DRAM tier")
