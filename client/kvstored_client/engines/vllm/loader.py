"""Loads: from the store into the engine's pages, beside its steps or within one.

Every load is reported, however it ends, and not before nothing is written for it any more: the engine waits for the
report without a limit, and gives the blocks to others after it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from kvstored_client import Namespace, Unavailable, threads
from kvstored_client.engines.vllm.counts import Counts
from kvstored_client.engines.vllm.orders import Load, Run
from kvstored_client.paged import PagedKV

_LOG = logging.getLogger(__name__)
_THREADS: Final = 2
_PIECE_BLOCKS: Final = 64  # as many are held at a time: the first that is missing ends the load early


Order = tuple[Load, Sequence[Namespace]]  # and the namespaces of its groups


class Loader:
    """Loads of one worker."""

    def __init__(self, client: Any, pages: Sequence[PagedKV], counts: Counts, timeout_s: float) -> None:
        """`client` gets; `pages` by group of layers; a load that has not begun within `timeout_s` is given up."""
        self._client = client
        self._pages = pages
        self._counts = counts
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvstored-load")
        self._lock = threading.Lock()
        self._progress = threading.Event()
        self._under_way = 0
        self._ended: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._failed: set[str] = set()

    def submit(self, loads: Sequence[Order]) -> None:
        """Begin these in threads."""
        for order in loads:
            with self._lock:
                self._under_way += 1
            now_s = time.monotonic()
            try:
                threads.submit(self._pool.submit, partial(self._beside, order, now_s))
            except Unavailable:
                _LOG.exception("a load could not begin; the engine computes what it was to bring")
                self._over(order, self._count(order, 0, 0, now_s))

    def load_now(self, loads: Sequence[Order]) -> bool:
        """Load within the step; whether every block came."""
        now_s = time.monotonic()
        missing = [self._load(order, now_s) for order in loads]
        with self._lock:
            self._bad_blocks.update(*missing)
        return not any(missing)

    def take_ended(self) -> tuple[set[str], set[int], set[str]]:
        """Since the last call: requests whose loads beside the steps have ended, all blocks that did not come, and the
        requests among the first that miss some."""
        if not self._ended and not self._bad_blocks:
            return set(), set(), set()  # most steps
        with self._lock:
            ended, self._ended = self._ended, set()
            bad, self._bad_blocks = self._bad_blocks, set()
            failed, self._failed = self._failed, set()
            self._progress.clear()
        return ended, bad, failed

    def wait(self, timeout_s: float) -> None:
        """Until a load ends, where one is under way and the engine has nothing else to do."""
        if self._under_way:
            self._progress.wait(timeout_s)

    def close(self) -> None:
        """End the threads when their loads have ended."""
        self._pool.shutdown(wait=True)

    # ---- in threads ----

    def _beside(self, order: Order, ordered_at_s: float) -> None:
        self._over(order, self._load(order, ordered_at_s))

    def _over(self, order: Order, missing: list[int]) -> None:
        """Report a load that ran beside the steps."""
        with self._lock:
            self._bad_blocks.update(missing)  # visible no later than the end
            if missing:
                self._failed.add(order[0].request_id)
            self._ended.add(order[0].request_id)
            self._under_way -= 1
            self._progress.set()

    def _load(self, order: Order, ordered_at_s: float) -> list[int]:
        """The blocks that did not come: all from the first one that is missing."""
        load, namespaces = order
        blocks = size = 0
        try:
            for run in load.runs:
                came = self._load_run(run, namespaces[run.group], ordered_at_s)
                blocks += came
                size += came * self._pages[run.group].block_bytes
                if came < len(run.hashes):
                    break
        except Exception:  # nothing that fails here may reach the engine
            _LOG.exception("a load failed; the engine computes what it was to bring")
        return self._count(order, blocks, size, ordered_at_s)

    def _count(self, order: Order, blocks: int, size: int, ordered_at_s: float) -> list[int]:
        """A load brought so many blocks and bytes; those that did not come."""
        wanted = order[0].block_ids
        missing = wanted[blocks:]
        self._counts.add(
            loads=1,
            loaded_blocks=blocks,
            loaded_bytes=size,
            load_seconds=time.monotonic() - ordered_at_s,
            failed_loads=1 if missing else 0,
            failed_blocks=len(missing),
        )
        if missing:
            _LOG.warning("%d of %d blocks of a load did not come: they are computed", len(missing), len(wanted))
        return missing

    def _load_run(self, run: Run, namespace: Namespace, ordered_at_s: float) -> int:
        """How many of its blocks came, from the first on."""
        delivered = 0
        while delivered < len(run.hashes) and time.monotonic() - ordered_at_s <= self._timeout_s:
            came = self._load_piece(run, delivered, delivered + _PIECE_BLOCKS, namespace)
            delivered += came
            if not came:
                break
        return delivered

    def _load_piece(self, run: Run, start: int, end: int, namespace: Namespace) -> int:
        """Load blocks `start` to `end`; how many of them came, from the first on."""
        block_ids = run.block_ids[start:end]
        # Answers 0 where the session ended during the copy: what it counts came whole.
        return int(self._client.get_into(namespace, run.hashes[start:end], self._pages[run.group].at(block_ids)))
