"""A daemon on a device that goes away, fills up or hangs, and comes back: it lives on, and so does its tier."""

import contextlib
import json
import os
import signal
import subprocess

import pytest

from kvstored.testing.daemon_process import DaemonFailed, DaemonProcess, status
from tests.e2e.checks import BLOCK_BYTES, Bystander, fill, tier
from tests.e2e.raw_client import HIT, THROTTLED, RawClient, eventually, payload

MIB = 1 << 20
SETTINGS = {
    "dram.capacity_bytes": str(32 * MIB),
    "dram.segment_bytes": str(4 * MIB),
    "nvme.capacity_bytes": str(256 * MIB),
    "nvme.extent_bytes": str(32 * MIB),
    "nvme.retry_s": "0.1",
    "nvme.io_deadline_s": "60",
}
HANGS = SETTINGS | {"nvme.io_deadline_s": "4"}  # a drive that does not answer for so long

as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs to mount a file system")


def client_of(daemon):
    return RawClient(daemon.session_socket, staging_bytes=2 * MIB)


def nvme(daemon):
    return tier(status(daemon.session_socket), "nvme")


def sink(client):
    """All that is in DRAM is on NVMe too; a busy machine's drive may have seemed to hang meanwhile."""
    eventually(lambda: not client.flush().left_blocks, "all of it is below")


def health_comes(daemon, health):
    eventually(lambda: nvme(daemon).health == health, f"nvme is {health}")


def read_right(client, namespace, hashes):
    """How many leading blocks are there; all of them have the right bytes."""
    found = client.read(namespace, hashes, wait_s=60)
    assert found == [payload(h, BLOCK_BYTES) for h in hashes[: len(found)]]
    return len(found)


@contextlib.contextmanager
def mounted(path, *options):
    path.mkdir()
    subprocess.run(["mount", *options, str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_directory_that_vanishes_and_comes_back(tmp_path):
    with DaemonProcess(SETTINGS, nvme=True, parent_directory=tmp_path) as daemon:
        away = daemon.nvme_path.with_name("away")
        with client_of(daemon) as client, Bystander(daemon.session_socket):
            namespace = client.namespace()
            kept = fill(client, namespace, "kept", 8 * MIB)
            sink(client)
            daemon.nvme_path.rename(away)
            health_comes(daemon, "off")
            told = status(daemon.session_socket)
            (path,) = tier(told, "nvme").paths
            assert (path.path, path.health) == (str(daemon.nvme_path), "off")
            assert "gone" in path.reason
            assert path.since_s
            assert any("is gone" in warning for warning in told.warnings)
            # DRAM goes on alone: more than fits into it.
            done = fill(client, namespace, "meanwhile", 64 * MIB, wait_s=5)
            assert {o for _, outcomes in done for o in outcomes} <= {HIT, THROTTLED}
            assert read_right(client, namespace, done[-1][0])
            assert not daemon.nvme_path.exists()
            away.rename(daemon.nvme_path)
            health_comes(daemon, "ok")
            assert sum(read_right(client, namespace, hashes) for hashes, _ in kept) == sum(len(h) for h, _ in kept)
            after = [hashes for hashes, outcomes in fill(client, namespace, "after", 8 * MIB) if set(outcomes) == {HIT}]
            assert after
            sink(client)
        daemon.restart()
        with client_of(daemon) as client:
            namespace = client.namespace()
            for hashes in [hashes for hashes, _ in kept] + after:
                assert read_right(client, namespace, hashes) == len(hashes)
        assert "Traceback" not in daemon.log_tail()


@as_root
def test_a_full_disk_that_gets_room_again(tmp_path):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", f"size={320 * MIB}", "tmpfs") as disk:
        (disk / "hog").write_bytes(bytes(240 * MIB))
        (disk / "kvstored").mkdir()
        settings = {**SETTINGS, "nvme.paths": json.dumps([str(disk / "kvstored")])}
        with DaemonProcess(settings, parent_directory=tmp_path) as daemon, client_of(daemon) as client:
            namespace = client.namespace()
            fill(client, namespace, "too much", 128 * MIB, wait_s=5)
            eventually(lambda: status(daemon.session_socket).counters["nvme_no_space"], "the disk is full")
            eventually(lambda: nvme(daemon).health == "ok", "it goes on with what it has")
            assert nvme(daemon).capacity_bytes < 256 * MIB
            (disk / "hog").unlink()
            health_comes(daemon, "ok")
            eventually(lambda: nvme(daemon).capacity_bytes == 256 * MIB, "the tier has its size back")
            done = fill(client, namespace, "fits", 128 * MIB, wait_s=5)
            assert sum(read_right(client, namespace, hashes) for hashes, _ in done[-16:]) > 0
            assert "Traceback" not in daemon.log_tail()


@contextlib.contextmanager
def frozen(path):
    """Every write to the file system waits, as on a drive that does not answer."""
    subprocess.run(["fsfreeze", "--freeze", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(path)], check=True)


@contextlib.contextmanager
def drive(tmp_path):
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(512 * MIB)
    try:
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        context = mounted(tmp_path / "disk", "-o", "loop", str(image))
        disk = context.__enter__()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no loop devices here")
    try:
        (disk / "kvstored").mkdir()
        yield disk
    finally:
        context.__exit__(None, None, None)


@as_root
def test_a_drive_that_hangs_and_answers_again(tmp_path):
    with drive(tmp_path) as disk:
        settings = {**HANGS, "nvme.paths": json.dumps([str(disk / "kvstored")])}
        with DaemonProcess(settings, parent_directory=tmp_path) as daemon:
            with client_of(daemon) as client, Bystander(daemon.session_socket):
                namespace = client.namespace()
                kept = fill(client, namespace, "kept", 8 * MIB)
                sink(client)
                with frozen(disk):
                    done = fill(client, namespace, "meanwhile", 64 * MIB, wait_s=5)
                    assert {o for _, outcomes in done for o in outcomes} <= {HIT, THROTTLED}
                    health_comes(daemon, "off")
                    assert "not answered" in nvme(daemon).properties["path.0"]
                    done = fill(client, namespace, "without it", 48 * MIB, wait_s=5)
                    assert read_right(client, namespace, done[-1][0])
                health_comes(daemon, "ok")
                found = sum(read_right(client, namespace, hashes) for hashes, _ in kept)
                assert found == sum(len(hashes) for hashes, _ in kept)
                fill(client, namespace, "after", 64 * MIB, wait_s=5)
            assert "Traceback" not in daemon.log_tail()


@as_root
def test_a_stop_while_the_drive_hangs_ends_and_says_what_it_left(tmp_path):
    with drive(tmp_path) as disk:
        settings = {**HANGS, "nvme.paths": json.dumps([str(disk / "kvstored")])}
        daemon = DaemonProcess(settings, parent_directory=tmp_path)
        daemon.start()
        with client_of(daemon) as client:
            namespace = client.namespace()
            kept = fill(client, namespace, "kept", 8 * MIB)
            sink(client)
            with frozen(disk):
                fill(client, namespace, "unflushed", 8 * MIB)
                os.kill(daemon.pid, signal.SIGTERM)
                eventually(lambda: "left behind" in daemon.log_tail(), "it gives up on the drive")
        with pytest.raises(DaemonFailed, match="exit status 1"):
            daemon.stop()
        assert "Traceback" not in daemon.log_tail()
        daemon.start()
        with client_of(daemon) as client:
            namespace = client.namespace()
            for hashes, _ in kept:
                assert read_right(client, namespace, hashes) == len(hashes)
        daemon.stop()
        daemon.wipe()
