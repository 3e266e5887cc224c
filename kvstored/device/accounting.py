"""What the kernel has counted for this thread."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_IO: Final = Path("/proc/thread-self/io")
_WRITTEN: Final = b"wchar: "


def thread_written_bytes() -> int:
    """Bytes that this thread has handed to write calls since it began; 0 where the kernel does not count."""
    try:
        lines = _IO.read_bytes().splitlines()
    except OSError:
        return 0
    return next((int(line.removeprefix(_WRITTEN)) for line in lines if line.startswith(_WRITTEN)), 0)
