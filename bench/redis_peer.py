"""redis-py over a Unix socket, tuned: what the same blocks cost in a store that sends bytes.

Tuned means the hiredis parser for replies, the Python packer for requests (the one that redis-py
picks when hiredis is installed copies large values again and again), and 2 MiB a command.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Final, Self

from bench.buffers import Pool
from bench.common import timed

_COMMAND_BYTES: Final = 2 << 20
_START_TIMEOUT_S: Final = 60.0


def server_path() -> str | None:
    """An installed server, where the client library is there too."""
    if importlib.util.find_spec("redis") is None or importlib.util.find_spec("hiredis") is None:
        return None
    return shutil.which("redis-server") or shutil.which("valkey-server")


class RedisPeer:
    """A server of our own (no persistence) and one tuned connection to it."""

    def __init__(self, executable: str, max_bytes: int) -> None:
        self._directory = TemporaryDirectory(prefix="kvstored-redis-")
        self._socket = Path(self._directory.name) / "redis.sock"
        command = [executable, "--port", "0", "--unixsocket", str(self._socket), "--dir", self._directory.name]
        command += ["--save", "", "--appendonly", "no", "--daemonize", "no", "--maxmemory", str(max_bytes)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._connection = self._connect()

    def put(self, hashes: Sequence[bytes], pool: Pool, into: list[float]) -> None:
        """Put the blocks, timed."""
        with timed(into):
            for start, end in _pieces(len(hashes), pool.block_bytes):
                arguments: list[Any] = ["MSET"]
                for hash_, view in zip(hashes[start:end], pool.views[start:end], strict=True):
                    arguments += (hash_, view)
                self._connection.execute_command(*arguments)

    def get(self, hashes: Sequence[bytes], pool: Pool, into: list[float]) -> None:
        """Get the blocks into the pool, timed."""
        with timed(into):
            for start, end in _pieces(len(hashes), pool.block_bytes):
                values = self._connection.mget(hashes[start:end])
                for view, value in zip(pool.views[start:end], values, strict=True):
                    view[:] = value

    def delete(self, hashes: Sequence[bytes]) -> None:
        """Delete the blocks."""
        self._connection.delete(*hashes)

    def close(self) -> None:
        """Stop the server and remove its files."""
        self._process.terminate()
        self._process.wait()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self) -> Any:
        redis: Any = importlib.import_module("redis")
        connections: Any = importlib.import_module("redis.connection")
        encoders: Any = importlib.import_module("redis._parsers.encoders")
        encoder = encoders.Encoder("utf-8", "strict", False)
        pool = redis.ConnectionPool(
            connection_class=connections.UnixDomainSocketConnection,
            path=str(self._socket),
            command_packer=connections.PythonRespSerializer(65536, encoder.encode),
        )
        connection = redis.Redis(connection_pool=pool)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                connection.ping()
                return connection
            except redis.ConnectionError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    self.close()
                    raise
                time.sleep(0.02)


def _pieces(blocks: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    step = max(1, _COMMAND_BYTES // block_bytes)
    for start in range(0, blocks, step):
        yield start, min(start + step, blocks)
