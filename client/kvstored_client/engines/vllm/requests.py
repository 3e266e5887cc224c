"""What is known of each request, and which of its blocks to save in a step. Pure: no I/O, nothing waits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvstored_client.engines.vllm.cuts import Track
from kvstored_client.engines.vllm.orders import ALL, Run, Save
from kvstored_client.engines.vllm.pins import Pins
from kvstored_client.engines.vllm.shape import Group, Shape

_NOTHING: Final = 0  # the engine's block that stands for none
# What is generated is saved so much at a time: each save is two messages, and steps are short.
_BATCH_BLOCKS: Final = 16
_BATCH_BYTES: Final = 4 << 20


@dataclass(slots=True)
class Tracked:
    """A request as the engine has it."""

    request: Any
    block_ids: list[list[int]] = field(default_factory=list)  # of each group; those it has dropped may be stale
    saved_tokens: int = 0  # the blocks of so many leading tokens are stored, or on their way
    loading: frozenset[int] = frozenset()  # blocks that a load under way fills
    no_load: bool = False  # a load failed: what is left is computed, or the engine would try for ever
    adapter: str = ""  # what its adapter holds
    stale: bool = False  # some of its KV is from before a reset
    whose: tuple[str, str] = ("", "")  # of which generation and adapter its namespaces are
    tracks: tuple[Track, ...] | None = None  # these

    def tracks_in(self, generation: str, make: Callable[[str, str], tuple[Track, ...]]) -> tuple[Track, ...]:
        """Its namespaces, kept for as long as it waits: with others its question would be a new one."""
        if self.tracks is None or self.whose != (generation, self.adapter):
            self.whose = generation, self.adapter
            self.tracks = make(*self.whose)
        return self.tracks


class Saves:
    """Which blocks are to be saved, and which saves are under way.

    The engine drops what a window has left behind in its very next step, so the blocks of windows are pinned until they
    are saved. Others it may give away only after their request was preempted, since finished requests keep theirs until
    they are saved: `take_back` finds those saves by the blocks that a step writes to, as it does all where the engine
    has no pins.
    """

    def __init__(self, shape: Shape, under_way_max: int) -> None:
        self._shape = shape
        self._under_way_max = under_way_max
        self._lengths = sorted({group.block_tokens for group in shape.groups})
        self._batch_tokens = _batch_tokens(shape)
        self._numbers = itertools.count(1)
        self._jobs: dict[int, Save] = {}
        self._reports: dict[int, tuple[int, int]] = {}  # workers that have ended it, what all of them have stored
        self._sources: dict[int, set[int]] = {}  # block: the jobs that read it
        self._of_request: dict[str, int] = {}
        self.pins: Pins | None = None
        self.blocks_under_way = 0
        self.skipped = 0  # saves that were not begun

    @property
    def batched(self) -> bool:
        """Whether blocks that are full may not be saved yet."""
        return self._batch_tokens > 0

    def any_due(self, tracked: Tracked, computed_tokens: int) -> bool:
        """Whether it is time for `due`. Asked for each request in each step."""
        saved = tracked.saved_tokens
        if all(computed_tokens // length <= saved // length for length in self._lengths):
            return False
        batch = self._batch_tokens
        return computed_tokens <= tracked.request.num_prompt_tokens or computed_tokens - saved >= batch or not batch

    def due(self, tracked: Tracked, before_tokens: int, computed_tokens: int) -> list[Save]:
        """The blocks that will be full when `computed_tokens` are computed and that are not saved yet.

        `before_tokens` are computed before this step: what a window does not reach from there the engine has dropped.
        None where so many are under way that more would only keep memory from the engine. Block hashes never cover
        draft tokens, so a block that may still change is not among them.
        """
        request, shape = tracked.request, self._shape
        known = (len(tracked.block_ids[group.number]) * group.block_tokens for group in shape.groups)
        full = min(computed_tokens, len(request.block_hashes) * shape.hash_tokens, *known)
        runs = [run for g in shape.groups if (run := self._run(g, tracked, before_tokens, full)) is not None]
        if not runs:
            return []
        tracked.saved_tokens = full
        if self.blocks_under_way >= self._under_way_max:
            self.skipped += 1
            return []
        return [self._begin(tracked, run, parent) for run, parent in runs]

    def _run(self, group: Group, tracked: Tracked, before_tokens: int, full_tokens: int) -> tuple[Run, bytes] | None:
        """The unsaved blocks of one group, and the hash of the block before them."""
        table, length = tracked.block_ids[group.number], group.block_tokens
        end = full_tokens // length
        first = max(tracked.saved_tokens // length, group.first_needed(before_tokens))
        if group.window_tokens:  # what was never there has the number 0
            first = next((i + 1 for i in range(end - 1, first - 1, -1) if table[i] == _NOTHING), first)
        if end <= first:
            return None
        hashes = self._shape.keys(length, tracked.request.block_hashes, max(0, first - 1), end)
        parent = hashes.pop(0) if first else b""
        return Run(group.number, hashes, table[first:end]), parent

    def take_back(self, written: Iterable[int]) -> dict[int, set[int]]:
        """Saves of blocks that this step writes to, with these: they must not be read any more."""
        taken: dict[int, set[int]] = {}
        if self._sources:
            for block in written:
                for job in self._sources.get(block, ()):
                    taken.setdefault(job, set()).add(block)
        return taken

    def under_way(self, request_id: str) -> bool:
        """Whether blocks of this request are being saved."""
        return request_id in self._of_request

    def reported(self, saved: Mapping[int, int], stored: Mapping[int, int]) -> list[tuple[Save, int]]:
        """So many workers have ended these saves, and so much of them is stored (`Report`); those that are over now."""
        over = []
        for job_id, count in saved.items():
            workers, there = self._reports.get(job_id, (0, ALL))
            workers, there = workers + count, there & stored.get(job_id, 0)
            if workers < self._shape.workers:
                self._reports[job_id] = workers, there
            elif job_id in self._jobs:
                self._reports.pop(job_id, None)
                save = self._jobs.pop(job_id)
                self._end(save)
                over.append((save, there))
        return over

    def _begin(self, tracked: Tracked, run: Run, parent: bytes) -> Save:
        alone = bool(self._shape.groups[run.group].window_tokens)
        save = Save(next(self._numbers), tracked.request.request_id, run, parent, tracked.adapter, alone)
        self._jobs[save.job_id] = save
        self._of_request[save.request_id] = self._of_request.get(save.request_id, 0) + 1
        self.blocks_under_way += len(run.block_ids)
        for block in run.block_ids:
            self._sources.setdefault(block, set()).add(save.job_id)
        if alone and self.pins is not None:
            self.pins.hold(run.block_ids)
        return save

    def _end(self, save: Save) -> None:
        left = self._of_request[save.request_id] - 1
        if left:
            self._of_request[save.request_id] = left
        else:
            del self._of_request[save.request_id]
        self.blocks_under_way -= len(save.run.block_ids)
        for block in save.run.block_ids:
            jobs = self._sources[block]
            jobs.discard(save.job_id)
            if not jobs:
                del self._sources[block]
        if save.alone and self.pins is not None:
            self.pins.release(save.run.block_ids)


def _batch_tokens(shape: Shape) -> int:
    """How much is generated of a request before it is saved; 0: each block, since a window leaves blocks behind."""
    if any(group.window_tokens for group in shape.groups):
        return 0
    unit = shape.unit_tokens
    unit_bytes = sum(unit // group.block_tokens * group.block_bytes for group in shape.groups)
    return unit * max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // unit_bytes))


def written_blocks(shape: Shape, block_ids: list[list[int]], computed_tokens: int) -> list[int]:
    """The blocks of a request that a step may write to: all but those that are computed already."""
    tables = zip(shape.groups, block_ids, strict=False)  # no tables yet: nothing is written
    return [block for group, table in tables for block in table[computed_tokens // group.block_tokens :]]
