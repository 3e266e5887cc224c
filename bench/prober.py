"""A scheduler in a process of its own that keeps asking for a resident prefix: how long it is, or to hold it.

Its calls are timed while the daemon is idle and while it moves data: the ratio says what
background work costs the calls that an engine's step waits for.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Final, Literal, Self

from kvstored_client import Client, NamespaceSpec

Call = Literal["lookup", "get"]

_PAUSE_S: Final = 0.001  # between calls: a scheduler asks once a request, it does not spin
_TIMEOUT_S: Final = 120.0


class Prober:
    """Look-ups of one chain, or gets and releases of it, by a spawned process; latencies are taken in windows."""

    def __init__(self, address: str, spec: NamespaceSpec, hashes: Sequence[bytes], call: Call = "lookup") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_probe, args=(address, spec.SerializeToString(), list(hashes), call, theirs), daemon=True
        )
        self._process.start()
        theirs.close()
        self._receive()  # connected and warm

    def start(self) -> None:
        """Open a window: calls begin."""
        self._pipe.send("start")

    def stop(self) -> list[float]:
        """Close the window; returns the seconds of its calls."""
        self._pipe.send("stop")
        return self._receive()

    def window(self, seconds: float) -> list[float]:
        """Seconds of the calls of a window of that length."""
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


def _probe(address: str, spec: bytes, hashes: list[bytes], call: Call, pipe: Connection) -> None:
    with Client(address, name="bench.prober", staging_bytes=0, timeout_s=60.0, connect_timeout_s=60.0) as client:
        namespace = client.namespace(NamespaceSpec.FromString(spec))

        def lookup() -> int:
            return client.lookup(namespace, hashes).dram_blocks

        def get() -> int:
            with client.get(namespace, hashes) as blocks:
                return len(blocks)

        ask = {"lookup": lookup, "get": get}[call]
        for _ in range(50):
            found = ask()
            assert found == len(hashes), f"{found} of {len(hashes)} probe blocks are resident"
        pipe.send([])
        while pipe.recv() == "start":
            seconds: list[float] = []
            while not (seconds and pipe.poll()):  # at least one, however short the window was for this process
                started = time.perf_counter()
                found = ask()
                seconds.append(time.perf_counter() - started)
                assert found == len(hashes), f"{found} of {len(hashes)} probe blocks were found"
                time.sleep(_PAUSE_S)
            pipe.recv()
            pipe.send(seconds)
