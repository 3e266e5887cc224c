"""Loads of paged memory that the client copies itself (`shm`, `inline`), once for both clients."""

from __future__ import annotations

import threading
from functools import partial
from typing import Final

from kvstored_proto.layout import Indices

from kvstored_client import threads, verbs
from kvstored_client.blocks import Blocks
from kvstored_client.core import Core
from kvstored_client.deadline import Deadline
from kvstored_client.effects import CONNECT, Verb, Work
from kvstored_client.errors import Unavailable
from kvstored_client.keys import Packed
from kvstored_client.layers import Came, How, LoadBegun, Range
from kvstored_client.namespace import Namespace
from kvstored_client.paged import PagedKV
from kvstored_client.slots import BYTES_PER_BLOCK

LONG_WORK: Final = 1 << 62  # a wait, as work of so many bytes: for no event loop's thread
PIECE_BYTES: Final = 32 << 20  # where there is a deadline, it is looked at before each


def load(
    core: Core,
    kv: PagedKV,
    namespace: Namespace,
    hashes: Packed,
    ids: Indices,
    wait_s: float,
    layers: Range | None,
    deadline: Deadline,
) -> Verb[int]:
    """How many leading blocks were copied to the engine's: as many as come before the deadline."""
    delivered, until = 0, Deadline(wait_s)
    most = max(1, PIECE_BYTES // (kv.block_bytes * ids.shape[1])) if deadline.limited else hashes.length
    while delivered < hashes.length and not deadline.passed():
        connection = yield CONNECT
        rest = hashes.part(delivered, min(hashes.length, delivered + most))
        asked = verbs.leading(connection, rest, BYTES_PER_BLOCK).length
        place = kv.at(ids[delivered : delivered + asked], layers).place(asked, writable=True)
        left_s = deadline.left_s(until.left_s() if wait_s else 0.0)
        came = yield from verbs.get_into(core, [namespace], rest.part(0, asked), [place], left_s)
        delivered += came
        if came < asked:
            deadline.passed()  # if that is what ended the wait
            break
    return delivered


def by_layers(
    core: Core, kv: PagedKV, namespace: Namespace, hashes: Packed, ids: Indices, wait_s: float, how: How
) -> Verb[LoadBegun]:
    """Begin a load that tells its layers, of as many leading blocks as one call carries."""
    held = yield from verbs.get(core, [namespace], hashes, wait_s)
    if not len(held):
        how.deadline.passed()  # if that is what ended the wait
        return Came(0, 0)
    copies = LayerCopies(held, kv, ids[: len(held)], kv.check_layers(how.layers), how.deadline)
    yield from copies.begin()
    return copies


def ended(end: threading.Event) -> Verb[None]:
    """Wait until a thread copies no more. Until then the engine's memory is not its own, so nothing cuts it short."""
    if not end.is_set():
        try:
            yield Work(end.wait, LONG_WORK)
        except Unavailable:  # no thread to wait in: then here, loop or not
            end.wait()


class LayerCopies:
    """Blocks that are held, copied layer by layer in a thread of its own; see `layers.LoadBegun`."""

    def __init__(self, blocks: Blocks, kv: PagedKV, block_ids: Indices, layers: Range, deadline: Deadline) -> None:
        self._blocks, self._kv, self._ids = blocks, kv, block_ids
        self._deadline = deadline
        self._layers, self._end = range(*layers), threading.Event()
        self._copied = self._count = 0
        self._stopped = False
        self._failure: BaseException | None = None

    def begin(self) -> Verb[None]:
        """Copy the first layer; the others follow. Raises ValueError for blocks of another size.

        Raises Unavailable, and holds nothing then, where there is no thread for the others.
        """
        begun = False
        try:
            size_bytes = sum(self._blocks.sizes_bytes) // len(self._layers)
            yield Work(partial(self._copy, self._layers[0]), size_bytes)
            threads.start(self._run, "kvstored-layers")
            begun = True
        finally:
            if not begun:
                self._blocks.release()

    def _copy(self, layer: int) -> None:
        self._count = self._blocks.copy_into(self._kv.at(self._ids, (layer, layer + 1)))
        self._copied += 1

    def _run(self) -> None:
        try:
            for layer in self._layers[1:]:
                if not self._count:  # the hold ended
                    break
                if self._stopped or self._deadline.passed():
                    self._count = 0
                    break
                self._copy(layer)
        except BaseException as error:
            self._failure, self._count = error, 0
        finally:
            try:
                self._blocks.release()
            finally:  # whatever happened: who waits for the end would wait for ever
                self._end.set()

    def stop(self) -> None:
        """Copy no further layer, and come back when nothing copies any more."""
        self._stopped = True
        self._end.wait()

    def ended(self) -> bool:
        """See `LoadBegun`."""
        return self._end.is_set()

    def arrived(self) -> Range:
        """See `LoadBegun`."""
        count = self._count
        return count, self._copied if count else 0

    def finish(self) -> Verb[int]:
        """See `LoadBegun`."""
        yield from ended(self._end)
        if self._failure is not None:
            raise self._failure
        return self._count
