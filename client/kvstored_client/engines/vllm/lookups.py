"""Which prefix of a waiting request is stored: asked beside the engine's steps, held until it is loaded.

The engine asks again in every step, so an answer is a look into a dictionary. Behind it one thread takes leases on what
is in DRAM; what must come up from NVMe, or is being written, is waited for by a few more. A promise is a lease: its
blocks cannot vanish before the load, whatever is evicted meanwhile.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from kvstored_client import LookupResult, Namespace, Outcome, Unavailable, threads
from kvstored_client.engines.vllm.counts import Counts
from kvstored_client.engines.vllm.cuts import Held, Question, Source, Track, hold
from kvstored_client.engines.vllm.shape import Shape

_LOG = logging.getLogger(__name__)
_BRINGING_UP: Final = 4  # threads that wait for NVMe
_COMING: Final = (Outcome.PENDING, Outcome.THROTTLED)


class Client(Source, Protocol):
    """What this needs of a client."""

    def lookup(
        self, namespaces: Sequence[Namespace], hashes: Sequence[bytes], *, prefill_tokens_per_s: float
    ) -> LookupResult:
        """How many leading blocks are stored, and how many of them pay."""


@dataclass(slots=True)
class Lookup:
    """One question, and its answer."""

    question: Question
    asked_at_s: float
    end: int = -1  # the answer: the request can go on after so many units, what it needs is held; below 0: none yet
    held: Held | None = None
    unwanted: bool = False  # nobody waits for it: what it holds is let go

    @property
    def answered(self) -> bool:
        """Whether `end` is the answer."""
        return self.end >= 0


@dataclass(slots=True)
class Lookups:
    """The questions of all waiting requests. Its methods are called by the engine's one scheduling thread."""

    client: Client
    shape: Shape
    counts: Counts
    wait_s: float
    prefill_tokens_per_s: float = 0.0  # how fast the engine computes; 0: not known, all is loaded
    clock: Callable[[], float] = time.monotonic
    _of_request: dict[str, Lookup] = field(default_factory=dict)
    _asked: queue.SimpleQueue[Lookup | None] = field(default_factory=queue.SimpleQueue)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _progress: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _bringing_up: ThreadPoolExecutor | None = None

    def answer(
        self, request_id: str, start: int, block_hashes: Sequence[bytes], end: int, tracks: tuple[Track, ...]
    ) -> int | None:
        """Up to where, between the units `start` and `end`, all that is needed is held; None: not known yet, ask again.

        `block_hashes` are those of the whole request. Asks the store where it was not asked yet, or about later blocks
        only.
        """
        lookup = self._of_request.get(request_id)
        if lookup is not None and (start < lookup.question.start or lookup.question.tracks is not tracks):
            self.drop(request_id)  # the engine has lost some of its own blocks meanwhile, or all became another's
            lookup = None
        if lookup is None:
            known = block_hashes[: end * self.shape.unit_tokens // self.shape.hash_tokens]
            lookup = Lookup(Question(self.shape, tracks, known, start, end), self.clock())
            self._of_request[request_id] = lookup
            if self._running():
                self._asked.put(lookup)
            else:
                self._settle(lookup, None)
        if lookup.answered:
            return max(lookup.end, start)
        if self.clock() - lookup.asked_at_s < self.wait_s:
            return None
        self.counts.add(lookup_late=1)
        self._settle(lookup, None)
        return start

    def range_of(self, request_id: str) -> tuple[int, int]:
        """The units of an answer, first and one past the last; nothing where there is none."""
        lookup = self._of_request.get(request_id)
        return (lookup.question.start, max(lookup.end, lookup.question.start)) if lookup is not None else (0, 0)

    def take(self, request_id: str) -> Held | None:
        """The hold behind an answer; it is the caller's from now on."""
        lookup = self._of_request.pop(request_id, None)
        return lookup.held if lookup is not None else None

    def drop(self, request_id: str) -> bool:
        """The request wants no blocks any more; what is held for it is let go, now or when the answer comes.

        Whether it had been asked for.
        """
        lookup = self._of_request.pop(request_id, None)
        if lookup is None:
            return False
        with self._lock:
            lookup.unwanted = True
            held, lookup.held = lookup.held, None
        if held is not None:
            held.release()
        return True

    @property
    def waiting(self) -> bool:
        """Whether a question is open."""
        return any(not lookup.answered for lookup in self._of_request.values())

    def wait(self, timeout_s: float) -> None:
        """Until an answer comes, where nothing else is to be done."""
        self._progress.wait(timeout_s)
        self._progress.clear()

    def close(self) -> None:
        """Let go of everything and end the threads."""
        for request_id in list(self._of_request):
            self.drop(request_id)
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join()
        if self._bringing_up is not None:
            self._bringing_up.shutdown(wait=True, cancel_futures=True)

    # ---- in threads ----

    def _running(self) -> bool:
        """Whether there is a thread that asks; begins it where there is none yet."""
        if self._thread is None:
            self._bringing_up = ThreadPoolExecutor(_BRINGING_UP, thread_name_prefix="kvstored-bring-up")
            try:
                self._thread = threads.start(self._run, "kvstored-lookup")
            except Unavailable:
                _LOG.exception("nothing can be looked up now; requests are computed without the store")
        return self._thread is not None

    def _run(self) -> None:
        while (lookup := self._asked.get()) is not None:
            self._look(lookup, lookup.question.end, 0.0)

    def _look(self, lookup: Lookup, end: int, wait_s: float) -> None:
        """Take what is there; where more of it is coming and there is time, leave the waiting to another thread."""
        if lookup.unwanted:
            return
        held: Held | None = None
        question = lookup.question
        try:
            held = hold(self.client, question, end, wait_s)
            there = question.start + len(held)
            coming = there < end and held.outcome in _COMING and not wait_s
            worth = self._worth(question) if coming else there
            left_s = lookup.asked_at_s + self.wait_s - self.clock()
            if worth > there and left_s > 0.0 and self._bringing_up is not None:
                before, held = held, None  # nobody is promised what is let go here
                before.release()  # the hold that waits has all of it
                threads.submit(self._bringing_up.submit, partial(self._look, lookup, worth, left_s))
                return
        except Exception:  # nothing that fails here may fail a request
            _LOG.exception("a look-up failed; the request is computed without the store")
        self._settle(lookup, held)

    def _worth(self, question: Question) -> int:
        """Up to where to wait for blocks: for those that come no later than the engine would have computed them.

        Told by the groups with full attention, which have the most.
        """
        track = question.tracks[0]
        if not self.prefill_tokens_per_s or track.like.window_tokens:
            return question.end
        wanted, rate = question.keys(track, question.end), self.prefill_tokens_per_s
        return question.units(
            track, self.client.lookup(track.namespaces, wanted, prefill_tokens_per_s=rate).paying_blocks
        )

    def _settle(self, lookup: Lookup, held: Held | None) -> None:
        with self._lock:
            late = lookup.unwanted or lookup.answered
            if not late:
                found = len(held) if held is not None else 0
                lookup.held = held if found else None
                lookup.end = lookup.question.start + found
        if late:
            if held is not None:
                held.release()
            return
        elapsed_s = self.clock() - lookup.asked_at_s
        self.counts.add(lookups=1, lookup_hits=1 if found else 0, lookup_seconds=elapsed_s)
        self._progress.set()
