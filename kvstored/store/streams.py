"""Streamed commits: blocks that are copied while their client fills the next ones (see `kvstored_proto.progress`).

A copier thread goes along behind the client, block by block, and hands what it has copied to the loop in pieces. It
does not stay for a client that pauses, nor where other streams wait for a thread: the stream has another turn later,
and the later the less the last one was worth, so that nobody keeps a thread busy by filling a block now and then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvstored_proto.progress import ENDED, Taker

from kvstored.device import memory
from kvstored.store.parts import Parts
from kvstored.store.tasks import Tasks

Copy = tuple[int, int, int]  # destination, source, bytes
Copied = Callable[[list[bytes], float], None]  # content hashes of the next blocks, and the seconds of copying them

PIECE_BLOCKS: Final = 32  # handed to the loop together
TURN_S: Final = 0.005  # then others that wait for a copier thread have theirs
SLEEP_S: Final = 0.0005  # until the next block is filled; a client that goes on takes less
WORTHWHILE: Final = 1 / 8  # of a turn is copying
PAUSE_MIN_S: Final = 0.001  # between turns of which the last was not
PAUSE_MAX_S: Final = 0.05
STREAMS_AWAKE: Final = 16  # of more than these each pauses longer, or those of which nothing comes would keep the loop
IDLE_MAX_S = 10.0  # who fills nothing for so long will not go on


class Streams:
    """All that are under way, and how many of them want a copier thread."""

    def __init__(self, parts: Parts) -> None:
        self._copiers = parts.copiers
        self._threads = parts.copy_threads
        self._wanting = 0
        self.tasks = Tasks()

    @property
    def crowded(self) -> bool:
        """Whether one waits for a thread. From any thread."""
        return self._wanting > self._threads

    async def in_thread(self, turn: Callable[[], bool]) -> bool:
        """Run it in a copier thread."""
        self._wanting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._copiers, turn)
        finally:
            self._wanting -= 1


class Stream:
    """One streamed commit."""

    def __init__(
        self,
        streams: Streams,
        progress: Taker,
        copies: Sequence[Copy],
        stopped: Callable[[], bool],
        copied: Copied,
    ) -> None:
        """`stopped`: nobody is interested any more; asked in any thread. `copied` is called in the loop, in order."""
        self._streams = streams
        self._progress = progress
        self._copies = copies
        self._stopped = stopped
        self._copied = copied
        self._loop = asyncio.get_running_loop()
        self._position = 0
        self._over = False
        self._hashes: list[bytes] = []  # of blocks that the loop does not know of yet
        self._copying_s = 0.0

    async def run(self) -> None:
        """Until all is copied, or the client ends it or has paused for too long. Not to be cancelled."""
        pause_s, idle_s = PAUSE_MIN_S, 0.0
        while not self._over and not self._stopped() and idle_s < IDLE_MAX_S:
            before = self._position
            worthwhile = await self._streams.in_thread(self._turn)
            if worthwhile or self._over:
                pause_s, idle_s = PAUSE_MIN_S, 0.0
                continue
            sleep_s = pause_s * max(1.0, len(self._streams.tasks) / STREAMS_AWAKE)
            idle_s = idle_s + sleep_s if self._position == before else 0.0
            await asyncio.sleep(sleep_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    # ---- in a copier thread ----

    def _turn(self) -> bool:
        """Copy what is filled, and what is filled meanwhile; whether that was worth the thread's time."""
        began_s, copying_s, slept = time.perf_counter(), 0.0, False
        while (now_s := time.perf_counter()) < began_s + TURN_S:
            end = self._filled()
            if self._over:
                break
            if end > self._position:
                copying_s += self._copy(min(end, self._position + PIECE_BLOCKS - len(self._hashes)))
                slept = False
            elif slept or self._streams.crowded:
                break
            else:
                self._progress.wait(self._position, SLEEP_S)
                slept = True
        self._hand_over()
        return copying_s > WORTHWHILE * (now_s - began_s)

    def _filled(self) -> int:
        """So many leading blocks are. Notices the end."""
        filled, count = self._progress.filled(), len(self._copies)
        self._over = self._position == count or filled == ENDED or self._stopped()
        self._over |= not self._position <= filled <= count  # nonsense
        return filled

    def _copy(self, end: int) -> float:
        """Copy blocks up to `end`; the seconds that it took."""
        began_s = time.perf_counter()
        for place in self._copies[self._position : end]:
            self._hashes.append(memory.copy_and_hash(*place))
            self._position += 1
            self._progress.take(self._position)
        took_s = time.perf_counter() - began_s
        self._copying_s += took_s
        if len(self._hashes) >= PIECE_BLOCKS:
            self._hand_over()
        return took_s

    def _hand_over(self) -> None:
        if self._hashes:
            self._loop.call_soon_threadsafe(self._copied, self._hashes, self._copying_s)
            self._hashes, self._copying_s = [], 0.0
