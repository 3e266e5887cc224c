"""Strided fragments against numpy: random shapes, strides and axes, and what is refused."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvstored_client.paged import PagedKV, tensor_of
from kvstored_proto.layout import SPAN_BYTES_MAX, Fragment, Layout, fragments_of, joined

ITEMS = [np.uint8, np.uint16, np.float32]


@st.composite
def tensors(draw):
    """Arrays of the same number of blocks, with a block axis each; axes permuted in memory, some with gaps."""
    blocks, made = draw(st.integers(1, 6)), []
    for _ in range(draw(st.integers(1, 3))):
        inner = draw(st.lists(st.integers(1, 4), max_size=3))
        axis = draw(st.integers(0, len(inner)))
        shape = [*inner[:axis], blocks, *inner[axis:]]
        order = draw(st.permutations(range(len(shape))))
        gaps = [draw(st.integers(1, 2)) for _ in shape]
        lying = np.zeros([shape[i] * gaps[i] for i in order], draw(st.sampled_from(ITEMS)))
        view = lying[tuple(slice(None, None, gaps[i]) for i in order)].transpose(np.argsort(order))
        made.append((view, axis))
    return made


def fill(arrays, seed):
    rng = np.random.default_rng(seed)
    for array in arrays:
        array[...] = rng.integers(0, 250, array.shape)


def by_addresses(first, second, sizes):
    """Copy as a device would."""
    import ctypes

    for a, b, n in zip(first.tolist(), second.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(b, a, n)


@given(tensors(), st.data())
def test_fragments_of_random_tensors_give_what_numpy_takes(made, data):
    arrays, axes = [a for a, _ in made], [i for _, i in made]
    fill(arrays, 1)
    kv = PagedKV(arrays, axes)
    each = data.draw(st.integers(1, 2))
    keys = data.draw(st.integers(1, 4))
    ids = kv.layout.check_ids(
        data.draw(st.lists(st.integers(0, kv.layout.blocks - 1), min_size=keys * each, max_size=keys * each)), keys
    )
    stored = np.zeros((keys, each * kv.block_bytes + 7), np.uint8)
    slots = stored.ctypes.data + np.arange(keys, dtype=np.uint64) * np.uint64(stored.strides[0])
    by_addresses(*kv.layout.plan(ids, [tensor.address for tensor in kv.tensors], slots))
    for key, row in enumerate(ids.tolist()):
        expected = b"".join(np.take(a, i, axis).tobytes() for i in row for a, axis in zip(arrays, axes, strict=True))
        assert stored[key, :-7].tobytes() == expected
        assert not stored[key, -7:].any(), "nothing past the block"


@given(tensors(), st.booleans())
def test_copies_of_the_client_move_the_same_bytes_as_the_plan(made, memory_order):
    arrays, axes = [a for a, _ in made], [i for _, i in made]
    fill(arrays, 2)
    kv = PagedKV(arrays, axes, memory_order=memory_order)
    blocks = kv.layout.blocks
    ids = kv.layout.check_ids(np.random.default_rng(3).permutation(blocks), blocks)
    planned, copied = (np.zeros((blocks, kv.block_bytes), np.uint8) for _ in range(2))
    places = [int(copied.ctypes.data) + i * kv.block_bytes for i in range(blocks)]
    kv.at(ids.ravel()).place(blocks, writable=False).read(range(blocks), places)
    slots = planned.ctypes.data + np.arange(blocks, dtype=np.uint64) * np.uint64(kv.block_bytes)
    by_addresses(*kv.layout.plan(ids, [tensor.address for tensor in kv.tensors], slots))
    assert (planned == copied).all()
    before = [array.copy() for array in arrays]
    fill(arrays, 4)
    kv.at(ids.ravel()).place(blocks, writable=True).write(0, blocks, copied.ctypes.data, kv.block_bytes)
    assert all((a == b).all() for a, b in zip(arrays, before, strict=True))


def test_usual_layouts_have_as_few_fragments_as_they_can():
    def sizes(shape, axis, order=None):
        lying = np.zeros([shape[i] for i in order or range(len(shape))], np.uint16)
        view = lying.transpose(np.argsort(order)) if order else lying
        return [f.size for f in fragments_of(0, view.shape, view.strides, 2, axis)]

    assert sizes((2, 9, 16, 8, 128), 1) == [32768] * 2, "K/V-first"
    assert sizes((9, 2, 16, 8, 128), 0) == [65536], "blocks-first"
    assert sizes((9, 16, 576), 0) == [18432], "MLA"
    assert sizes((9, 80, 2, 16, 1024), 0) == [80 * 65536], "cross-layer"
    assert sizes((2, 9, 16, 8, 128), 1, (0, 1, 3, 2, 4)) == [256] * 256, "heads before tokens in memory"


def test_in_the_order_of_memory_permuted_tensors_are_whole():
    view = np.zeros((2, 9, 8, 16, 128), np.uint16).transpose(0, 1, 3, 2, 4)
    assert [f.size for f in fragments_of(0, view.shape, view.strides, 2, 1, memory_order=True)] == [32768] * 2


def test_blocks_that_follow_one_another_on_both_sides_are_one_copy():
    layout = Layout([Fragment(0, 0, 64, 64)], 10, [640])
    engine, stored, sizes = layout.plan(layout.check_ids([3, 4, 5, 9], 4), [1000], np.arange(4, dtype=np.uint64) * 64)
    assert (engine.tolist(), stored.tolist(), sizes.tolist()) == ([1192, 1576], [0, 192], [192, 64])


@pytest.mark.parametrize("wrong", [-1, 10, -(1 << 63), np.uint64(1 << 63), 1 << 32])
def test_ids_of_blocks_that_there_are_not_are_refused(wrong):
    layout = Layout([Fragment(0, 0, 64, 64)], 10, [640])
    assert layout.check_ids(np.asfortranarray([[0, 9], [9, 0]]), 2).tolist() == [[0, 9], [9, 0]]
    with pytest.raises(ValueError, match="there are 10 blocks"):
        layout.check_ids(np.array([wrong, wrong]), 2)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=9))
def test_joining_moves_the_same_bytes(pieces):
    def bytes_of(a, b, n):
        return [(x + i, y + i) for x, y, z in zip(a, b, n, strict=True) for i in range(z)]

    a, b, n = (np.array(column, np.uint64) for column in zip(*pieces, strict=True))
    assert bytes_of(*(c.tolist() for c in joined(a, b, n))) == bytes_of(a.tolist(), b.tolist(), n.tolist())


@pytest.mark.parametrize(
    ("fragments", "blocks", "regions"),
    [
        ([], 1, [64]),
        ([Fragment(0, 0, 64, 64)], 0, [64]),
        ([Fragment(0, 0, 64, 64)], 2, [127]),
        ([Fragment(0, 1, 64, 64)], 1, [64]),
        ([Fragment(1, 0, 64, 64)], 1, [64]),
        ([Fragment(0, -1, 64, 32)], 1, [64]),
        ([Fragment(0, 0, 63, 64)], 2, [640]),
        ([Fragment(0, 0, -64, 64)], 1, [640]),
        ([Fragment(0, 0, 1 << 63, 1)], 1, [64]),
        ([Fragment(0, 0, 64, 0)], 1, [64]),
        ([Fragment(0, 0, 64, 64)], 1, []),
        ([Fragment(0, 0, 64, 64)], 1, [SPAN_BYTES_MAX + 1]),
        ([Fragment(0, 0, 64, 64)], (1 << 31) + 1, [SPAN_BYTES_MAX]),
    ],
)
def test_layouts_that_leave_their_memory_or_make_no_sense_are_refused(fragments, blocks, regions):
    with pytest.raises(ValueError, match=r"fragment|region"):
        Layout(fragments, blocks, regions)


@pytest.mark.parametrize(
    ("shape", "strides", "axis"),
    [
        ((), (), 0),
        ((3,), (2,), 1),
        ((3, 0), (2, 2), 0),
        ((3, 2), (-4, 2), 0),
        ((3, 5), (2, 0), 0),
        ((2, 1 << 17), (1 << 20, 4), 0),
    ],
)
def test_tensors_that_hold_no_blocks_are_refused(shape, strides, axis):
    with pytest.raises(ValueError, match=r"tensor|axis|pieces"):
        fragments_of(0, shape, strides, 2, axis)


def test_tensors_must_agree():
    with pytest.raises(ValueError, match="the same number"):
        PagedKV([np.zeros((4, 8)), np.zeros((5, 8))])
    with pytest.raises(ValueError, match="no tensor"):
        PagedKV([])
    with pytest.raises(ValueError, match="2 block axes for 1 tensors"):
        PagedKV([np.zeros((4, 8))], [0, 1])
    with pytest.raises(TypeError, match="is no tensor"):
        PagedKV([b"bytes"])


class OnDevice:
    """What cupy and others show of an array."""

    def __init__(self, strides=None):
        self.__cuda_array_interface__ = {
            "shape": (4, 2, 8),
            "typestr": "<f2",
            "data": (1 << 40, False),
            "version": 3,
            "strides": strides,
        }


def test_arrays_of_a_device_are_looked_at_and_never_touched():
    assert tensor_of(OnDevice()).strides_bytes == (32, 16, 2)
    assert tensor_of(OnDevice((64, 16, 2))).span_bytes == 3 * 64 + 32
    kv = PagedKV([OnDevice()])
    assert (kv.device, kv.block_bytes) == ("cuda", 32)
    with pytest.raises(TypeError, match="only the CPU"):
        kv.at([0]).place(1, writable=False)
    with pytest.raises(ValueError, match="different devices"):
        PagedKV([OnDevice(), np.zeros((4, 8))])


def test_a_read_only_array_is_a_source_only():
    array = np.zeros((4, 8))
    array.flags.writeable = False
    kv = PagedKV(array)
    kv.at([0]).place(1, writable=False)
    with pytest.raises(TypeError, match="read-only"):
        kv.at([0]).place(1, writable=True)


def test_addresses_near_the_end_of_64_bits_do_not_wrap():
    layout = Layout([Fragment(0, 1 << 40, 1 << 20, 512)], 1 << 20, [1 << 41])
    base = (1 << 63) + 12345
    engine, _, _ = layout.plan(layout.check_ids([(1 << 20) - 1], 1), [base], np.zeros(1, np.uint64))
    assert int(engine[0]) == base + (1 << 40) + ((1 << 20) - 1 << 20)
    assert list(itertools.chain(engine.tolist())) == [int(engine[0])]
