"""Aligned memory in which threads encrypt what is to be written and find what was read; it holds no plain bytes.

Kept for the next call, because fresh pages cost as much as the encryption: 0.25 us each.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvstored.device.buffer import AlignedBuffer

_STEP_BYTES: Final = 1 << 20
_KEPT_BYTES_MAX: Final = 8 << 20  # in one buffer: a run of the usual size, or a large block


class Scratch:
    """Buffers of one volume, lent to one call at a time; as many are kept as calls ran at once, 8 MiB each at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[AlignedBuffer] = []

    @contextmanager
    def borrow(self, size_bytes: int) -> Iterator[int]:
        """The address of so many bytes, until the context ends."""
        buffer = self._take(size_bytes)
        try:
            yield buffer.address
        finally:
            if buffer.size_bytes <= _KEPT_BYTES_MAX:
                with self._lock:
                    self._idle.append(buffer)
            else:
                buffer.close()

    def _take(self, size_bytes: int) -> AlignedBuffer:
        with self._lock:
            for place, buffer in enumerate(self._idle):
                if buffer.size_bytes >= size_bytes:
                    return self._idle.pop(place)
            smaller = self._idle.pop() if self._idle else None
        if smaller is not None:
            smaller.close()
        return AlignedBuffer(-(-size_bytes // _STEP_BYTES) * _STEP_BYTES)
