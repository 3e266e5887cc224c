"""Who copies to or from an engine's memory at this moment, so that a registration ends when nobody does any more."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType

from kvstored_client import buffers as memory
from kvstored_client.errors import Unavailable


class Uses:
    """`with uses:` around each copy. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: list[int] = []  # one for each copy
        self._over = False

    def __enter__(self) -> None:
        """Raises Unavailable after the end."""
        with self._changed:
            if self._over:
                raise Unavailable("this memory is not registered any more")
            self._threads.append(threading.get_ident())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._changed:
            self._threads.remove(threading.get_ident())
            self._changed.notify_all()

    @property
    def busy(self) -> bool:
        """Whether somebody copies now."""
        return bool(self._threads)

    def end(self) -> None:
        """No further copy begins."""
        with self._changed:
            self._over = True

    def wait(self) -> None:
        """Until nobody copies but this thread, which would wait for itself: a signal's handler interrupts its copy."""
        own = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: all(each == own for each in self._threads))


class UsedPlace:
    """See `buffers.Place`: one whose copies are counted, and none of which begins after the end."""

    def __init__(self, place: memory.Place, uses: Uses) -> None:
        self._place, self._uses = place, uses

    @property
    def sizes_bytes(self) -> Sequence[int]:
        """See `Place`."""
        return self._place.sizes_bytes

    def part(self, start: int, end: int) -> UsedPlace:
        """See `Place`."""
        return UsedPlace(self._place.part(start, end), self._uses)

    def read(self, indices: Sequence[int], targets: Sequence[int]) -> None:
        """See `Place`. Raises Unavailable."""
        with self._uses:
            self._place.read(indices, targets)

    def write(self, first: int, count: int, source: int, stride: int) -> None:
        """See `Place`. Raises Unavailable."""
        with self._uses:
            self._place.write(first, count, source, stride)
