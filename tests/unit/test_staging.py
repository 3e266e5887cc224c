import asyncio
import ctypes
import mmap
import os
import threading

import pytest

from kvstored.errors import DeviceError, InvalidArgument
from kvstored.tiers import staging as staging_module
from kvstored.tiers.staging import StagingPool

MIB = 1 << 20


async def test_what_a_client_writes_through_its_descriptor_is_seen_here():
    staging = await StagingPool(4 * MIB).create(MIB)
    with mmap.mmap(staging.read_write_fd(), MIB) as theirs:
        theirs[100:105] = b"hello"
    assert ctypes.string_at(staging.address_of(100, 5), 5) == b"hello"
    staging.close()


async def test_a_client_cannot_truncate_its_staging():
    staging = await StagingPool(4 * MIB).create(MIB)
    with pytest.raises(PermissionError):
        os.ftruncate(staging.read_write_fd(), 0)
    staging.close()


async def test_addresses_are_given_inside_of_the_memory_only():
    staging = await StagingPool(4 * MIB).create(MIB)
    assert staging.address_of(MIB, 0) == staging.address_of(0, MIB) + MIB
    for offset, size in [(-1, 1), (0, MIB + 1), (MIB, 1), (1, -1), (1 << 63, 1), (MIB - 1, 2)]:
        with pytest.raises(InvalidArgument, match="staging has no"):
            staging.address_of(offset, size)
    staging.close()
    with pytest.raises(InvalidArgument):
        staging.address_of(0, 1)


async def test_it_stays_mapped_until_the_last_copy_is_over():
    pool = StagingPool(4 * MIB)
    staging = await pool.create(MIB)
    address = staging.address_of(0, 4)
    ctypes.memset(address, 7, 4)
    staging.hold()
    staging.hold()
    staging.close()
    staging.unhold()
    assert ctypes.string_at(address, 4) == b"\7" * 4
    assert pool.used_bytes == MIB
    staging.unhold()
    assert pool.used_bytes == 0
    staging.close()
    assert pool.used_bytes == 0


async def test_a_client_that_keeps_its_mapping_keeps_no_memory():
    staging = await StagingPool(4 * MIB).create(MIB)
    theirs = mmap.mmap(staging.read_write_fd(), MIB)
    fd = os.dup(staging.read_write_fd())
    theirs[:4] = b"data"
    staging.close()
    assert os.fstat(fd).st_blocks == 0
    assert theirs[:4] == bytes(4)
    theirs.close()
    os.close(fd)


async def test_the_limit_is_for_all_sessions_together():
    pool = StagingPool(2 * MIB)
    first, second = await pool.create(MIB), await pool.create(MIB - 1)
    assert pool.used_bytes == 2 * MIB  # sizes are rounded up
    assert await pool.create(1) is None
    first.close()
    third = await pool.create(MIB)
    assert third is not None
    second.close()
    third.close()
    assert pool.used_bytes == 0


async def test_large_memory_is_given_back_by_a_thread(monkeypatch):
    punching, go = threading.Event(), threading.Event()
    punch = staging_module.Mapping.punch

    def slow(mapping):
        punching.set()
        assert go.wait(60), "the loop waits for the kernel"
        punch(mapping)

    monkeypatch.setattr(staging_module.Mapping, "punch", slow)
    pool = StagingPool(8 * MIB)
    staging = await pool.create(8 * MIB)
    staging.close()
    assert await asyncio.to_thread(punching.wait, 10)
    assert await pool.create(1) is None, "it counts until it is given back"
    go.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    await asyncio.sleep(0)
    assert pool.used_bytes == 0


@pytest.mark.parametrize("size", [0, -1, staging_module.SESSION_BYTES_MAX + 1])
async def test_sizes_that_make_no_sense_are_refused(size):
    with pytest.raises(InvalidArgument, match="staging of"):
        await StagingPool(1 << 50).create(size)


async def test_staging_is_populated_before_it_is_handed_out():
    staging = await StagingPool(4 * MIB).create(MIB)
    assert os.fstat(staging.read_write_fd()).st_blocks * 512 == MIB
    staging.close()


async def test_no_memory_gives_the_account_back(monkeypatch):
    def refused(size):
        raise DeviceError("no memory")

    monkeypatch.setattr(staging_module, "_make", refused)
    pool = StagingPool(4 * MIB)
    with pytest.raises(DeviceError):
        await pool.create(MIB)
    assert pool.used_bytes == 0


async def test_a_cancelled_creation_leaves_nothing(monkeypatch):
    made, go, make = [], threading.Event(), staging_module._make

    def slow(size):
        go.wait(60)
        made.append(make(size))
        return made[0]

    monkeypatch.setattr(staging_module, "_make", slow)
    pool = StagingPool(4 * MIB)
    creating = asyncio.create_task(pool.create(MIB))
    await asyncio.sleep(0)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert pool.used_bytes == MIB  # the thread may still be populating
    go.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    await asyncio.sleep(0)
    assert pool.used_bytes == 0
    assert made[0].fd == -1


async def test_unholding_what_is_not_held_is_a_mistake():
    staging = await StagingPool(4 * MIB).create(4096)
    with pytest.raises(AssertionError, match="more often"):
        staging.unhold()
    staging.close()
