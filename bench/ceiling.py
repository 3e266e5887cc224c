"""The ceilings that figures are compared with: plain memmove, and fio on the same file system."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path


def memmove_blocks(destinations: Sequence[int], sources: Sequence[int], block_bytes: int) -> None:
    """One memmove per block, nothing else."""
    move = ctypes.memmove
    for destination, source in zip(destinations, sources, strict=True):
        move(destination, source, block_bytes)


def fio_available() -> bool:
    """Whether fio is installed."""
    return shutil.which("fio") is not None


class FioRead:
    """Reads one file in order by fio: io_uring, O_DIRECT, registered buffers."""

    def __init__(self, file: Path, size_bytes: int, block_bytes: int, depth: int) -> None:
        self._arguments = {
            "filename": str(file),
            "size": str(size_bytes),
            "bs": str(block_bytes),
            "iodepth": str(depth),
            "ioengine": "io_uring",
            "fixedbufs": "1",
            "direct": "1",
            "output-format": "json",
        }

    def lay_out(self) -> None:
        """Write the file, with data that no device could compress or skip."""
        self._run("layout", rw="write", refill_buffers="1", end_fsync="1")

    def bytes_per_s(self) -> float:
        """Read all of it once."""
        return float(self._run("read", rw="read")["read"]["bw_bytes"])

    def _run(self, name: str, **more: str) -> dict[str, dict[str, float]]:
        options = [f"--{key}={value}" for key, value in {**self._arguments, **more}.items()]
        done = subprocess.run(["fio", f"--name={name}", *options], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
        job: dict[str, dict[str, float]] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        return job
