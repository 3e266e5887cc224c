"""A wish that work ends soon, and who is to be told of it. What runs ends at its own pace."""

from __future__ import annotations

from collections.abc import Callable


class Stop:
    """`why` is empty as long as nobody wishes it."""

    def __init__(self) -> None:
        self.why = ""
        self._told: dict[object, Callable[[], object]] = {}

    def ask(self, why: str) -> None:
        """Wish it; the first reason stays."""
        if self.why:
            return
        self.why = why
        for tell in list(self._told.values()):
            tell()

    def then(self, tell: Callable[[], object]) -> Callable[[], None]:
        """Call this when it is wished, once; at once where it is wished already. Returns what takes that back."""
        if self.why:
            tell()
            return lambda: None
        key = object()
        self._told[key] = tell
        return lambda: self._told.pop(key, None) and None
