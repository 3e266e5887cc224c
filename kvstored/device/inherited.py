"""Memory that an earlier process left behind: mapped as it is, never cleared."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Final

from kvstored.device import memory
from kvstored.device.memory import HUGE_PAGE_BYTES, PAGE_BYTES, Mapping
from kvstored.errors import DeviceError

_WRITE_SEALS: Final = fcntl.F_SEAL_WRITE | getattr(fcntl, "F_SEAL_FUTURE_WRITE", 16)


class InheritedMapping(Mapping):
    """A memfd that a `Mapping` of an earlier process made. Its pages are there: nothing is populated.

    `pages` is the kind that its maker noted; the kernel tells only reserved pages from others.
    Raises DeviceError, and closes the descriptor, for anything but a memfd with our seals.
    """

    def __init__(self, fd: int, *, pages: str = "4k") -> None:
        self.fd = fd
        self.address = self.size_bytes = 0
        self._wants_huge_pages = False
        try:
            self.size_bytes = _checked_size(fd)
            reserved = os.fstatvfs(fd).f_bsize == HUGE_PAGE_BYTES
            self.pages = "hugetlb" if reserved else "thp" if pages == "thp" else "4k"
            self._map_inherited(reserved=reserved)
        except OSError as error:
            self.close()
            raise DeviceError(f"taking over shared memory: {error.strerror}") from error
        except DeviceError:
            self.close()
            raise

    def _map_inherited(self, *, reserved: bool) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if reserved:
            self.address = memory._map_at(None, self.size_bytes, protection, mmap.MAP_SHARED, self.fd)
        else:
            self._map_aligned(protection)


def _checked_size(fd: int) -> int:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise DeviceError("a descriptor that was left is no memfd") from None
    size = os.fstat(fd).st_size
    if seals & memory._SEALS != memory._SEALS or seals & _WRITE_SEALS or size <= 0 or size % PAGE_BYTES:
        raise DeviceError(f"a memfd of {size} bytes with seals {seals:#x} is none of ours")
    return size
