"""Files out of the page cache, and a daemon that has its blocks on NVMe alone."""

from __future__ import annotations

import os
from pathlib import Path

from kvstored.testing.daemon_process import DaemonProcess


def drop_cache(path: Path) -> None:
    """So that the next read of a file, or of all files in a directory, goes to the device."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # pages that are not written yet would stay
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def cold_restart(daemon: DaemonProcess) -> None:
    """Stop it in order and start it again: DRAM is empty then, and nothing of NVMe is in the page cache."""
    daemon.stop()
    drop_cache(daemon.nvme_path)
    daemon.start()
