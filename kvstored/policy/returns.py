"""Who comes again, and when: what a shelf life is learned from.

Blocks have levels: how often a block was seen, up to `LEVELS - 1` times more than once. Of each level it is counted
how many blocks came to it, and at which ages they were asked for again. A block of level l that is kept until the age
T is found with the probability F(T), and takes room for the time M(T) = sum over t < T of (1 - F(t)). With a price on
room the best T of a level is where F(T) - price x M(T) is greatest, and the price is the one at which what is kept
fills the tier (the Lagrangian of "most hits in this room", as in Beckmann and Sanchez, "Maximizing Cache Performance
Under Uncertainty", HPCA 2017, which puts a value on each age instead). The steps of all levels that are worth it at
any price (the upper hulls of F over M) are taken here in the order of their worth until the room is used.
"""

from __future__ import annotations

from itertools import pairwise
from math import fsum
from typing import Final, NamedTuple

LEVELS: Final = 4
AGES: Final = 160  # classes of ages: four an octave, up to 2^41 uses
GAIN_MIN: Final = 0.03  # so many more hits must lives of different lengths promise than one for all: else it is noise

Lives = tuple[int, ...]
EQUAL: Final[Lives] = (0,) * LEVELS


def age_class(age: int) -> int:
    """The class of an age of 0 or more."""
    if age < 4:
        return age
    octave = age.bit_length() - 3
    return min(4 * octave + (age >> octave), AGES - 1)


def _age_end(age_class_: int) -> int:
    """The first age beyond a class."""
    if age_class_ < 4:
        return age_class_ + 1
    octave = age_class_ // 4 - 1
    return (age_class_ % 4 + 5) << octave


AGE_ENDS: Final = tuple(_age_end(c) for c in range(AGES))


class Point(NamedTuple):
    """Of one block a use, kept until an age: its room in block-uses, and its hits."""

    room: float
    hits: float
    age: int


class Step(NamedTuple):
    """To keep a level's blocks until `age` and not until the age before it."""

    worth: float  # hits for its room
    room: float
    hits: float
    level: int
    age: int


class Returns:
    """Counts of one tier, which fade."""

    __slots__ = ("_again", "_came", "_uses")

    def __init__(self) -> None:
        self._came = [0.0] * LEVELS
        self._again = [[0.0] * AGES for _ in range(LEVELS)]
        self._uses = 0.0

    def came(self, level: int, count: int) -> None:
        """So many blocks have come to a level."""
        self._came[level] += count

    def came_again(self, level: int, age: int, count: int) -> None:
        """So many blocks of a level were asked for at this age, found or not."""
        self._again[level][age_class(age)] += count

    def passed(self, uses: int) -> None:
        """Time goes by."""
        self._uses += uses

    def fade(self, left: float) -> None:
        """What was counted until now counts for this share of it."""
        self._uses *= left
        self._came = [count * left for count in self._came]
        self._again = [[count * left for count in ages] for ages in self._again]

    def lives(self, capacity_blocks: int, horizon: int) -> Lives:
        """How much longer than the first level each should be kept, in uses; all 0 where that promises too little.

        `horizon`: the greatest age at which a return is noticed.
        """
        curves = [self._curve(level, age_class(horizon) + 1) for level in range(LEVELS)]
        steps = sorted((step for level, curve in enumerate(curves) for step in hull(level, curve)), reverse=True)
        ages, hits = fill(steps, capacity_blocks)
        if hits < (1.0 + GAIN_MIN) * hits_of_one_life(curves, capacity_blocks):
            return EQUAL
        for level in range(1, LEVELS):  # a parent has the level of its children or a higher one, and must outlive them
            ages[level] = max(ages[level], ages[level - 1])
        return tuple(age - ages[0] for age in ages)

    def _curve(self, level: int, ages: int) -> list[Point]:
        """Room and hits of a level for each age at which its blocks could go; of one that is empty, nothing."""
        came = self._came[level]
        if came < 1.0 or self._uses < 1.0:
            return []
        rate, again = came / self._uses, self._again[level]
        points, found, room, begin = [Point(0.0, 0.0, 0)], 0.0, 0.0, 0
        for age, end in enumerate(AGE_ENDS[: min(ages, AGES)]):
            now = min(again[age] / came, 1.0 - found)
            room += (end - begin) * (1.0 - found - now / 2)
            found += now
            begin = end
            points.append(Point(rate * room, rate * found, end))
        return points


def hull(level: int, curve: list[Point]) -> list[Step]:
    """The steps of a curve's upper hull: each is worth less than the one before it."""
    corners: list[Point] = []
    for point in curve:
        while len(corners) > 1 and _worth(corners[-2], corners[-1]) <= _worth(corners[-2], point):
            corners.pop()
        corners.append(point)
    return [Step(_worth(a, b), b.room - a.room, b.hits - a.hits, level, b.age) for a, b in pairwise(corners)]


def _worth(a: Point, b: Point) -> float:
    return (b.hits - a.hits) / (b.room - a.room) if b.room > a.room else 0.0


def fill(steps: list[Step], room: float) -> tuple[list[int], float]:
    """The age of each level, and the hits a use, where the steps are taken in order until the room is used.

    The step that does not fit whole is taken where more than half of it does.
    """
    ages, hits = [0] * LEVELS, 0.0
    for step in steps:
        part = min(1.0, room / step.room) if step.room > 0.0 else 1.0
        if part > 0.5:
            ages[step.level] = step.age
        hits += part * step.hits
        room -= part * step.room
        if room <= 0.0:
            break
    return ages, hits


def hits_of_one_life(curves: list[list[Point]], capacity: float) -> float:
    """Hits a use of a tier that keeps all levels until the same age, as least recently used first does."""
    room, hits = 0.0, 0.0
    for points in zip(*(curve for curve in curves if curve), strict=True):
        next_room, next_hits = fsum(point.room for point in points), fsum(point.hits for point in points)
        if next_room >= capacity:
            part = (capacity - room) / (next_room - room)
            return hits + part * (next_hits - hits)
        room, hits = next_room, next_hits
    return hits
