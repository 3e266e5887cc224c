"""A lock file that lies in memory, for a library that wants a path for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def lock_file_in_memory(path: Path) -> Iterator[None]:
    """While the context lasts `path` leads to fresh memory, and what this process opens there is that.

    Raises OSError. Nothing but a dangling link is ever left of it, which the next call replaces.
    """
    descriptor = os.memfd_create("kvstored-index-lock", os.MFD_CLOEXEC)
    try:
        path.unlink(missing_ok=True)
        path.symlink_to(f"/proc/self/fd/{descriptor}")
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()
    finally:
        os.close(descriptor)
