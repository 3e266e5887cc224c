"""What every backend of paged transfers must do, as tests that its own test module inherits.

A subclass provides the fixture `transfers`: a function that takes tensors (numpy arrays of the
test, which the backend may place elsewhere) and block axes and gives a `Bench`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pytest
from kvstored_client import Client, Namespace, Outcome, PagedKV
from kvstored_client.transfers import PagedTransfers

Array = npt.NDArray[np.uint8]
BLOCKS = 24


class Bench(Protocol):
    """Registered memory of a test, with a way to look at it and to change it."""

    client: Client
    namespace: Namespace
    transfers: PagedTransfers

    def read(self) -> list[Array]:
        """The tensors as they are now."""

    def write(self, arrays: Sequence[Array]) -> None:
        """Set the tensors."""

    def lose_daemon(self) -> None:
        """Let the client whose transfers these are find no daemon any more."""


@dataclasses.dataclass
class Registered:
    """A `Bench` of tensors that the test's own process can use as numpy arrays, registered with the client."""

    client: Client
    namespace: Namespace
    arrays: list[Any]
    axis: int
    transfers: PagedTransfers = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.transfers = self.client.register(PagedKV(self.arrays, self.axis))

    def read(self) -> list[Array]:
        """See `Bench`."""
        return self.arrays

    def write(self, arrays: Sequence[Array]) -> None:
        """See `Bench`."""
        for mine, theirs in zip(self.arrays, arrays, strict=True):
            mine[:] = theirs

    def lose_daemon(self) -> None:
        """See `Bench`."""
        lose_daemon(self.client)


def lose_daemon(client: Any) -> None:
    """End a client's session; from now on it connects to nobody."""
    client._driver._drop()
    client._core.settings = dataclasses.replace(client._core.settings, path="/nonexistent")


Make = Callable[..., Any]


class Shape(NamedTuple):
    """Tensors of one kind of engine: shape, where blocks are counted, the axes' order in memory, how many tensors."""

    shape: tuple[int, ...]
    axis: int
    order: tuple[int, ...] = ()
    tensors: int = 3


SHAPES = {
    "kv first": Shape((2, BLOCKS, 16, 2, 64), 1),
    "blocks first": Shape((BLOCKS, 2, 16, 2, 64), 0),
    "mla": Shape((BLOCKS, 16, 576), 0),
    "cross-layer": Shape((BLOCKS, 3, 2, 16, 128), 0, tensors=1),
    "heads before tokens in memory": Shape((2, BLOCKS, 16, 2, 64), 1, (0, 1, 3, 2, 4)),
    "blocks innermost": Shape((4, BLOCKS, 64), 1, (1, 0, 2), tensors=2),
}


def arrays_of(shape: Shape, seed: int) -> list[Array]:
    """Tensors of a shape with random bytes."""
    rng, made = np.random.default_rng(seed), []
    order = shape.order or tuple(range(len(shape.shape)))
    for _ in range(shape.tensors):
        lying = rng.integers(0, 256, [shape.shape[i] for i in order], np.uint8)
        made.append(lying.transpose(np.argsort(order)))
    return made


def stored(arrays: Sequence[Array], axis: int, block: int) -> bytes:
    """What is stored of a block, by the definition."""
    return b"".join(np.take(array, block, axis).tobytes() for array in arrays)


def hashes_of(seed: int, count: int) -> list[bytes]:
    """Hashes that no other seed has."""
    return [seed.to_bytes(8, "little") + i.to_bytes(8, "little") for i in range(count)]


def blocks_of(bench: Bench, hashes: Sequence[bytes], size_bytes: int) -> list[bytes]:
    """What is stored, as every kind of session can read it."""
    buffers = [bytearray(size_bytes) for _ in hashes]
    came = bench.client.get_into(bench.namespace, hashes, buffers)
    return [bytes(buffer) for buffer in buffers[:came]]


class PagedContract:
    """Load and store."""

    @pytest.mark.parametrize("kind", SHAPES)
    def test_what_was_stored_comes_back_in_other_blocks(self, transfers: Make, kind: str) -> None:
        shape = SHAPES[kind]
        before = arrays_of(shape, 1)
        bench = transfers(before, shape.axis)
        hashes, ids = hashes_of(list(SHAPES).index(kind), 10), np.random.default_rng(2).permutation(BLOCKS)[:10]
        assert bench.transfers.store(bench.namespace, hashes, ids).stored == 10
        wanted = [stored(before, shape.axis, i) for i in ids]
        assert blocks_of(bench, hashes, len(wanted[0])) == wanted
        other, places = arrays_of(shape, 3), np.random.default_rng(4).permutation(BLOCKS)[:10]
        bench.write(other)
        assert bench.transfers.load(bench.namespace, hashes, places) == 10
        after = bench.read()
        for block in range(BLOCKS):
            came = np.flatnonzero(places == block)
            expected = stored(before, shape.axis, ids[came[0]]) if len(came) else stored(other, shape.axis, block)
            assert stored(after, shape.axis, block) == expected, f"block {block}"

    def test_a_load_delivers_the_leading_blocks_that_are_there(self, transfers: Make) -> None:
        bench = transfers(arrays_of(SHAPES["mla"], 5), 0)
        hashes = hashes_of(5, 8)
        bench.transfers.store(bench.namespace, hashes[:4], range(4))
        bench.transfers.store(bench.namespace, hashes[6:], [6, 7], parent=hashes[5])
        assert bench.transfers.load(bench.namespace, hashes, range(8, 16)) == 4
        assert bench.transfers.load(bench.namespace, hashes_of(6, 3), range(3)) == 0
        assert bench.transfers.load(bench.namespace, [], []) == 0

    def test_a_load_that_is_begun_can_be_looked_at_until_it_has_ended(self, transfers: Make) -> None:
        before = arrays_of(SHAPES["mla"], 14)
        bench = transfers(before, 0)
        hashes = hashes_of(14, 8)
        bench.transfers.store(bench.namespace, hashes[:6], range(6))
        loads = [bench.transfers.start_load(bench.namespace, hashes, range(8 * i, 8 * i + 8)) for i in (1, 2)]
        deadline_s = time.monotonic() + 60.0
        while not all(load.done() for load in loads):
            assert time.monotonic() < deadline_s, "it is told that they have ended"
        after = bench.read()
        assert stored(after, 0, 8) == stored(before, 0, 0), "before the result was asked for"
        assert [load.result() for load in loads] == [6, 6]
        assert [load.result() for load in loads] == [6, 6]
        assert all(load.done() for load in loads)

    def test_more_loads_are_under_way_than_there_are_words_to_tell_them(self, transfers: Make) -> None:
        bench = transfers(arrays_of(SHAPES["mla"], 24), 0)
        bench.transfers.store(bench.namespace, hashes_of(24, 2), range(2))
        loads = [bench.transfers.start_load(bench.namespace, hashes_of(24, 2), [2, 3]) for _ in range(300)]
        deadline_s = time.monotonic() + 60.0
        while not all(load.done() for load in loads):
            assert time.monotonic() < deadline_s, "it is told that they have ended"
        assert {load.result() for load in loads} == {2}

    def test_a_deadline_that_is_far_away_changes_nothing(self, transfers: Make) -> None:
        bench = transfers(arrays_of(SHAPES["mla"], 25), 0)
        stored_now = bench.transfers.store(bench.namespace, hashes_of(25, 4), range(4), deadline_s=60.0)
        assert stored_now.stored == 4
        assert bench.transfers.load(bench.namespace, hashes_of(25, 4), range(4, 8), deadline_s=60.0) == 4

    def test_blocks_that_are_stored_already_are_not_written_again(self, transfers: Make) -> None:
        shape = SHAPES["blocks first"]
        before = arrays_of(shape, 7)
        bench = transfers(before, shape.axis)
        hashes = hashes_of(7, 6)
        bench.transfers.store(bench.namespace, hashes[:3], [0, 1, 2])
        result = bench.transfers.store(bench.namespace, hashes, [9, 9, 9, 3, 4, 5])
        assert (result.stored, result.existing, result.outcomes) == (3, 3, [Outcome.HIT] * 6)
        expected = [stored(before, shape.axis, i) for i in range(6)]
        assert blocks_of(bench, hashes, len(expected[0])) == expected

    def test_a_store_may_say_what_is_known_of_its_blocks(self, transfers: Make) -> None:
        bench = transfers(arrays_of(SHAPES["mla"], 15), 0)
        before = bench.client.status()
        for _ in range(2):  # new ones, and those that are stored already
            bench.transfers.store(bench.namespace, hashes_of(15, 4), range(4), hint={"priority": 3})
        after = bench.client.status()
        assert before is not None
        assert after is not None
        assert after.counters["hinted_blocks"] - before.counters["hinted_blocks"] == 8

    def test_several_engine_blocks_are_stored_as_one(self, transfers: Make) -> None:
        shape = SHAPES["kv first"]
        before = arrays_of(shape, 8)
        bench = transfers(before, shape.axis)
        hashes, ids = hashes_of(8, 3), [3, 9, 4, 1, 0, 20]
        assert bench.transfers.store(bench.namespace, hashes, ids).stored == 3
        second = stored(before, shape.axis, 4) + stored(before, shape.axis, 1)
        assert blocks_of(bench, hashes, len(second))[1] == second
        bench.write(arrays_of(shape, 9))
        assert bench.transfers.load(bench.namespace, hashes, [5, 6, 7, 8, 10, 11]) == 3
        assert stored(bench.read(), shape.axis, 11) == stored(before, shape.axis, 20)

    @pytest.mark.parametrize("ids", [[0, 1, BLOCKS], [0, -1, 2], [0, 1], [0.0, 1.0, 2.0], []])
    def test_block_ids_that_make_no_sense_are_refused(self, transfers: Make, ids: list[Any]) -> None:
        bench = transfers(arrays_of(SHAPES["mla"], 10), 0)
        with pytest.raises(ValueError, match="block ids"):
            bench.transfers.store(bench.namespace, hashes_of(10, 3), ids)
        with pytest.raises(ValueError, match="block ids"):
            bench.transfers.load(bench.namespace, hashes_of(10, 3), ids)

    def test_nothing_moves_after_the_end_of_the_registration(self, transfers: Make) -> None:
        bench = transfers(arrays_of(SHAPES["mla"], 11), 0)
        bench.transfers.close()
        bench.transfers.close()
        with pytest.raises(RuntimeError, match="not registered"):
            bench.transfers.load(bench.namespace, hashes_of(11, 1), [0])

    def test_without_a_daemon_it_is_a_miss(self, transfers: Make) -> None:
        bench = transfers(arrays_of(SHAPES["mla"], 12), 0)
        bench.lose_daemon()
        assert bench.transfers.load(bench.namespace, hashes_of(12, 2), [0, 1]) == 0
        assert bench.transfers.start_load(bench.namespace, hashes_of(12, 2), [0, 1]).result() == 0
        assert bench.transfers.store(bench.namespace, hashes_of(12, 2), [0, 1]).refused == 2

    def test_nothing_is_held_afterwards(self, transfers: Make) -> None:
        bench = transfers(arrays_of(SHAPES["mla"], 13), 0)
        hashes = hashes_of(13, 5)
        bench.transfers.store(bench.namespace, hashes, range(5))
        bench.transfers.load(bench.namespace, hashes, range(5))
        status = bench.client.status()
        assert status is not None
        assert all(not s.leases and not s.reservations for s in status.sessions)
