"""What lies in a volume's directory and what its index knows of, made to agree when it is opened.

Files that no row knows (their extent was never committed, or given up just before a crash) are
removed, so that the capacity is never exceeded by what is on disk; so are leftovers of files that
were to replace others. Extents whose file is gone are empty; those whose file is too short for
what they hold are scrubbed first.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Final

import msgspec

from kvstored.device.file import NEW_SUFFIX
from kvstored.tiers.directory import PROBE, VolumeDirectory
from kvstored.tiers.formats import ExtentRow

_EXTENT_FILE: Final = re.compile(r"(\d{8})\.ext")
_log = logging.getLogger(__name__)


class Found(msgspec.Struct):
    """What was taken back, and extents that are not what their rows say."""

    files: int = 0
    size_bytes: int = 0
    lost: list[int] = []
    short: list[int] = []


def take_back(directory: VolumeDirectory, rows: Sequence[ExtentRow]) -> Found:
    """Make the files agree with the rows; blocks. Raises DeviceError."""
    device, known = directory.device, {row.extent: row for row in rows}
    found, sizes = Found(), dict[int, int]()
    for name, size_bytes in device.names(directory.extents).items():
        match = _EXTENT_FILE.fullmatch(name)
        if match and int(match[1]) in known:
            sizes[int(match[1])] = size_bytes
            if size_bytes > directory.extent_bytes:
                device.truncate(directory.extents / name, directory.extent_bytes)
                found.size_bytes += size_bytes - directory.extent_bytes
        elif match or name.endswith(NEW_SUFFIX):
            device.remove(directory.extents / name)
            found.files += 1
            found.size_bytes += size_bytes
    for name, size_bytes in device.names(directory.path).items():
        if name == PROBE or name.endswith(NEW_SUFFIX):
            device.remove(directory.path / name)
            found.files += 1
            found.size_bytes += size_bytes
    for number, row in known.items():
        if row.live_blocks and sizes.get(number, 0) < row.append_bytes:
            (found.short if number in sizes else found.lost).append(number)
    if found != Found():
        _log.warning(
            "%s: %d files of %d bytes that nothing knew were removed; %d extents have lost their file, %d some of it",
            *(directory.path, found.files, found.size_bytes, len(found.lost), len(found.short)),
        )
    return found
