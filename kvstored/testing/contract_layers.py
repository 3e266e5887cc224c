"""What transfers by layers must do on every backend, as tests that its test module inherits beside `PagedContract`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from kvstored_client import Outcome

from kvstored.testing.contract_paged import BLOCKS, SHAPES, Bench, Make, Shape, arrays_of, blocks_of, hashes_of, stored


class LayersContract:
    """Ranges of layers, loads and stores layer by layer."""

    @pytest.mark.parametrize("kind", SHAPES)
    def test_a_range_of_layers_is_loaded_and_the_others_stay(self, transfers: Make, kind: str) -> None:
        shape = SHAPES[kind]
        before = arrays_of(shape, 15)
        bench = transfers(before, shape.axis)
        hashes = hashes_of(15 + 256 * list(SHAPES).index(kind), 5)
        bench.transfers.store(bench.namespace, hashes, range(5))
        other, layers = arrays_of(shape, 16), shape.tensors
        bench.write(other)
        first, end = layers // 2, layers
        assert bench.transfers.load(bench.namespace, hashes, range(10, 15), layers=(first, end)) == 5
        after = bench.read()
        for layer in range(layers):
            came = before if first <= layer < end else other
            expected = [*range(5)] if first <= layer < end else [*range(10, 15)]
            assert (after[layer].take(range(10, 15), shape.axis) == came[layer].take(expected, shape.axis)).all()
        for wrong in ((0, layers + 1), (1, 1), (-1, 1)):
            with pytest.raises(ValueError, match="layers"):
                bench.transfers.load(bench.namespace, hashes, range(5), layers=wrong)

    @pytest.mark.parametrize("layers", [None, (1, 3)])
    def test_a_load_by_layers_tells_each_that_is_in_place(
        self, transfers: Make, layers: tuple[int, int] | None
    ) -> None:
        shape = Shape((BLOCKS, 16, 64), 0, tensors=6)
        before = arrays_of(shape, 17)
        bench = transfers(before, 0)
        hashes = hashes_of(17, 8)
        bench.transfers.store(bench.namespace, hashes[:6], range(6))
        other = arrays_of(shape, 18)
        bench.write(other)
        first, end = layers or (0, 6)
        loading = bench.transfers.start_load(
            bench.namespace, hashes, range(10, 18), by_layer=True, layers=layers, wait_s=1.0
        )
        deadline_s, seen = time.monotonic() + 60.0, 0
        while not loading.done() or seen < end - first:
            arrived = loading.arrived()
            assert arrived in ((0, 0), (6, arrived.layers))
            assert arrived.layers >= seen
            seen = arrived.layers
            for layer, array in enumerate(bench.read()[first : first + seen], first):
                assert (array[10:16] == before[layer][:6]).all(), f"layer {layer}"
            assert time.monotonic() < deadline_s, "all layers are told"
        assert loading.result() == 6
        assert loading.arrived() == (6, end - first)
        for layer, array in enumerate(bench.read()):
            if not first <= layer < end:
                assert (array[10:16] == other[layer][10:16]).all(), f"layer {layer}"

    def test_a_load_by_layers_of_what_is_not_stored_is_a_miss(self, transfers: Make) -> None:
        bench = transfers(arrays_of(SHAPES["mla"], 19), 0)
        for hashes in ([], hashes_of(19, 3)):
            loading = bench.transfers.start_load(bench.namespace, hashes, range(len(hashes)), by_layer=True)
            assert loading.result() == 0
            assert loading.done()
            assert loading.arrived() == (0, 0)

    def test_a_store_by_layers_copies_each_when_it_is_ready(self, transfers: Make) -> None:
        shape = Shape((BLOCKS, 16, 64), 0, tensors=4)
        final, arrays = arrays_of(shape, 26), arrays_of(shape, 27)
        bench = transfers(arrays, 0)
        hashes, ids = hashes_of(26, 5), [3, 9, 1, 0, 20]
        with bench.transfers.start_store(bench.namespace, hashes, ids) as storing:
            with pytest.raises(RuntimeError, match="0 of 4 layers"):
                storing.result()
            for layer in range(4):  # the engine writes a layer just before it says so
                bench.write([*final[: layer + 1], *arrays[layer + 1 :]])
                storing.ready(layer + 1)
            for wrong in (3, 5):
                with pytest.raises(ValueError, match="layers are ready"):
                    storing.ready(wrong)
            result = storing.result()
        assert (result.stored, result.outcomes) == (5, [Outcome.HIT] * 5)
        assert storing.result() == result
        expected = [stored(final, 0, i) for i in ids]
        assert blocks_of(bench, hashes, len(expected[0])) == expected
        again = bench.transfers.start_store(bench.namespace, hashes, ids)
        again.ready(4)
        assert again.result().existing == 5, "nothing had to be copied"

    def test_a_store_by_layers_without_a_daemon_says_so(self, transfers: Make) -> None:
        bench = transfers(arrays_of(SHAPES["mla"], 29), 0)
        bench.lose_daemon()
        storing = bench.transfers.start_store(bench.namespace, hashes_of(29, 2), [0, 1])
        storing.ready(3)
        assert storing.copied() == (0, 0)
        result = storing.result()
        assert (result.stored, result.refused, result.error is None) == (0, 2, False)

    def test_a_store_by_layers_whose_deadline_has_passed_is_given_up(self, transfers: Make) -> None:
        bench = transfers(arrays_of(SHAPES["mla"], 30), 0)
        hashes = hashes_of(30, 4)
        assert bench.transfers.store(bench.namespace, hashes[:1], [0]).stored == 1
        storing = bench.transfers.start_store(bench.namespace, hashes, range(4), deadline_s=0.05)
        storing.ready(1)
        time.sleep(0.2)
        storing.ready(3)
        result = storing.result()
        assert (result.stored, result.outcomes[1:], result.error) == (0, [Outcome.MISS] * 3, None)
        assert "deadline" in bench.transfers.reason
        assert bench.client.contains(bench.namespace, hashes) == [Outcome.HIT] + [Outcome.MISS] * 3
        assert bench.transfers.store(bench.namespace, hashes, range(4), deadline_s=60.0).stored == 3
        assert nothing_is_held(bench)

    def test_a_store_by_layers_that_is_cancelled_stores_nothing(self, transfers: Make) -> None:
        bench = transfers(arrays_of(SHAPES["mla"], 28), 0)
        hashes = hashes_of(28, 3)
        storing = bench.transfers.start_store(bench.namespace, hashes, range(3))
        storing.ready(2)
        assert storing.cancel().stored == 0
        with (
            pytest.raises(ZeroDivisionError),
            bench.transfers.start_store(bench.namespace, hashes, range(3)) as storing,
        ):
            raise ZeroDivisionError
        assert bench.client.contains(bench.namespace, hashes) == [Outcome.MISS] * 3
        assert bench.transfers.store(bench.namespace, hashes, range(3)).stored == 3
        assert nothing_is_held(bench)


class EarlyLayersContract:
    """Backends that copy a layer as soon as it is ready."""

    def test_each_layer_is_copied_before_the_next_is_ready(self, transfers: Make) -> None:
        arrays = arrays_of(Shape((BLOCKS, 4096), 0, tensors=3), 31)
        before = [array.copy() for array in arrays]
        bench = transfers(arrays, 0)
        hashes = hashes_of(31, 6)
        with bench.transfers.start_store(bench.namespace, hashes, range(6)) as storing:
            assert storing.copied() == (0, 0)
            for layer in (1, 2):
                storing.ready(layer)
                eventually(partial(_is_copied, storing, layer), "it is copied")
                bench.write([np.zeros_like(array) for array in arrays[:layer]] + before[layer:])  # to see that it was
                assert bench.client.contains(bench.namespace, hashes) == [Outcome.PENDING] * 6
            storing.ready(3)
            assert storing.result().stored == 6
        assert storing.copied() == (6, 3)
        expected = [stored(before, 0, i) for i in range(6)]
        assert blocks_of(bench, hashes, len(expected[0])) == expected


def eventually(look: Callable[[], bool], what: str) -> None:
    """Wait until it is so."""
    deadline_s = time.monotonic() + 20.0
    while not look():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.001)


def _is_copied(storing: Any, layers: int) -> bool:
    return bool(storing.copied() == (6, layers))


def nothing_is_held(bench: Bench) -> bool:
    """Whether no session has leases or reservations."""
    status = bench.client.status()
    return status is not None and all(not s.leases and not s.reservations for s in status.sessions)
