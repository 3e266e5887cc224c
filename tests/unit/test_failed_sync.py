"""A sync that failed: what others wrote to the same extent is not durable either."""

import os
from pathlib import Path

import pytest

from kvstored.device.file import AlignedBuffer
from kvstored.device.handles import OpenFiles
from kvstored.errors import DeviceError
from kvstored.testing.simulated_device import SimulatedDevice
from kvstored.tiers.runs import Block, Mover, Run

FOLDER = Path("/drive/extents")


def test_a_later_sync_of_the_extent_fails_too_until_it_is_emptied():
    device = SimulatedDevice()
    device.make_directory(FOLDER)
    mover = Mover(device, OpenFiles(device, direct=False, limit=4), FOLDER)
    buffer = AlignedBuffer(8192)
    buffer.set(0, os.urandom(8192))
    for offset in (0, 4096):  # two callers
        mover.write(Run(1, offset, [Block(1, offset, buffer.address + offset, 4096, b"", 0)]))
    failing = iter([True])
    device.happens = lambda kind: kind == "sync_error" and next(failing, False)
    with pytest.raises(DeviceError):
        mover.sync(1)
    with pytest.raises(DeviceError, match="an earlier sync failed"):
        mover.sync(1)
    mover.sync(2)
    mover.forgive(1)
    mover.sync(1)
    buffer.close()
