"""Memory for direct I/O of the tier's own bytes."""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

ALIGN_BYTES: Final = 4096


class AlignedBuffer:
    """Zeroed memory of its own, aligned for direct I/O."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self._map = mmap.mmap(-1, self.size_bytes)
        self._view = (ctypes.c_char * self.size_bytes).from_buffer(self._map)
        self.address = ctypes.addressof(self._view)

    def set(self, offset: int, data: bytes) -> None:
        """Put bytes in."""
        self._map[offset : offset + len(data)] = data

    def get(self, offset: int, size_bytes: int) -> bytes:
        """Take bytes out."""
        return self._map[offset : offset + size_bytes]

    def close(self) -> None:
        """Give the memory back; the address is void from here on."""
        del self._view
        self._map.close()
