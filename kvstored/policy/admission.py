"""Which blocks are worth a write to the tier below when DRAM lets go of them.

A rule sees keys, what was asked for and hints; no bytes, no clock. The daemon has one for each
tenant, so that nobody's blocks decide about another's; the simulator uses the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

MEMORY_KEYS: Final = 1 << 18
ASKED_MAX: Final = 4  # more often makes no difference
REUSED: Final = 2  # times asked for: stored once and used once, or stored again after it was dropped
Key = Hashable


class Asked:
    """How often a block was asked for lately: a bounded memory of keys, the blocks there or not.

    Two generations of half the size: what was asked for since the last change of generation or in the one
    before is known. So a key is remembered for at least `memory_keys` / 2 other keys, and at most
    `memory_keys`; nothing is ever walked. Raises ValueError where the memory is smaller than 2.
    """

    __slots__ = ("_half", "_old", "_young")

    def __init__(self, memory_keys: int = MEMORY_KEYS) -> None:
        if memory_keys < 2:
            raise ValueError(f"the memory of what was asked for is {memory_keys} keys: it must be 2 or more")
        self._half = memory_keys // 2
        self._young: dict[Key, int] = {}
        self._old: dict[Key, int] = {}

    def note(self, keys: Iterable[Key]) -> None:
        """Each of these was asked for once more."""
        for key in keys:
            young = self._young
            count = young.get(key)
            if count is None:
                count = self._old.get(key, 0)
                if len(young) >= self._half:
                    self._old, self._young = young, (young := {})
            if count < ASKED_MAX:
                count += 1
            young[key] = count

    def times(self, key: Key) -> int:
        """How often, up to `ASKED_MAX`; 0: never, or too long ago."""
        return self._young.get(key) or self._old.get(key, 0)

    def __len__(self) -> int:
        return len(self._young) + len(self._old)


class Admission(Protocol):
    """Decides about a block before it is written below. It sheds stores, never loads."""

    def admits(self, times_asked: int, hinted: bool) -> bool:
        """Whether a block is worth a write.

        `times_asked`: how often lately, its put counted (see `Asked`); `hinted`: whoever put it says that it
        will be asked for again.
        """
        ...


class AdmitAll:
    """Writes everything. Rules that wait for a second use lose most hits of chat workloads."""

    def admits(self, times_asked: int, hinted: bool) -> bool:
        """See `Admission`."""
        return True


class SecondHit:
    """Writes what was asked for twice, so that prompts that never come back wear no drive."""

    def admits(self, times_asked: int, hinted: bool) -> bool:
        """See `Admission`."""
        return times_asked >= REUSED


class Hinted:
    """Writes only what a hint says will come back."""

    def admits(self, times_asked: int, hinted: bool) -> bool:
        """See `Admission`."""
        return hinted


ADMISSIONS: Final[Mapping[str, Callable[[], Admission]]] = MappingProxyType(
    {"admit_all": AdmitAll, "second_hit": SecondHit, "hinted": Hinted}
)


def make_admission(name: str = "admit_all") -> Admission:
    """A rule by its name in the configuration; raises ValueError for an unknown name."""
    make = ADMISSIONS.get(name)
    if make is None:
        raise ValueError(f"admission is {name!r}: it must be one of {', '.join(sorted(ADMISSIONS))}")
    return make()
