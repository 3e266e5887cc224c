"""Answers that fit into a frame: a long list goes on behind a cursor, or is cut.

A cursor is the key of the last item before it: what comes and goes meanwhile moves nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Generic, TypeVar

from google.protobuf.message import Message
from kvstored_proto.frames import MAX_BODY_BYTES

ANSWER_BYTES_MAX: Final = MAX_BODY_BYTES - 4096  # what stands in it beside the list takes little
ALL: Final = 1 << 32
ITEM_BYTES: Final = 8  # at most, of an item's tag and length
M = TypeVar("M", bound=Message)
T = TypeVar("T")


class Page(Generic[M]):
    """So many items as were asked for, if they fit; without a limit all, for callers that know of no pages."""

    def __init__(self, limit: int, bytes_max: int = ANSWER_BYTES_MAX) -> None:
        self._limit = limit
        self._left_bytes = bytes_max
        self._last = b""
        self.items: list[M] = []
        self.cursor = b""  # empty: no more

    def add(self, key: bytes, item: M) -> bool:
        """Take an item; False: it belongs to the next page. One is always taken."""
        self._left_bytes -= item.ByteSize() + ITEM_BYTES
        if self._limit and self.items and (len(self.items) >= self._limit or self._left_bytes < 0):
            self.cursor = self._last
            return False
        self.items.append(item)
        self._last = key
        return True


def after(items: Iterable[T], key: Callable[[T], bytes], cursor: bytes) -> Iterator[tuple[bytes, T]]:
    """Items by their keys, in order, behind a cursor."""
    keyed = [(place, item) for item in items if (place := key(item)) > cursor]
    return iter(sorted(keyed, key=lambda pair: pair[0]))


def fitting(items: Iterable[M], bytes_max: int = ANSWER_BYTES_MAX) -> list[M]:
    """The first items, as many as fit into an answer, or a part of one."""
    page: Page[M] = Page(ALL, bytes_max)
    for item in items:
        if not page.add(b"", item):
            break
    return page.items
