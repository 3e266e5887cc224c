"""What a trace consists of, whichever format it was read from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

TIME_MS_MAX: Final = 10**19  # either way: more than nanoseconds since 1970, and differences stay finite
Time = Annotated[float, msgspec.Meta(ge=-float(TIME_MS_MAX), le=float(TIME_MS_MAX))]
Request = list[int] | list[int | str]
Numbered = Iterator[tuple[int, str]]  # lines of a file with their numbers, from 1 on


class Call(msgspec.Struct, gc=False, kw_only=True):
    """A chain from its start, and what was done with it. Mostly it is got and what is missing is put."""

    ids: Request
    t_ms: float = 0.0  # since the trace began
    gets: bool = True
    puts: bool = True
    start: int = 0  # of a put alone: the place of the first block that it stores
    after: int = -1  # of a put alone: the number of the get whose misses it stores; -1: none
    found: int = -1  # of a get: the hits that the daemon itself had, where they are on record
    size_bytes: int = 0  # of a put: all of its blocks; 0: not known
