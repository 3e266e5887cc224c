"""Where a request can go on from: the longest cut of which every group of layers has what it needs.

Full attention needs every block before the cut, a sliding window only the last few. So the leading run of the groups
with full attention bounds the cut, and from there it goes back until all windows are whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvstored_client import Namespace, Outcome
from kvstored_client.engines.vllm.shape import Group, Shape

_TRIES: Final = 3  # cuts that are tried: what was there a moment ago may be gone


class Held(Protocol):
    """Leading blocks that are held until released: `kvstored_client.Blocks`."""

    outcome: Outcome

    def __len__(self) -> int: ...

    def release(self) -> None:
        """End the hold."""


class Source(Protocol):
    """What this needs of a client."""

    def get(self, namespaces: Sequence[Namespace], hashes: Sequence[bytes], wait_s: float) -> Held:
        """Hold the leading blocks."""

    def contains(self, namespace: Namespace, hashes: Sequence[bytes]) -> list[Outcome]:
        """For each block by itself whether it is stored."""


@dataclass(frozen=True, slots=True)
class Track:
    """Groups whose blocks are of one length and needed alike: they are asked for together."""

    like: Group
    namespaces: list[Namespace]


def tracks_of(shape: Shape, namespaces: Sequence[Sequence[Namespace]]) -> tuple[Track, ...]:
    """The tracks of an engine, those of full attention first. `namespaces`: for each group those of its shards."""
    found: dict[tuple[int, int], Track] = {}
    for group, shards in zip(shape.groups, namespaces, strict=True):
        track = found.setdefault((group.window_tokens, group.block_tokens), Track(group, []))
        track.namespaces.extend(shards)
    return tuple(sorted(found.values(), key=lambda track: track.like.window_tokens))


@dataclass(slots=True)
class Question:
    """Up to where can a request go on that has `start` units of the engine's own, of `end`?"""

    shape: Shape
    tracks: tuple[Track, ...]
    block_hashes: Sequence[bytes]
    start: int
    end: int

    @property
    def plain(self) -> bool:
        """Every block is needed and found by one question."""
        return len(self.tracks) == 1 and not self.tracks[0].like.window_tokens

    def keys(self, track: Track, cut: int) -> list[bytes]:
        """Keys of the blocks beyond `start` that the track needs for a cut after so many units."""
        return self._keys(track, track.like.first_needed(cut * self.shape.unit_tokens), cut)

    def all_keys(self, track: Track, cut: int) -> list[bytes]:
        """Keys of all its blocks beyond `start` and up to a cut."""
        return self._keys(track, 0, cut)

    def _keys(self, track: Track, first: int, cut: int) -> list[bytes]:
        unit, length = self.shape.unit_tokens, track.like.block_tokens
        return self.shape.keys(length, self.block_hashes, max(first, self.start * unit // length), cut * unit // length)

    def units(self, track: Track, blocks: int) -> int:
        """The cut, in units, after so many leading blocks of a track."""
        return self.start + blocks * track.like.block_tokens // self.shape.unit_tokens

    def last_cut(self, present: Sequence[Sequence[bool]], below: int) -> int:
        """The largest cut under `below` for which each window track has its blocks; `start` where there is none.

        `present`: for each of these tracks, in their order, whether each block beyond `start` is stored.
        """
        runs = [_runs(each) for each in present]
        windows = [track for track in self.tracks if track.like.window_tokens]
        for cut in range(below - 1, self.start, -1):
            tokens = cut * self.shape.unit_tokens
            if all(self._whole(track, run, tokens) for track, run in zip(windows, runs, strict=True)):
                return cut
        return self.start

    def _whole(self, track: Track, run: list[int], tokens: int) -> bool:
        length = track.like.block_tokens
        own = self.start * self.shape.unit_tokens // length
        end, first = tokens // length, track.like.first_needed(tokens)
        return run[end - own] >= end - max(first, own)


def _runs(present: Sequence[bool]) -> list[int]:
    """For each number of leading blocks, how many of the last of them are there without a gap."""
    runs = [0]
    for there in present:
        runs.append(runs[-1] + 1 if there else 0)
    return runs


@dataclass(slots=True)
class Together:
    """What of all tracks is held for one cut, as one hold of so many units."""

    count: int = 0
    outcome: Outcome = Outcome.MISS
    parts: list[Held] = field(default_factory=list)

    def __len__(self) -> int:
        return self.count

    def release(self) -> None:
        """End the hold."""
        parts, self.parts, self.count = self.parts, [], 0
        for part in parts:
            part.release()


def hold(source: Source, question: Question, end: int, wait_s: float) -> Held:
    """Hold what is needed to go on after the longest cut up to `end`; its length is in units beyond the start.

    Waits, at most `wait_s` for each track, for what is coming. Raises what the client raises, and holds nothing then.
    """
    if question.plain:
        track = question.tracks[0]
        return source.get(track.namespaces, question.keys(track, end), wait_s)
    held = Together()
    try:
        _hold(source, question, end, wait_s, held)
    except BaseException:
        held.release()
        raise
    if not held.count:
        held.release()
    return held


def _hold(source: Source, question: Question, end: int, wait_s: float, held: Together) -> None:
    cut, windows = end, []
    for track in question.tracks:
        if track.like.window_tokens:
            windows.append(track)
            continue
        part = _get(source, track, question.keys(track, cut), wait_s, held)
        cut = min(cut, question.units(track, len(part)))
    present: list[list[bool]] | None = None
    for _ in range(_TRIES):
        if cut <= question.start:
            return
        if _hold_windows(source, question, windows, cut, wait_s, held):
            held.count = cut - question.start
            return
        if present is None:
            present = [_present(source, track, question.all_keys(track, cut)) for track in windows]
        cut = question.last_cut(present, cut)


def _hold_windows(
    source: Source, question: Question, windows: list[Track], cut: int, wait_s: float, held: Together
) -> bool:
    """Hold the blocks of all windows for a cut; whether all are there. Else nothing more is held than before."""
    before = len(held.parts)
    for track in windows:
        wanted = question.keys(track, cut)
        if wanted and len(_get(source, track, wanted, wait_s, held)) < len(wanted):
            for part in held.parts[before:]:
                part.release()
            del held.parts[before:]
            return False
    return True


def _get(source: Source, track: Track, wanted: list[bytes], wait_s: float, held: Together) -> Held:
    part = source.get(track.namespaces, wanted, wait_s)
    held.parts.append(part)
    if len(part) < len(wanted) and part.outcome != Outcome.MISS:
        held.outcome = part.outcome  # more may be there later
    return part


def _present(source: Source, track: Track, wanted: list[bytes]) -> list[bool]:
    """Whether each block is stored, in every namespace of a track."""
    answers = [source.contains(namespace, wanted) for namespace in track.namespaces]
    return [all(each in (Outcome.HIT, Outcome.PENDING) for each in block) for block in zip(*answers, strict=True)]
