"""How much of what is asked for in a namespace is there, and which namespaces store much for little.

Counted in windows, by blocks and not by time: one is over when enough was stored and asked for to judge. A scheduler
looks up a prefix and then gets what was found, so gets alone nearly always hit; of lookups and gets those count that
asked for more.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvstored.catalog.catalog import Space

# A namespace "stores much" from here on: 64k tokens in blocks of 16. Less says nothing about what comes back.
STORED_BLOCKS_MIN: Final = 4096
ASKED_BLOCKS_MIN: Final = 4096
ASKED_BLOCKS_MAX: Final = 8 * ASKED_BLOCKS_MIN  # a window in which little is stored ends too
LOW_SHARE: Final = 0.3
SPACES_MAX: Final = 4096  # of one tenant; the ones first seen are dropped


class Window(msgspec.Struct):
    """Blocks of one namespace since its last window ended."""

    looked_up: int = 0
    found: int = 0
    asked: int = 0
    got: int = 0
    stored: int = 0


class Low(msgspec.Struct):
    """A window that stored much for little; `text` is what is said of it, made when it is asked for."""

    stored: int
    asked: int
    hit: int
    text: str = ""

    @property
    def share(self) -> float:
        """Blocks that were there, of those asked for."""
        return self.hit / self.asked


class HitRates:
    """The windows of one tenant's namespaces."""

    def __init__(self) -> None:
        self._windows: dict[Space, Window] = {}
        self.low: dict[Space, Low] = {}  # namespaces whose last whole window stored much for little

    def looked_up(self, space: Space, asked: int, found: int) -> None:
        """A lookup."""
        window = self._windows.get(space) or self._window(space)
        window.looked_up += asked
        window.found += found
        if window.looked_up >= ASKED_BLOCKS_MAX:
            self._end(space, window)

    def got(self, space: Space, asked: int, got: int) -> None:
        """A get."""
        window = self._windows.get(space) or self._window(space)
        window.asked += asked
        window.got += got
        if window.asked >= ASKED_BLOCKS_MAX:
            self._end(space, window)

    def stored(self, space: Space, blocks: int) -> bool:
        """A put; True: a window ended with it, and stored much for little."""
        window = self._windows.get(space) or self._window(space)
        window.stored += blocks
        if window.stored < STORED_BLOCKS_MIN or max(window.looked_up, window.asked) < ASKED_BLOCKS_MIN:
            return False
        return self._end(space, window)

    def _window(self, space: Space) -> Window:
        if len(self._windows) >= SPACES_MAX:
            dropped = next(iter(self._windows))
            del self._windows[dropped]
            self.low.pop(dropped, None)
        return self._windows.setdefault(space, Window())

    def _end(self, space: Space, window: Window) -> bool:
        by_lookup = window.looked_up >= window.asked
        asked, hit = (window.looked_up, window.found) if by_lookup else (window.asked, window.got)
        is_low = window.stored >= STORED_BLOCKS_MIN and hit < LOW_SHARE * asked
        if is_low:
            self.low[space] = Low(window.stored, asked, hit)
        else:
            self.low.pop(space, None)
        window.looked_up = window.found = window.asked = window.got = window.stored = 0
        return is_low
