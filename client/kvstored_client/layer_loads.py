"""Loads by layers that the client copies itself (`shm`), once for both clients."""

from __future__ import annotations

import threading
from functools import partial
from typing import Final

from kvstored_proto.layout import Indices

from kvstored_client.blocks import Blocks
from kvstored_client.effects import Verb, Work
from kvstored_client.layers import Range
from kvstored_client.paged import PagedKV

_LONG: Final = 1 << 62  # a wait, as work: for no event loop's thread


class LayerCopies:
    """Blocks that are held, copied layer by layer in a thread of its own; see `layers.LoadBegun`."""

    def __init__(self, blocks: Blocks, kv: PagedKV, block_ids: Indices, layers: Range) -> None:
        self._blocks, self._kv, self._ids = blocks, kv, block_ids
        self._layers, self._end = range(*layers), threading.Event()
        self._copied = self._count = 0
        self._failure: BaseException | None = None

    def begin(self) -> Verb[None]:
        """Copy the first layer; the others follow. Raises ValueError for blocks of another size."""
        begun = False
        try:
            size_bytes = sum(self._blocks.sizes_bytes) // len(self._layers)
            yield Work(partial(self._copy, self._layers[0]), size_bytes)
            begun = True
        finally:
            if not begun:
                self._blocks.release()
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

    def ended(self) -> bool:
        """See `LoadBegun`."""
        return self._end.is_set()

    def arrived(self) -> Range:
        """See `LoadBegun`."""
        count = self._count
        return count, self._copied if count else 0

    def finish(self) -> Verb[int]:
        """See `LoadBegun`."""
        if not self._end.is_set():
            yield Work(self._end.wait, _LONG)
        if self._failure is not None:
            raise self._failure
        return self._count
