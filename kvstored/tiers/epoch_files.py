"""The epochs of one volume: the same file twice, each with a CRC, written before a bump is acknowledged.

One that is damaged or lost is written anew from the other. Older daemons do not know them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvstored.device.file import FileDevice
from kvstored.errors import CorruptData, DeviceError
from kvstored.tiers.epochs import EpochTable

NAMES: Final = ("epochs", "epochs.copy")


def read_epochs(device: FileDevice, directory: Path) -> tuple[EpochTable, bytes]:
    """What both say together, and what lies in both alike (empty: nothing does).

    Raises CorruptData where there are any and none is whole, DeviceError where none can be read.
    """
    table, found = EpochTable(), list[bytes]()
    failure: DeviceError | None = None
    for name in NAMES:
        try:
            data = device.read_whole(directory / name)
            if data is not None:
                table.merge(EpochTable.unpack(data))
                found.append(data)
        except CorruptData:
            failure = failure or CorruptData(f"{directory / NAMES[0]} is damaged, and so is its copy")
        except DeviceError as error:  # a bad sector, say: that is what there are two for
            failure = error
    if failure is not None and not found:
        raise failure
    return table, found[0] if len(found) == len(NAMES) and len(set(found)) == 1 else b""


def write_epochs(device: FileDevice, directory: Path, data: bytes) -> None:
    """Write both, durably, one after the other; raises DeviceError."""
    for name in NAMES:
        device.replace(directory / name, data)
