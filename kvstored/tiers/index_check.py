"""Before an index is opened: is it the one that was closed in order, or does it check out, or must it be made anew.

An orderly close leaves the hash of the data file in the volume's directory (not in the index's:
an older index that somebody put back would bring its own). Where that still fits, nothing has
changed since and the index is opened at once. Else a process of its own checks and copies it
(`check`), and where that finds damage, or dies, or does not come to an end, another makes it
anew (`rebuild`).
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from kvstored.device.file import AlignedBuffer, FileDevice
from kvstored.device.memory import hash_bytes
from kvstored.errors import DeviceError
from kvstored.tiers.directory import DATA_FILE, RESERVE_BYTES_MAX, VolumeDirectory
from kvstored.tiers.sources import Report, Source
from kvstored.tiers.transaction import LOCK_FILE

CLEAN_FILE: Final = "CLEAN"
_PIECE_BYTES: Final = 4 << 20
# Ample: a check takes 2 s for a million records (270 MB), a rebuild 1 s an extent of 60,000.
CHECK_TIMEOUT_S: Final = 20.0
CHECK_BYTES_PER_S: Final = 20 << 20
REBUILD_TIMEOUT_S: Final = 120.0
REBUILD_S_PER_EXTENT: Final = 10.0
REBUILD_BYTES_PER_S: Final = 1 << 20
# Of somebody who ends all that the daemon runs: says nothing about the index.
_ASKED_TO_END: Final = frozenset({-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
_log = logging.getLogger(__name__)


class ChildFailed(Exception):
    """The process found damage, or did not get to the end; says which."""


def prepare(directory: VolumeDirectory) -> Report | None:
    """Make sure that the index can be opened; a report where it was checked or made anew, else None.

    Raises DeviceError where the device fails.
    """
    device = directory.device
    was_clean = _take_clean_mark(directory)
    device.remove(directory.index / LOCK_FILE)  # of processes that are gone
    there = device.exists(directory.index / DATA_FILE)
    if not there and not device.names(directory.extents):
        return None
    if there and was_clean and not directory.old_format:
        return None
    mode = "migrate" if directory.old_format else "check"
    source = source_of(directory)
    if directory.free_bytes() < RESERVE_BYTES_MAX + 2 * device.names(directory.index).get(DATA_FILE, 0):
        directory.release()  # a copy of the index needs room, if there is any
    if there:
        try:
            report = run(mode, source)
        except ChildFailed as failed:
            _log.warning("%s: the index is made anew: %s", directory.path, failed)
        else:
            if directory.old_format:
                _log.info("%s: format 1 converted: %d blocks", directory.path, report.records)
            return report
    return rebuild(source)


def source_of(directory: VolumeDirectory) -> Source:
    """The volume as a child is told of it."""
    return Source(str(directory.path), directory.identity, directory.extent_bytes, os.getpid())


def rebuild(source: Source) -> Report:
    """Make the index anew; raises DeviceError where that fails."""
    try:
        report = run("rebuild", source)
    except ChildFailed as failed:
        raise DeviceError(f"{source.directory}: the index is damaged and cannot be made anew: {failed}") from failed
    counts = ", ".join(f"{name} {value}" for name, value in msgspec.to_builtins(report).items() if value)
    _log.warning("%s: the index was made anew: %s", source.directory, counts or "nothing was found")
    return report


def run(mode: str, source: Source) -> Report:
    """Run a child and wait for it; raises ChildFailed where it does not report success."""
    command = [sys.executable, "-m", "kvstored.tiers.check", mode, msgspec.json.encode(source).decode()]
    timeout_s = _timeout_s(mode, source)
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"{mode} did not end within {timeout_s:.0f} s") from None
    except OSError as error:
        raise DeviceError(f"cannot start a process to check {source.directory}: {error}") from error
    if ended.returncode in _ASKED_TO_END:
        raise DeviceError(f"{source.directory}: the {mode} of the index was ended by signal {-ended.returncode}")
    report = Report(reason="".join(ended.stderr.decode(errors="replace").splitlines()[-1:])[-300:])
    with suppress(msgspec.DecodeError):
        report = msgspec.json.decode(ended.stdout, type=Report)
    if ended.returncode:
        status = f"signal {-ended.returncode}" if ended.returncode < 0 else f"exit status {ended.returncode}"
        raise ChildFailed(report.reason or f"{mode} ended with {status}")
    return report


def _timeout_s(mode: str, source: Source) -> float:
    data = source.index / DATA_FILE
    size = data.stat().st_size if data.exists() else 0
    if mode != "rebuild":
        return CHECK_TIMEOUT_S + size / CHECK_BYTES_PER_S
    extents = sum(1 for _ in source.extents.glob("*.ext"))
    return REBUILD_TIMEOUT_S + extents * REBUILD_S_PER_EXTENT + size / REBUILD_BYTES_PER_S


def mark_clean(directory: VolumeDirectory) -> None:
    """After the environment is closed: note what its file is. A failure only costs a check."""
    device, data = directory.device, directory.index / DATA_FILE
    with suppress(DeviceError):
        directory.check()  # the file that was open, and not another
        if device.exists(data):
            device.replace(directory.path / CLEAN_FILE, _hash_file(device, data))


def _take_clean_mark(directory: VolumeDirectory) -> bool:
    """Whether the file is the one that an orderly close left; the mark is gone, durably, when this returns."""
    device, path, data = directory.device, directory.path / CLEAN_FILE, directory.index / DATA_FILE
    mark: bytes | None = b""  # unreadable: fits nothing
    with suppress(DeviceError):
        mark = device.read_whole(path)
    if mark is None:
        return False
    device.remove(path, durably=True)  # not written anew: the file system may be full
    with suppress(DeviceError):
        return device.exists(data) and _hash_file(device, data) == mark
    return False


def _hash_file(device: FileDevice, path: Path) -> bytes:
    """The size of a file and the hashes of its pieces."""
    file = device.open(path, direct=False)
    buffer = AlignedBuffer(_PIECE_BYTES)
    try:
        size = device.size_bytes(file)
        hashes: list[bytes] = [size.to_bytes(8, "little")]
        for offset in range(0, size, _PIECE_BYTES):
            piece = min(_PIECE_BYTES, size - offset)
            device.read(file, offset, [(buffer.address, piece)])
            hashes.append(hash_bytes(buffer.address, piece))
        return b"".join(hashes)
    finally:
        buffer.close()
        device.close(file)
