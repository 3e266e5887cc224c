"""What a device worker copies, in which pieces, and in which order: plain state, no driver.

Each session has a lane in each direction, with a stream of its own, so that one whose copies do not come to an end
holds up nobody else. What is under way of a lane is bounded; while loads go on, stores wait for all but their share;
and sessions take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvstored_proto.layout import Addresses, Indices

from kvstored.device import worker_messages as messages
from kvstored.device.worker_memory import EngineMemory

FIRST_PIECE_BYTES: Final = 4 << 20  # of what finds its lane idle: copies begin while the next piece is planned
PIECE_BYTES: Final = 32 << 20  # about a millisecond of a PCIe link; what a load may have to wait for
TOLD_PIECE_BYTES: Final = 8 << 20  # where each is told, since somebody works on it while the next is copied
LANE_BYTES: Final = 64 << 20  # under way at most: the stream has work while one piece is waited for
LOADS_A_STORE: Final = 8  # pieces of loads, then one of a store: endless loads do not keep it waiting for ever
PATIENCE_S: Final = 0.1  # loads of which no piece has ended for so long do not keep stores waiting either


class Part(NamedTuple):
    """A piece of a transfer: fragments [first, end) of its blocks [first, end). `done` is told once it is copied."""

    first_fragment: int
    end_fragment: int
    first_block: int
    end_block: int
    size_bytes: int
    done: int


@dataclass(eq=False, slots=True)
class Job:
    """One transfer."""

    request: messages.Transfer
    memory: EngineMemory
    ids: Indices
    slots: Addresses
    segment_ids: set[int]
    behind: bool = False  # others of its lane are under way: the device has work while this is planned
    parts: Iterator[Part] = field(init=False)
    next_part: Part | None = field(init=False)
    in_flight: int = 0
    error: str = ""

    def __post_init__(self) -> None:
        self.parts = _parts(self)
        self.advance()

    def advance(self) -> None:
        """On to the next part."""
        self.next_part = next(self.parts, None)

    @property
    def submitted(self) -> bool:
        """Nothing more of it will be submitted."""
        return bool(self.error) or self.next_part is None


def _parts(job: Job) -> Iterator[Part]:
    """All blocks of the first layers, then of the next: whole blocks where there is one layer only."""
    request, layout = job.request, job.memory.layout
    cuts = request.cuts or [0, len(layout.fragments)]
    if request.tells != messages.TELLS_LAYERS:
        cuts = [cuts[0], cuts[-1]]
    limit_bytes = TOLD_PIECE_BYTES if request.tells else PIECE_BYTES
    piece_bytes = limit_bytes if job.behind else FIRST_PIECE_BYTES
    count, each = job.ids.shape
    for first, end, layers in _together(job, cuts):
        block_bytes = int(layout.sizes[first:end].sum()) * each
        start = 0
        while start < count:
            stop = min(count, start + max(1, piece_bytes // block_bytes))
            done = {messages.TELLS_BLOCKS: stop, messages.TELLS_LAYERS: layers if stop == count else 0}
            yield Part(first, end, start, stop, block_bytes * (stop - start), done.get(request.tells, 0))
            start, piece_bytes = stop, min(limit_bytes, 2 * piece_bytes)


def _together(job: Job, cuts: list[int]) -> Iterator[tuple[int, int, int]]:
    """Fragments of layers that are copied together, and how many layers are done then: small ones share a piece."""
    sizes, blocks = job.memory.layout.sizes, job.ids.size
    first = cuts[0]
    for number, end in enumerate(cuts[1:], 1):
        last = number == len(cuts) - 1
        if last or int(sizes[first:end].sum()) * blocks > FIRST_PIECE_BYTES // 2:
            yield first, end, number
            first = end


@dataclass(slots=True)
class Piece:
    """Copies under way."""

    job: Job
    part: Part
    event: int


@dataclass(eq=False, slots=True)
class Lane:
    """One session's transfers in one direction."""

    stream: int
    to_device: bool
    waiting: deque[Job] = field(default_factory=deque)
    running: deque[Piece] = field(default_factory=deque)
    in_flight_bytes: int = 0
    since_s: float = 0.0  # the oldest piece that runs has been the oldest for so long

    @property
    def may_submit(self) -> bool:
        """Whether another piece of it may be under way."""
        return bool(self.waiting) and self.in_flight_bytes < LANE_BYTES

    def moves(self, now: float) -> bool:
        """Whether pieces of it are under way that come to an end."""
        return bool(self.running) and now < self.since_s + PATIENCE_S


class Lanes:
    """All lanes that have something to do."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, bool], Lane] = {}
        self._idle: list[int] = []  # streams
        self._loads = 0  # pieces of loads since the last one of a store

    def __iter__(self) -> Iterator[Lane]:
        return iter(list(self._lanes.values()))

    def spare_stream(self) -> int | None:
        """One that nobody uses."""
        return self._idle.pop() if self._idle else None

    def of(self, request: messages.Transfer) -> Lane | None:
        """The transfer's, where it has something to do."""
        return self._lanes.get((request.owner, request.to_device))

    def add(self, job: Job, stream: int) -> Lane:
        """A new one, for a job."""
        lane = self._lanes[job.request.owner, job.request.to_device] = Lane(stream, job.request.to_device)
        return lane

    def next(self, now: float) -> Lane | None:
        """Whose piece is to be submitted now. It comes last the next time."""
        load, store = self._first(to_device=True), self._first(to_device=False)
        if (
            load is None
            and self._loads < LOADS_A_STORE
            and any(lane.to_device and lane.moves(now) for lane in self._lanes.values())
        ):
            return None
        chosen = store if load is None or (store is not None and self._loads >= LOADS_A_STORE) else load
        if chosen is None:
            return None
        self._loads = self._loads + 1 if chosen[1] else 0
        lane = self._lanes[chosen] = self._lanes.pop(chosen)
        return lane

    def _first(self, *, to_device: bool) -> tuple[int, bool] | None:
        return next((key for key, lane in self._lanes.items() if key[1] == to_device and lane.may_submit), None)

    def settle(self) -> None:
        """Let go of lanes that have nothing to do."""
        for key, lane in list(self._lanes.items()):
            if not lane.waiting and not lane.running:
                del self._lanes[key]
                self._idle.append(lane.stream)
