"""Transfers that were begun and are looked at now and then, by layers or not: what both clients share of them.

By layers means all blocks of one layer before those of the next, so that an engine can compute meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from kvstored_client.deadline import NEVER, Deadline
from kvstored_client.effects import Verb
from kvstored_client.errors import KVStoredClientError
from kvstored_client.results import Outcome, PutResult

if TYPE_CHECKING:
    from kvstored_client.driver import ThreadDriver

Range = tuple[int, int]  # layers from the first on, and before the second


@dataclass(frozen=True, slots=True)
class How:
    """Of a load: which layers (a range; None: all), whether each is told when it is in place, and until when."""

    layers: Range | None = None
    by_layer: bool = False
    deadline: Deadline = NEVER

    @property
    def plain(self) -> bool:
        """Whether nothing of this is asked for."""
        return self.layers is None and not self.by_layer and not self.deadline.limited


class Arrived(NamedTuple):
    """How much of a transfer is done: the first `layers` of the layers that it moves, of its leading `blocks`."""

    blocks: int
    layers: int


# ---- what copies: for the drivers of both clients ----


class LoadBegun(Protocol):
    """A load under way, whoever copies."""

    def ended(self) -> bool:
        """Whether no copy of it runs any more: no call of the daemon."""

    def arrived(self) -> Range:
        """How many blocks it brings, and how many layers of them are in place."""

    def finish(self) -> Verb[int]:
        """How many leading blocks came; waits for the end."""


class StoreBegun(Protocol):
    """A store under way, whoever copies."""

    def ready(self, layers: int) -> None:
        """So many leading layers may be copied. Never waits."""

    def copied(self) -> Range:
        """How many blocks are copied, and how many layers of them are."""

    def finish(self, *, cancel: bool) -> Verb[PutResult]:
        """Its result, once nothing of it runs any more; `cancel` ends it before all is copied."""


class Came:
    """A load that is over: it was done when it was asked for, or nobody could do it."""

    def __init__(self, blocks: int, layers: int) -> None:
        self._blocks, self._layers = blocks, layers if blocks else 0

    def ended(self) -> bool:
        """See `LoadBegun`."""
        return True

    def arrived(self) -> Range:
        """See `LoadBegun`."""
        return self._blocks, self._layers

    def finish(self) -> Verb[int]:
        """See `LoadBegun`."""
        return self._blocks
        yield  # makes this a generator


class NotStored:
    """A store that could not begin."""

    def __init__(self, count: int, error: KVStoredClientError | None = None) -> None:
        self._result = PutResult.of([Outcome.MISS] * count, 0, error=error)

    def ready(self, layers: int) -> None:
        """See `StoreBegun`."""

    def copied(self) -> Range:
        """See `StoreBegun`."""
        return 0, 0

    def finish(self, *, cancel: bool) -> Verb[PutResult]:
        """See `StoreBegun`."""
        return self._result
        yield  # makes this a generator


class AtTheEnd:
    """A store by layers that is done as a whole, when all of them are ready."""

    def __init__(self, whole: Verb[PutResult], count: int) -> None:
        self._whole, self._count = whole, count

    def ready(self, layers: int) -> None:
        """See `StoreBegun`."""

    def copied(self) -> Range:
        """See `StoreBegun`."""
        return 0, 0

    def finish(self, *, cancel: bool) -> Verb[PutResult]:
        """See `StoreBegun`."""
        if cancel:
            return PutResult.of([Outcome.MISS] * self._count, 0)
        return (yield from self._whole)


# ---- what an engine holds ----


class LoadUnderWay:
    """A load that was begun. Its result must be asked for: until it has answered the blocks may be written to."""

    def __init__(self, begun: LoadBegun, layers: int) -> None:
        self._begun, self._layers = begun, layers

    def done(self) -> bool:
        """Whether it has ended, well or not: a look into shared memory, no call of the daemon."""
        return self._begun.ended()

    def arrived(self) -> Arrived:
        """How much is in place by now, of a load `by_layer`: as cheap as `done`.

        `blocks` does not change once it is over 0, unless a copy fails: the result has the last word.
        """
        return Arrived(*self._begun.arrived())

    def _over(self, blocks: int) -> int:
        self._begun = Came(blocks, self._layers)
        return blocks


class StoreUnderWay:
    """A store whose layers its engine says to be ready; its result must be asked for, or `cancel` called.

    `with` ends it by `cancel` where the block ends by an exception. For one thread.
    """

    def __init__(self, begun: StoreBegun, layers: int) -> None:
        self._begun, self._layers = begun, layers
        self._ready = 0
        self._over = False

    def ready(self, layers: int) -> None:
        """The leading `layers` layers of all blocks are written, and stay as they are until the result is there.

        Raises ValueError for more than there are, or fewer than before.
        """
        if not self._ready <= layers <= self._layers:
            raise ValueError(f"{layers} layers are ready: it was {self._ready}, and there are {self._layers}")
        if layers > self._ready and not self._over:
            self._ready = layers
            self._begun.ready(layers)

    def copied(self) -> Arrived:
        """How many layers were copied by now, of the blocks that had to be: a look into shared memory."""
        return Arrived(*self._begun.copied())

    def _check_all_ready(self) -> None:
        if self._ready < self._layers and not self._over:
            raise RuntimeError(f"{self._ready} of {self._layers} layers are ready: say so, or cancel")


class Loading(LoadUnderWay):
    """See `LoadUnderWay`; of `Client`."""

    def __init__(self, driver: ThreadDriver, begun: LoadBegun, layers: int) -> None:
        super().__init__(begun, layers)
        self._driver = driver

    def result(self) -> int:
        """How many leading blocks came; waits for the end."""
        return self._over(self._driver.data(self._begun.finish(), 0, begun=True))


class Storing(StoreUnderWay):
    """See `StoreUnderWay`; of `Client`."""

    def __init__(self, driver: ThreadDriver, begun: StoreBegun, layers: int) -> None:
        super().__init__(begun, layers)
        self._driver = driver
        self._result = PutResult()

    def result(self) -> PutResult:
        """What became of each block, as of `store`; waits for the end.

        Raises RuntimeError before all layers are ready.
        """
        self._check_all_ready()
        return self._finish(cancel=False)

    def cancel(self) -> PutResult:
        """End it: what is not stored by now is not, and when this returns nothing reads the blocks any more."""
        return self._finish(cancel=True)

    def _finish(self, *, cancel: bool) -> PutResult:
        if not self._over:
            self._result = self._driver.run(self._begun.finish(cancel=cancel), begun=True)
            self._over = True
        return self._result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self.cancel()
