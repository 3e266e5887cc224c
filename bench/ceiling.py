"""The ceilings that figures are compared with: plain memmove, fio, and a file without fio."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.buffers import Pool
from bench.cold import drop_cache
from bench.common import median
from kvstored.device.file import File, FileDevice

_SINGLE_READS: Final = 16
_PIECE_BYTES: Final = 8 << 20  # what the daemon reads at once for a prefetch


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


class DirectFile:
    """One file that is written and read whole by as many threads as `depth`: what fio does, where fio is not installed.

    In pieces of 8 MiB, whatever the size of blocks, so that it is a ceiling for all sizes. Past the page cache
    where the file system allows it, else with the cache emptied before each read.
    """

    def __init__(self, path: Path, size_bytes: int, depth: int = 8) -> None:
        self._pool = Pool(size_bytes // _PIECE_BYTES, _PIECE_BYTES)
        self._pool.fill(seed=7)
        self._path, self._depth = path, depth
        self._device = FileDevice()

    def write_bytes_per_s(self) -> float:
        """Write all of it, until it is on the device."""
        with self._open() as file:
            seconds = self._timed(range(self._pool.blocks), lambda piece: self._device.write(file, *self._place(piece)))
            started = time.perf_counter()
            self._device.sync(file)
            seconds += time.perf_counter() - started
        return self._pool.size_bytes / seconds

    def read_bytes_per_s(self) -> float:
        """Read all of it, in order."""
        drop_cache(self._path)
        with self._open() as file:
            seconds = self._timed(range(self._pool.blocks), lambda piece: self._device.read(file, *self._place(piece)))
        return self._pool.size_bytes / seconds

    def read_block_s(self, block_bytes: int) -> float:
        """Median time of reading so many bytes, alone; at most a piece."""
        drop_cache(self._path)
        seconds = []
        with self._open() as file:
            for number in range(_SINGLE_READS):
                started = time.perf_counter()
                offset = number * 7 % self._pool.blocks * _PIECE_BYTES
                self._device.read(file, offset, [(self._pool.address, block_bytes)])
                seconds.append(time.perf_counter() - started)
        return median(seconds)

    def _place(self, piece: int) -> tuple[int, list[tuple[int, int]]]:
        return piece * _PIECE_BYTES, [(self._pool.addresses[piece], _PIECE_BYTES)]

    def _timed(self, pieces: Sequence[int], move: Callable[[int], None]) -> float:
        with ThreadPoolExecutor(self._depth) as threads:
            started = time.perf_counter()
            list(threads.map(move, pieces))
            return time.perf_counter() - started

    @contextmanager
    def _open(self) -> Iterator[File]:
        self._path.touch()
        file = self._device.open(self._path, direct=self._device.allows_direct_io(self._path))
        try:
            yield file
        finally:
            self._device.close(file)
