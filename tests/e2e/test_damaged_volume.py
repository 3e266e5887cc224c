"""A real daemon on a volume that was damaged while it was down, and `kvstored rebuild-index`."""

import json
import random
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from kvstored.keys import slot_bytes
from kvstored.testing.daemon_process import DaemonProcess
from tests.e2e.checks import fill, tier
from tests.e2e.raw_client import HIT, RawClient, payload

MIB = 1 << 20
PLACES = 50
BLOCK_BYTES = 512 << 10
BLOCKS = 80
SEALED_BLOCKS = 63  # one extent: its footer takes 8 KiB
SETTINGS = {
    "dram.capacity_bytes": str(48 * MIB),
    "dram.segment_bytes": str(4 * MIB),
    "nvme.capacity_bytes": str(128 * MIB),
    "nvme.extent_bytes": str(32 * MIB),
}


@pytest.fixture
def daemon():
    memory = Path("/dev/shm")  # where there is one: what is tested is not how fast a disk syncs
    with DaemonProcess(SETTINGS, nvme=True, parent_directory=memory if memory.is_dir() else None) as made:
        yield made


@lru_cache
def expected(hash_):
    return payload(hash_, BLOCK_BYTES)


def client_of(daemon):
    return RawClient(daemon.session_socket, staging_bytes=2 * MIB)


def filled(daemon):
    with client_of(daemon) as client:
        done = fill(client, client.namespace(), "kept", BLOCKS * BLOCK_BYTES, size_bytes=BLOCK_BYTES)
        chains = [hashes for hashes, _ in done]
        assert sum(map(len, chains)) == BLOCKS
        assert all(outcome == HIT for _, outcomes in done for outcome in outcomes)
        client.flush()
    return chains


def missing(daemon, chains):
    """Reads everything, checks each byte, and returns how many blocks are not there."""
    count = 0
    with client_of(daemon) as client:
        namespace = client.namespace()
        for hashes in chains:
            found = client.read(namespace, hashes, wait_s=60)
            if len(found) < len(hashes):  # one is missing: those behind it may be there
                found = [data for hash_ in hashes for data in client.read(namespace, [hash_], wait_s=60) or [None]]
            for hash_, data in zip(hashes, found, strict=True):
                assert data in (None, expected(hash_))
                count += data is None
    return count


def account(daemon):
    """What status says of NVMe is what its blocks come to."""
    with client_of(daemon) as client:
        blocks = [block for block in client.list_blocks() if "nvme" in block.tiers]
        nvme = tier(client.status(), "nvme")
    assert nvme.used_bytes == sum(slot_bytes(block.size_bytes) for block in blocks)
    assert nvme.used_bytes + nvme.dead_bytes + nvme.free_bytes == nvme.capacity_bytes
    return len(blocks)


def rebuild_index(daemon, *more):
    command = [sys.executable, "-m", "kvstored", "rebuild-index", *more]
    for key, value in {**SETTINGS, "nvme.paths": json.dumps([str(daemon.nvme_path)])}.items():
        command += ["--set", f"{key}={value}"]
    return subprocess.run(command, capture_output=True, text=True)


def test_an_index_is_rebuilt_by_command_while_the_daemon_is_stopped(daemon):
    chains = filled(daemon)
    refused = rebuild_index(daemon)
    assert refused.returncode == 78
    assert "in use by another kvstored" in refused.stderr
    daemon.stop()
    shutil.rmtree(daemon.nvme_path / "index")
    done = rebuild_index(daemon, "-o", "json")
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout).values()
    assert (report["sealed_extents"], report["records"], report["namespaces"]) == (1, SEALED_BLOCKS, 1)
    assert "blocks" in rebuild_index(daemon).stdout  # once more, as a table: nothing changes
    daemon.start()
    assert account(daemon) == report["records"]
    assert missing(daemon, chains) == BLOCKS - SEALED_BLOCKS


def test_a_rebuild_without_a_volume_says_what_is_missing(tmp_path):
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-m", "kvstored", "rebuild-index", "--set", f"nvme.paths={tmp_path / 'empty'}"]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 78
    assert "holds no volume" in refused.stderr
    assert list((tmp_path / "empty").iterdir()) == []


def restore(saved, volume):
    """Make a volume what it was; files that nobody touched are left alone."""
    for path in sorted(volume.rglob("*"), reverse=True):
        if path.is_file() and not (saved / path.relative_to(volume)).is_file():
            path.unlink()
    for path in saved.rglob("*"):
        target = volume / path.relative_to(saved)
        if path.is_file() and (not target.is_file() or target.stat().st_mtime_ns != path.stat().st_mtime_ns):
            shutil.copy2(path, target)


def flip(volume, rng):
    """Change one byte of a random file; returns which."""
    path = rng.choice(sorted(path for path in volume.rglob("*") if path.is_file() and path.stat().st_size))
    data = path.read_bytes()
    at = rng.randrange(len(data))
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 1 << rng.randrange(8)]))
    return f"{path.relative_to(volume)} at {at}"


@pytest.mark.timeout(900)  # every place is a start of a daemon
@pytest.mark.parametrize("left_by", ["kill", "stop"])
def test_a_byte_flipped_anywhere_while_it_is_down_is_lived_through(daemon, left_by):
    chains = filled(daemon)
    saved, rng = daemon.directory / "saved", random.Random(left_by)
    getattr(daemon, left_by)()
    shutil.copytree(daemon.nvme_path, saved)
    for _ in range(PLACES // 2):
        where = flip(daemon.nvme_path, rng)
        daemon.start()
        assert account(daemon) >= BLOCKS - 1, where
        assert missing(daemon, chains) <= 1, where
        account(daemon)
        daemon.kill()
        restore(saved, daemon.nvme_path)
    daemon.start()
