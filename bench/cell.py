"""One block size of the transfer bench: interleaved repeats of every path beside its ceiling.

A get is compared with memmove of the very same blocks, from where the client has them mapped to
the same slots: what it adds to the bare copy. A put is compared with memmove from the caller's
source to the same slots. Each is put beside the mean of the two ceilings around it in a repeat.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvstored_client import Client, NamespaceSpec

from bench.buffers import Pool, addresses_of
from bench.ceiling import memmove_blocks
from bench.common import GB, Values, median, median_ratio, timed
from kvstored.testing.daemon_process import DaemonProcess

_WARM_UPS = 1


def chain_hashes(label: str, count: int) -> list[bytes]:
    """Block hashes of a chain that nothing else uses."""
    return [hashlib.sha256(f"{label} {index}".encode()).digest() for index in range(count)]


@dataclass
class Cost:
    """Wall and CPU seconds of one path, one element per repeat."""

    wall_s: list[float] = field(default_factory=list)
    client_cpu_s: list[float] = field(default_factory=list)
    daemon_cpu_s: list[float] = field(default_factory=list)

    def forget(self) -> None:
        """Drop what was measured so far."""
        self.wall_s.clear()
        self.client_cpu_s.clear()
        self.daemon_cpu_s.clear()


class Cell:
    """Measures one block size with one client for get and put, and one whose staging ring holds all blocks."""

    def __init__(
        self, daemon: DaemonProcess, client: Client, stager: Client, block_bytes: int, total_bytes: int
    ) -> None:
        self._daemon, self._client, self._stager = daemon, client, stager
        self.block_bytes, self.total_bytes = block_bytes, total_bytes
        blocks = total_bytes // block_bytes
        spec = NamespaceSpec(model="bench.transfer", extra=str(block_bytes))
        self.namespace = client.namespace(spec)
        self._stager_namespace = stager.namespace(spec)
        self.hashes = chain_hashes(f"resident {block_bytes}", blocks)
        self._put_hashes = chain_hashes(f"put {block_bytes}", blocks)
        self.source = Pool(blocks, block_bytes, seed=1)
        self.destination = Pool(blocks, block_bytes, seed=2)
        self.source.fill(seed=block_bytes)
        self.memmove, self.memmove_private = Cost(), Cost()
        self.get, self.control, self.put, self.put_staged = Cost(), Cost(), Cost(), Cost()
        self.wrong_blocks = 0

    # --- one repeat ----------------------------------------------------------------

    def prepare(self) -> None:
        """Make the chain resident and run everything once, unmeasured: memory, mappings, code paths."""
        result = self._client.put(self.namespace, self.hashes, self.source.views, wait_s=30.0)
        assert result.stored + result.existing == len(self.hashes), f"the tier took {result}"
        for _ in range(_WARM_UPS):
            self.repeat()
        for cost in (self.memmove, self.memmove_private, self.get, self.control, self.put, self.put_staged):
            cost.forget()

    def repeat(self) -> None:
        """One round of every path."""
        self._memmove_mapped()
        self._get()
        self._get_without_copies()
        self._memmove_mapped()
        self._memmove_private()
        self._put_from_staging()
        self._put()
        self._memmove_private()

    def close(self) -> None:
        """Delete the resident chain, so that its memory can serve the next cell."""
        self._client.delete(self.namespace, self.hashes)

    def _memmove_mapped(self) -> None:
        with self._client.get(self.namespace, self.hashes) as blocks:
            sources = addresses_of(blocks[index] for index in range(len(blocks)))
            with self._charged(self.memmove):
                memmove_blocks(self.destination.addresses, sources, self.block_bytes)

    def _memmove_private(self) -> None:
        with self._charged(self.memmove_private):
            memmove_blocks(self.destination.addresses, self.source.addresses, self.block_bytes)

    def _get(self) -> None:
        with self._charged(self.get):
            delivered = self._client.get_into(self.namespace, self.hashes, self.destination.spans())
        self._check(delivered)

    def _get_without_copies(self) -> None:
        with self._charged(self.control), self._client.get(self.namespace, self.hashes) as blocks:
            held = len(blocks)
        assert held == len(self.hashes), f"{held} blocks held"

    def _put(self) -> None:
        with self._charged(self.put):
            result = self._client.put(self.namespace, self._put_hashes, self.source.spans(), wait_s=30.0)
        assert result.stored == len(self._put_hashes), f"put: {result}"
        self._check_put()

    def _put_from_staging(self) -> None:
        blocks = len(self._put_hashes)
        with self._stager.stage(self._stager_namespace, self._put_hashes, self.block_bytes, wait_s=30.0) as staged:
            for view, source in zip(staged.views, self.source.views, strict=True):
                assert view is not None, "the tier had no room for a staged block"
                view[:] = source
            with self._charged(self.put_staged):
                result = staged.commit()
        assert result.stored == blocks, f"staged put: {result}"
        self._check_put()

    # --- checks, never timed ---------------------------------------------------------

    def _check_put(self) -> None:
        self.destination.clear()
        self._check(self._client.get_into(self.namespace, self._put_hashes, self.destination.views))
        deleted = self._client.delete(self.namespace, self._put_hashes)
        assert deleted == len(self._put_hashes), f"{deleted} blocks deleted"

    def _check(self, delivered: int) -> None:
        assert delivered == len(self.hashes), f"{delivered} of {len(self.hashes)} blocks delivered"
        self.wrong_blocks += self.destination.wrong_blocks(self.source)

    @contextmanager
    def _charged(self, cost: Cost) -> Iterator[None]:
        # Nothing old can pass for delivered, and every path finds the caches as its ceiling does.
        self.destination.clear()
        daemon_cpu, client_cpu = self._daemon.cpu_s(), time.process_time()
        with timed(cost.wall_s):
            yield
        cost.client_cpu_s.append(time.process_time() - client_cpu)
        cost.daemon_cpu_s.append(self._daemon.cpu_s() - daemon_cpu)

    # --- figures -----------------------------------------------------------------------

    def figures(self, suffix: str) -> Values:
        """The cell's figures; the main block size has no suffix."""
        get_ceiling, put_ceiling = _bracket(self.memmove.wall_s), _bracket(self.memmove_private.wall_s)
        values: dict[str, float] = {
            "memmove_gbps": self._gbps(self.memmove.wall_s),
            "memmove_private_gbps": self._gbps(self.memmove_private.wall_s),
            "get_gbps": self._gbps(self.get.wall_s),
            "get_ratio": median_ratio(self.get.wall_s, get_ceiling),
            "get_control_ms": median(self.control.wall_s) * 1e3,
            "get_control_share": median_ratio(self.control.wall_s, self.get.wall_s),
            "put_gbps": self._gbps(self.put.wall_s),
            "put_ratio": median_ratio(self.put.wall_s, put_ceiling),
            "put_staged_gbps": self._gbps(self.put_staged.wall_s),
            "put_staged_ratio": median_ratio(self.put_staged.wall_s, put_ceiling),
            "memmove_cpu_s_per_gb": self._per_gb(self.memmove.client_cpu_s),
            "get_client_cpu_s_per_gb": self._per_gb(self.get.client_cpu_s),
            "get_daemon_cpu_s_per_gb": self._per_gb(self.get.daemon_cpu_s),
            "put_client_cpu_s_per_gb": self._per_gb(self.put.client_cpu_s),
            "put_daemon_cpu_s_per_gb": self._per_gb(self.put.daemon_cpu_s),
        }
        return {f"{key}{suffix}": value for key, value in values.items()}

    def _gbps(self, seconds: list[float]) -> float:
        return self.total_bytes / median(seconds) / GB

    def _per_gb(self, seconds: list[float]) -> float:
        return sum(seconds) / len(seconds) / (self.total_bytes / GB)


def _bracket(seconds: list[float]) -> list[float]:
    """The means of the ceilings before and after, one per repeat."""
    return [(before + after) / 2 for before, after in zip(seconds[::2], seconds[1::2], strict=True)]


def call_latencies(call: Callable[[], object], calls: int) -> list[float]:
    """Seconds of each of so many calls, after a few unmeasured ones."""
    for _ in range(min(20, calls)):
        call()
    seconds: list[float] = []
    for _ in range(calls):
        with timed(seconds):
            call()
    return seconds
