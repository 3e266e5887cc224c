"""The directory of one volume: whose it is, which format it has, and that nobody else uses it."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

from kvstored.device.file import ALIGN_BYTES, FileDevice, NoSpace
from kvstored.device.handles import OpenFiles
from kvstored.errors import ConfigError, CorruptData, DeviceError
from kvstored.tiers.evictions import Evictions
from kvstored.tiers.formats import FORMAT_SEALED, FORMAT_VERSION
from kvstored.tiers.markers import MARKER, VolumeFormat, read_markers, write_markers

PROBE: Final = "PROBE"
RESERVE: Final = "RESERVE"
DATA_FILE: Final = "data.mdb"
RESERVE_BYTES_MAX: Final = 8 << 20
Place: TypeAlias = tuple[int, int]
"""File system and inode of a directory."""


class VolumeDirectory:
    """A volume's directory, from `open` to `close` this process's alone."""

    def __init__(self, device: FileDevice, path: Path, *, open_files_max: int) -> None:
        self.device = device
        self.path = path
        self.index = path / "index"
        self.extents = path / "extents"
        self.namespaces = path / "namespaces"
        self.tombstones = path / "tombstones"
        self.keys = path / "keys"
        self.evictions = Evictions(device, path / "evictions")
        self.identity = b""
        self.extent_bytes = 0
        self.old_format = False
        self.sealed = False  # it may hold encrypted blocks
        self.direct = False
        self.files = OpenFiles(device, direct=False, limit=open_files_max)
        self.place: Place | None = None  # file system and inode, once open
        self._data: Place | None = None  # the index's file, once it was looked for
        self._open_files_max = open_files_max
        self._lock: int | None = None

    def open(self, extent_bytes: int, *, require_direct_io: bool, was: Place | None = None) -> None:
        """Lock the directory and read its format, or make a new volume in it.

        `was` is the `place` of the volume that was open here before and is to come back: then no directory is
        made, and no volume on another file system, which may be the one below a mount point.

        Raises ConfigError where another process has it, it is no volume or one that this version
        cannot read, or direct I/O is demanded and refused; DeviceError where the device fails,
        CorruptData where nothing tells any more whose it is.
        """
        if was is None:
            self.device.make_directory(self.path)
        else:
            self._check_place(was)
        self._lock = self.device.lock_directory(self.path)
        if self._lock is None:
            raise ConfigError(
                f"nvme.paths: {self.path} is in use by another kvstored, or named twice: each needs its own directory"
            )
        self.place = self.device.place(self.path)
        try:
            self._open_locked(extent_bytes, require_direct_io)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the extents and let others have the directory; nobody may be using a file."""
        self.files.close()
        if self._lock is not None:
            self.device.unlock(self._lock)
            self._lock = None

    def _check_place(self, was: Place) -> None:
        place = self.device.place(self.path)
        if place is None:
            raise DeviceError(f"{self.path} is gone: mount it, or make the directory")
        if place[0] != was[0] and not self.device.exists(self.path / MARKER):
            raise DeviceError(f"{self.path} is not on the file system it was on: mount it, or restart kvstored")

    def check(self) -> None:
        """Raises DeviceError where the directory at the path is not the one that was opened, or was emptied."""
        if self.device.place(self.path) != self.place:
            raise DeviceError(f"{self.path} is gone, or another directory is in its place")
        if not self.device.exists(self.path / MARKER):
            raise DeviceError(f"{self.path} was emptied")
        data = self.device.place(self.index / DATA_FILE)
        if self._data not in (None, data):
            raise DeviceError(f"{self.index / DATA_FILE} is gone, or another file is in its place")
        self._data = data

    def probe(self) -> None:
        """Make, write, sync, read and remove a small file; raises DeviceError where any of it fails."""
        self.check()
        path, data = self.path / PROBE, os.urandom(ALIGN_BYTES)
        self.device.remove(path)
        file = self.device.open(path, direct=self.direct)
        try:
            self.device.write_bytes(file, 0, data)
            self.device.sync(file)
            found = self.device.read_bytes(file, 0, len(data))
        finally:
            self.device.close(file)
            self.device.remove(path)
        if found != data:
            raise DeviceError(f"{path}: other bytes came back than were written")

    def reserve(self) -> None:
        """Keep some room for the index to grow into when the file system is full; none where there is little left."""
        path, size_bytes = self.path / RESERVE, min(RESERVE_BYTES_MAX, self.extent_bytes // 4)
        if self.device.exists(path) or self.free_bytes() < 2 * self.extent_bytes:
            return
        with suppress(NoSpace):  # a quota, of which the file system does not tell
            file = self.device.open(path, direct=self.direct)
            try:
                self.device.write_bytes(file, 0, bytes(size_bytes))
                self.device.sync(file)
            finally:
                self.device.close(file)

    def release(self) -> None:
        """The file system is full: let the index have that room. Raises DeviceError."""
        self.device.remove(self.path / RESERVE)

    def free_bytes(self) -> int:
        """What the file system has left; raises DeviceError."""
        return self.device.free_bytes(self.path)

    def upgrade(self) -> None:
        """Note that everything is of the present format now; raises DeviceError."""
        if self.old_format:
            write_markers(self.device, self.path, VolumeFormat(FORMAT_VERSION, self.identity.hex(), self.extent_bytes))
            self.old_format = False

    def allow_sealed(self) -> None:
        """From here on there may be encrypted blocks, which older code would take for damaged; raises DeviceError."""
        if not self.sealed:
            write_markers(self.device, self.path, VolumeFormat(FORMAT_SEALED, self.identity.hex(), self.extent_bytes))
            self.sealed = True

    def _open_locked(self, extent_bytes: int, require_direct_io: bool) -> None:
        self._check(self._marked(extent_bytes), extent_bytes)
        self.direct = self.device.allows_direct_io(self.path / MARKER)
        if require_direct_io and not self.direct:
            raise ConfigError(
                f"nvme.require_direct_io is true, but the file system of {self.path} refuses O_DIRECT: "
                "use another path, or set it to false"
            )
        for directory in (self.index, self.extents):
            self.device.make_directory(directory)
        self.files = OpenFiles(self.device, direct=self.direct, limit=self._open_files_max)

    def _marked(self, extent_bytes: int) -> VolumeFormat:
        """What its markers say, new ones where it has none. Raises CorruptData, DeviceError or ConfigError."""
        try:
            return read_markers(self.device, self.path) or self._create(extent_bytes)
        except CorruptData:
            if self.device.exists(self.index) or self.device.exists(self.extents):
                raise
            return self._create(extent_bytes)  # it was never opened: they were damaged as they were made

    def _create(self, extent_bytes: int) -> VolumeFormat:
        for directory in (self.index, self.extents):
            if self.device.exists(directory):
                raise ConfigError(f"nvme.paths: {self.path} has {directory.name}/ but no FORMAT file: empty it first")
        fresh = VolumeFormat(FORMAT_VERSION, uuid.uuid4().hex, extent_bytes)
        write_markers(self.device, self.path, fresh, check=True)
        return fresh

    def _check(self, found: VolumeFormat, extent_bytes: int) -> None:
        if found.format > FORMAT_SEALED:
            raise ConfigError(
                f"nvme.paths: {self.path} has format {found.format}, this kvstored reads up to {FORMAT_SEALED}: "
                "upgrade kvstored, or name another directory"
            )
        if found.extent_bytes != extent_bytes:
            raise ConfigError(
                f"nvme.extent_bytes is {extent_bytes}, but {self.path} was made with {found.extent_bytes}: "
                "set it to that, or empty the directory"
            )
        self.identity = bytes.fromhex(found.volume)
        self.extent_bytes = found.extent_bytes
        self.old_format = found.format < FORMAT_VERSION
        self.sealed = found.format >= FORMAT_SEALED
