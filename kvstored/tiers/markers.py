"""The files that say which format a volume has and whose it is: the same twice, each with a CRC.

One that is damaged, unreadable or lost is written anew from the other.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from kvstored.device.file import FileDevice
from kvstored.errors import CorruptData, DeviceError
from kvstored.tiers.formats import FORMAT_SEALED, FORMAT_VERSION

MARKER: Final = "FORMAT"
MARKERS: Final = (MARKER, "FORMAT.copy")
_FORMAT_WITHOUT_CRC: Final = 1


class VolumeFormat(msgspec.Struct):
    """Content of the files `FORMAT` and `FORMAT.copy`; `crc` is that of the rest, and came with format 2."""

    format: int
    volume: str = ""
    extent_bytes: int = 0
    crc: int | None = None

    def expected_crc(self) -> int:
        """What `crc` must be."""
        return zlib.crc32(f"{self.format} {self.volume} {self.extent_bytes}".encode())


def read_markers(device: FileDevice, path: Path) -> VolumeFormat | None:
    """What a volume's markers say, or None where there are none.

    Raises CorruptData where neither is whole, DeviceError where neither can be read or one cannot be repaired.
    """
    found, failure = dict[str, VolumeFormat | None](), None
    for name in MARKERS:
        try:
            data = device.read_whole(path / name)
            if data is not None:
                found[name] = _decode(data)
        except DeviceError as error:  # a bad sector, say: that is what there are two for
            found[name], failure = None, error
    whole = [marker for marker in found.values() if marker is not None]
    if not found:
        return None
    if not whole and failure is not None:
        raise failure
    if not whole:
        raise CorruptData(f"{path / MARKER} is damaged, and so is its copy: empty the directory")
    best = max(whole, key=lambda marker: marker.format)
    if FORMAT_VERSION <= best.format <= FORMAT_SEALED:
        write_markers(device, path, best, [name for name in MARKERS if found.get(name) != best])
    return best


def write_markers(
    device: FileDevice, path: Path, content: VolumeFormat, names: Iterable[str] = MARKERS, *, check: bool = False
) -> None:
    """Write them, durably, with their CRC; raises DeviceError, with `check` also where one reads otherwise."""
    content.crc = content.expected_crc()
    encoded = msgspec.json.encode(content)
    for name in names:
        device.replace(path / name, encoded)
        if check and device.read_whole(path / name) != encoded:  # while nothing is in the volume that could be lost
            raise DeviceError(f"{path / name} does not read as it was written")


def _decode(stored: bytes) -> VolumeFormat | None:
    """A marker, or None where it is damaged. A newer one may have other fields, and no CRC of ours."""
    with suppress(ValueError):
        found = msgspec.json.decode(stored, type=VolumeFormat)
        if found.format > FORMAT_SEALED and found.crc is None:
            return found
        if len(bytes.fromhex(found.volume)) != 16:
            return None
        if found.crc == found.expected_crc() or (found.format == _FORMAT_WITHOUT_CRC and found.crc is None):
            return found
    return None
