"""Saves in a thread of their own: from the engine's pages to the store, while the engine goes on.

The engine may take blocks of a save back at any time: when `cancel` returns, nothing reads them any more. What a save
has left is stored: of full attention the blocks before the first that was taken, of a window all others.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from kvstored_client import Namespace, Outcome, Unavailable, threads
from kvstored_client.buffers import spans_of
from kvstored_client.engines.vllm.counts import Counts
from kvstored_client.engines.vllm.orders import Save
from kvstored_client.paged import PagedKV

_LOG = logging.getLogger(__name__)
_PIECE_BYTES: Final = 8 << 20  # as much as is reserved, copied and committed at a time
_AGE_MAX_S: Final = 10.0  # an older save is given up: its request may be waiting for it


class _Job:
    """One save. Its lock is held while its blocks are read."""

    def __init__(self, save: Save, namespace: Namespace, pages: PagedKV) -> None:
        self.save = save
        self.namespace = namespace
        self.pages = pages
        self.since_s = time.monotonic()
        self.reading = threading.Lock()
        self.taken: set[int] = set()  # blocks that are the engine's again
        self.stored = 0  # bit i: block i is in the store

    def next_stretch(self, start: int, count: int) -> tuple[int, int]:
        """First and end of the next at most `count` consecutive blocks from `start` on that may be read."""
        blocks, length = self.save.run.block_ids, len(self.save.run.block_ids)
        first = next((i for i in range(start, length) if blocks[i] not in self.taken), length)
        if first > start and not self.save.alone:
            return length, length
        most = min(first + count, length)
        return first, next((i for i in range(first, most) if blocks[i] in self.taken), most)


class Saver:
    """The thread that saves, and what it has to do."""

    def __init__(self, client: Any, pages: Sequence[PagedKV], counts: Counts, wait_s: float) -> None:
        """`client` stages and commits; `pages` by group of layers; `wait_s`: how long a save waits for room."""
        self._client = client
        self._pages = pages
        self._counts = counts
        self._wait_s = wait_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._under_way: dict[int, _Job] = {}
        self._ended: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self._running()

    def submit(self, saves: Iterable[tuple[Save, Sequence[Namespace]]]) -> None:
        """Begin these, each with the namespaces of its groups, when those before them are done.

        Where there is no thread to save in, they are over with nothing stored.
        """
        if not self._running():
            self.refuse((save for save, _ in saves), 0)
            return
        for save, namespaces in saves:
            group = save.run.group
            job = _Job(save, namespaces[group], self._pages[group])
            with self._lock:
                self._under_way[save.job_id] = job
            self._jobs.put(job)

    def cancel(self, taken: Mapping[int, set[int]]) -> None:
        """These blocks of these jobs are about to be overwritten: returns when none is being read."""
        for job_id, blocks in taken.items():
            with self._lock:
                job = self._under_way.get(job_id)
            if job is not None:
                with job.reading:
                    job.taken |= blocks

    def refuse(self, saves: Iterable[Save], stored: int) -> None:
        """Count these as ended without a start; `stored`: what is there of them all the same."""
        with self._lock:
            self._ended |= {save.job_id: stored for save in saves}

    def take_ended(self) -> dict[int, int]:
        """Jobs that have ended since the last call, however, and what of each is stored (`Report.stored`)."""
        if not self._ended:
            return {}  # most steps
        with self._lock:
            ended, self._ended = self._ended, {}
        return ended

    def requests(self) -> set[str]:
        """The requests whose blocks are still needed."""
        with self._lock:
            return {job.save.request_id for job in self._under_way.values()}

    def close(self) -> None:
        """Save what is under way, then end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _running(self) -> bool:
        """Whether there is a thread; it begins at the engine's start or, where there was none to be had, later."""
        try:
            self._thread = self._thread or threads.start(self._run, "kvstored-save")
        except Unavailable:
            _LOG.exception("nothing can be saved now")
        return self._thread is not None

    # ---- in the thread ----

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            started_s = time.monotonic()
            try:
                self._save(job)
            except Exception:  # nothing that fails here may reach the engine
                _LOG.exception("a save failed; its blocks are not stored")
            finally:
                with self._lock:
                    self._under_way.pop(job.save.job_id, None)
                    self._ended[job.save.job_id] = job.stored
            self._counts.add(save_seconds=time.monotonic() - started_s)

    def _save(self, job: _Job) -> None:
        save, hashes = job.save, job.save.run.hashes
        piece = max(1, _PIECE_BYTES // job.pages.block_bytes)
        at = 0
        while at < len(hashes):
            if time.monotonic() - job.since_s > _AGE_MAX_S:
                self._counts.add(skipped_saves=1)
                break
            with job.reading:
                first, end = job.next_stretch(at, piece)
            if first == end:
                break
            parent = hashes[first - 1] if first else save.parent
            stored = self._save_piece(job, first, end, parent)
            if stored is None:
                continue  # some were taken meanwhile
            if not stored and not save.alone:
                break  # a block without its parent is of no use to anyone
            at = end
        if job.taken:
            self._counts.add(cancelled_saves=1)

    def _save_piece(self, job: _Job, start: int, end: int, parent: bytes) -> bool | None:
        """Store blocks `start` to `end` of a job; whether all of them are there now. None: some may not be read."""
        hashes, block_ids = job.save.run.hashes[start:end], job.save.run.block_ids[start:end]
        size = job.pages.block_bytes
        with self._client.stage(job.namespace, hashes, size, parent=parent, wait_s=self._wait_s) as staged:
            with job.reading:
                if not job.taken.isdisjoint(block_ids):
                    return None
                self._fill(job.pages, staged.views, block_ids)
            result = staged.commit()
        job.stored |= sum(1 << start + i for i, each in enumerate(result.outcomes) if each is Outcome.HIT)
        self._counts.add(
            saved_blocks=result.stored,
            saved_bytes=result.stored * size,
            existing_blocks=result.existing,
            refused_blocks=result.refused,
        )
        return bool(result.stored + result.existing + result.pending == len(hashes))

    def _fill(self, pages: PagedKV, views: list[memoryview | None], block_ids: list[int]) -> None:
        wanted = [i for i, view in enumerate(views) if view is not None]
        if wanted:
            targets = spans_of([views[i] for i in wanted], len(wanted), writable=True)
            pages.at(block_ids).place(len(block_ids), writable=False).read(wanted, targets.addresses)
