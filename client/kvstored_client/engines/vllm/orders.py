"""What the scheduler's half tells the workers in each step, and what they tell it. Plain data: it is pickled."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

ALL: Final = -1  # every bit: of a worker whose blocks another one stores


@dataclass(slots=True)
class Run:
    """Consecutive blocks of one group of layers."""

    group: int
    hashes: list[bytes]
    block_ids: list[int]


@dataclass(slots=True)
class Load:
    """Bring these blocks of one request from the store into the engine's memory."""

    request_id: str
    runs: list[Run]
    adapter: str = ""  # identity of the adapter that the request is computed with

    @property
    def block_ids(self) -> list[int]:
        """The blocks of all groups."""
        return [block for run in self.runs for block in run.block_ids]


@dataclass(slots=True)
class Save:
    """Store consecutive blocks of one request; the engine keeps them as they are until that is done or cancelled."""

    job_id: int
    request_id: str
    run: Run
    parent: bytes  # hash of the block before the first; empty where the sequence starts here
    adapter: str = ""
    alone: bool = False  # each block is of use without those before it


@dataclass(slots=True)
class Step:
    """The work of one step of the engine."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    taken: dict[int, set[int]] = field(default_factory=dict)  # of saves by job: blocks that are about to be overwritten
    leaving: list[str] = field(default_factory=list)  # finished requests whose blocks wait for their saves
    idle: bool = False  # nothing is computed in this step
    generation: str = ""  # another text after the engine's cache was reset: nothing older is of use


@dataclass(slots=True)
class Report:
    """What a worker has finished since its last report; of several workers, how many."""

    saved: dict[int, int] = field(default_factory=dict)  # by job
    stored: dict[int, int] = field(default_factory=dict)  # by job: bit i says whether its block i is in the store
    loaded: dict[str, int] = field(default_factory=dict)  # by request, failed loads too

    def merge(self, other: Report) -> Report:
        """Both together."""
        return Report(
            dict(Counter(self.saved) + Counter(other.saved)),
            all_stored(self.stored, other.stored),
            dict(Counter(self.loaded) + Counter(other.loaded)),
        )

    def __bool__(self) -> bool:
        return bool(self.saved or self.loaded)


def all_stored(one: dict[int, int], other: dict[int, int]) -> dict[int, int]:
    """What both have stored, of jobs that one or both have ended."""
    return {job_id: one.get(job_id, ALL) & other.get(job_id, ALL) for job_id in one | other}
