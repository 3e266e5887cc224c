"""A scheduler in a process of its own that keeps asking how long a resident prefix is.

Its look-ups are timed while the daemon is idle and while it moves data: the ratio says what
background work costs the calls that an engine's step waits for.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Final, Self

from kvstored_client import Client, NamespaceSpec

_PAUSE_S: Final = 0.001  # between look-ups: a scheduler asks once a request, it does not spin
_TIMEOUT_S: Final = 60.0


class Prober:
    """Look-ups of one chain by a spawned process; latencies are taken in windows."""

    def __init__(self, address: str, spec: NamespaceSpec, hashes: Sequence[bytes]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_probe, args=(address, spec.SerializeToString(), list(hashes), theirs), daemon=True
        )
        self._process.start()
        theirs.close()
        self._receive()  # connected and warm

    def start(self) -> None:
        """Open a window: look-ups begin."""
        self._pipe.send("start")

    def stop(self) -> list[float]:
        """Close the window; returns the seconds of its look-ups."""
        self._pipe.send("stop")
        return self._receive()

    def window(self, seconds: float) -> list[float]:
        """Seconds of the look-ups of a window of that length."""
        self.start()
        time.sleep(seconds)
        return self.stop()

    def _receive(self) -> list[float]:
        if not self._pipe.poll(_TIMEOUT_S):
            raise TimeoutError("the prober does not answer")
        received: list[float] = self._pipe.recv()
        return received

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _probe(address: str, spec: bytes, hashes: list[bytes], pipe: Connection) -> None:
    with Client(address, name="bench.prober", timeout_s=10.0) as client:
        namespace = client.namespace(NamespaceSpec.FromString(spec))
        for _ in range(50):
            found = client.lookup(namespace, hashes).dram_blocks
            assert found == len(hashes), f"{found} of {len(hashes)} probe blocks are resident"
        pipe.send([])
        while pipe.recv() == "start":
            seconds = []
            while not pipe.poll():
                started = time.perf_counter()
                client.lookup(namespace, hashes)
                seconds.append(time.perf_counter() - started)
                time.sleep(_PAUSE_S)
            pipe.recv()
            pipe.send(seconds)
