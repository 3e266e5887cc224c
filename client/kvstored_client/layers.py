"""Transfers by layers: all blocks of one layer before those of the next, so that an engine can compute meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from kvstored_client.blocks import Blocks
from kvstored_client.paged import PagedKV
from kvstored_client.results import PutResult

Range = tuple[int, int]  # layers from the first on, and before the second


class Arrived(NamedTuple):
    """How much of a load is in place: the first `layers` of the layers that it loads, of its leading `blocks`."""

    blocks: int
    layers: int


class Loading(Protocol):
    """A load under way. `result` must be asked for: until it has answered the blocks may be written to."""

    def done(self) -> bool:
        """Whether it has ended, well or not: a look into shared memory, no call of the daemon."""

    def arrived(self) -> Arrived:
        """How much is in place by now, of a load `by_layer`: as cheap as `done`.

        `blocks` does not change once it is over 0, unless a copy fails: `result` has the last word.
        """

    def result(self) -> int:
        """How many leading blocks came; waits for the end."""


class Ended:
    """A load that is over."""

    def __init__(self, blocks: int, layers: int) -> None:
        self._arrived = Arrived(blocks, layers if blocks else 0)

    def done(self) -> bool:
        """See `Loading`."""
        return True

    def arrived(self) -> Arrived:
        """See `Loading`."""
        return self._arrived

    def result(self) -> int:
        """See `Loading`."""
        return self._arrived.blocks


class LayerCopies:
    """Blocks that are held, copied layer by layer in a thread of its own; by `shm`."""

    def __init__(self, blocks: Blocks, kv: PagedKV, block_ids: Any, layers: Range) -> None:
        """Copies the first layer; blocks of another size are a ValueError."""
        self._blocks, self._kv, self._ids = blocks, kv, block_ids
        self._layers, self._end = range(*layers), threading.Event()
        self._copied = self._count = 0
        self._failure: BaseException | None = None
        try:
            self._copy(self._layers[0])
        except BaseException:
            blocks.release()
            raise
        threading.Thread(target=self._run, name="kvstored-layers", daemon=True).start()

    def _copy(self, layer: int) -> None:
        self._count = self._blocks.copy_into(self._kv.at(self._ids, (layer, layer + 1)))
        self._copied += 1

    def _run(self) -> None:
        try:
            for layer in self._layers[1:]:
                if not self._count:  # the hold ended
                    break
                self._copy(layer)
        except BaseException as error:
            self._failure, self._count = error, 0
        finally:
            self._blocks.release()
            self._end.set()

    def done(self) -> bool:
        """See `Loading`."""
        return self._end.is_set()

    def arrived(self) -> Arrived:
        """See `Loading`."""
        count = self._count
        return Arrived(count, self._copied if count else 0)

    def result(self) -> int:
        """See `Loading`."""
        self._end.wait()
        if self._failure is not None:
            raise self._failure
        return self._count


class DeviceLoading:
    """A load that the daemon's device worker does."""

    def __init__(
        self, ended: Callable[[], bool], arrived: Callable[[], Range], finish: Callable[[], int], layers: int
    ) -> None:
        self._is_ended, self._look, self._finish, self._layers = ended, arrived, finish, layers
        self._over: Ended | None = None

    def done(self) -> bool:
        """See `Loading`."""
        return self._over is not None or self._is_ended()

    def arrived(self) -> Arrived:
        """See `Loading`."""
        return self._over.arrived() if self._over is not None else Arrived(*self._look())

    def result(self) -> int:
        """See `Loading`."""
        if self._over is None:
            self._over = Ended(self._finish(), self._layers)
        return self._over.result()


class Storing:
    """A store under way, whose layers its engine says to be ready; `result` or `cancel` must follow.

    `with` ends it by `cancel` where the block ends by an exception. For one thread.
    """

    def __init__(
        self,
        layers: int,
        tell: Callable[[int], None],
        copied: Callable[[], Range],
        finish: Callable[[bool], PutResult],
    ) -> None:
        """`finish` is given whether to cancel."""
        self._layers, self._tell, self._look, self._finish = layers, tell, copied, finish
        self._ready = 0
        self._over: PutResult | None = None

    def ready(self, layers: int) -> None:
        """The leading `layers` layers of all blocks are written, and stay as they are until the result is there.

        Raises ValueError for more than there are, or fewer than before.
        """
        if not self._ready <= layers <= self._layers:
            raise ValueError(f"{layers} layers are ready: it was {self._ready}, and there are {self._layers}")
        if layers > self._ready and self._over is None:
            self._ready = layers
            self._tell(layers)

    def copied(self) -> Arrived:
        """How many layers were copied by now, of the blocks that had to be: a look into shared memory."""
        return Arrived(*self._look())

    def result(self) -> PutResult:
        """What became of each block, as of `store`; waits for the end.

        Raises RuntimeError before all layers are ready.
        """
        if self._over is None:
            if self._ready < self._layers:
                raise RuntimeError(f"{self._ready} of {self._layers} layers are ready: say so, or cancel")
            self._over = self._finish(False)
        return self._over

    def cancel(self) -> PutResult:
        """End it: what is not stored by now is not, and when this returns nothing reads the blocks any more."""
        if self._over is None:
            self._over = self._finish(True)
        return self._over

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self.cancel()
