"""Several groups of layers in the vLLM connector: which cut of a request is held, what is loaded and saved for it."""

from collections import Counter

import pytest
from kvstored_client import Outcome
from kvstored_client.engines.vllm.cuts import Question, hold, tracks_of
from kvstored_client.engines.vllm.orders import Report
from kvstored_client.engines.vllm.requests import Saves, Tracked, written_blocks
from kvstored_client.engines.vllm.shape import Group, Shape
from vllm_fakes import BLOCK, FULL, Held, Store, answered, end_threads, output, request, side


def window(number, blocks, length=BLOCK):
    """A group that needs the last so many blocks of its own."""
    return Group(number, "SlidingWindowSpec", (f"w{number}",), length, 16384, blocks * length, blocks * length)


class Stored(Store):
    """Has some blocks of each namespace, by their number in the request; `coming` are seen and cannot be held yet."""

    def __init__(self, blocks, coming=()):
        super().__init__()
        self.blocks = {name: set(numbers) for name, numbers in blocks.items()}
        self.coming = {name: set(numbers) for name, numbers in dict(coming).items()}
        self.gone = set()  # namespaces whose blocks are named by `contains`, and not there for a `get`
        self.asked_for = []

    def number(self, hash_):
        return hash_[1]

    def get(self, namespaces, hashes, wait_s):
        numbers = [self.number(each) for each in hashes]
        self.asked_for.append((list(namespaces), numbers, wait_s))
        count, outcome = 0, Outcome.MISS
        for number in numbers:
            for name in namespaces:
                there = self.blocks[name] | (self.coming.get(name, set()) if wait_s else set())
                if number not in there or name in self.gone:
                    outcome = Outcome.PENDING if number in self.coming.get(name, ()) else Outcome.MISS
                    break
            else:
                count += 1
                continue
            break
        held = Held(count, outcome)
        self.gave.append(held)
        return held

    def contains(self, namespace, hashes):
        there = self.blocks[namespace] | self.coming.get(namespace, set())
        return [Outcome.HIT if self.number(each) in there else Outcome.MISS for each in hashes]

    @property
    def held(self):
        return sum(1 for each in self.gave if not each.released)


def question(groups, start=0, end=10, hash_tokens=BLOCK):
    shape = Shape(tuple(groups), hash_tokens)
    tracks = tracks_of(shape, [[str(group.number)] for group in groups])
    return Question(shape, tracks, request(tokens=40 * BLOCK).block_hashes, start, end)


def cut(store, groups, start=0, end=10, wait_s=0.0, **more):
    held = hold(store, question(groups, start, end, **more), end, wait_s)
    return start + len(held), held


@pytest.fixture(autouse=True)
def _threads_end():
    yield
    end_threads()


# ---- cuts ----


@pytest.mark.parametrize(
    ("tokens", "first"),
    [(0, 0), (4 * BLOCK, 0), (5 * BLOCK, 1), (5 * BLOCK + 1, 1), (5 * BLOCK - 2, 0), (20 * BLOCK, 16)],
)
def test_a_window_needs_the_blocks_that_its_last_tokens_lie_in(tokens, first):
    # After 5 blocks of 32 the next token sees itself and 127 before it: of block 1 on.
    assert window(0, 4).first_needed(tokens) == first
    assert FULL.first_needed(tokens) == 0


def test_a_window_needs_only_the_last_blocks_before_the_cut():
    store = Stored({"0": range(10), "1": [6, 7, 8, 9]})
    found, held = cut(store, [FULL, window(1, 4)])
    assert found == 10
    assert store.asked_for == [(["0"], list(range(10)), 0.0), (["1"], [6, 7, 8, 9], 0.0)]
    held.release()
    assert store.held == 0


def test_full_attention_bounds_the_cut_and_the_window_is_that_before_it():
    found, _ = cut(Stored({"0": range(7), "1": range(10)}), [FULL, window(1, 3)])
    assert found == 7


def test_the_cut_goes_back_until_every_window_is_whole():
    store = Stored({"0": range(10), "1": [0, 1, 2, 3, 4, 5, 7, 8, 9], "2": [3, 4, 6, 7, 8, 9]})
    found, held = cut(store, [FULL, window(1, 4), window(2, 2)])
    assert found == 5  # 8 to 10 lack 6 of the first window, 7 lacks it too, 6 lacks 5 of the second
    held.release()
    assert store.held == 0


def test_without_a_whole_window_nothing_is_held():
    store = Stored({"0": range(10), "1": [9]})
    found, _ = cut(store, [FULL, window(1, 4)])
    assert (found, store.held) == (0, 0)


def test_what_the_engine_has_itself_is_not_asked_for():
    store = Stored({"0": range(5, 10), "1": range(5, 10)})
    assert cut(store, [FULL, window(1, 4)], start=5, end=7)[0] == 7
    assert [numbers for _, numbers, _ in store.asked_for] == [[5, 6], [5, 6]]


def test_only_windows():
    store = Stored({"0": [3, 4, 5, 6]})
    found, _ = cut(store, [window(0, 3)])
    assert found == 7


def test_groups_that_are_needed_alike_are_asked_for_together():
    store = Stored({str(i): range(10) for i in range(4)})
    cut(store, [FULL, window(1, 4), window(2, 4), window(3, 4)])
    assert [names for names, _, _ in store.asked_for] == [["0"], ["1", "2", "3"]]


def test_blocks_of_different_length_end_together():
    # Hashes for 32 tokens, blocks of 32 and 64: the key of a long one is its last hash, and cuts are at even numbers.
    store = Stored({"0": range(9), "1": [1, 3, 5, 7]})
    found, _ = cut(store, [FULL, window(1, 2, 2 * BLOCK)], end=5)
    assert found == 4  # units of two short blocks
    assert store.asked_for[1] == (["1"], [5, 7], 0.0)


def test_a_window_that_vanishes_between_two_questions_holds_nothing():
    store = Stored({"0": range(10), "1": range(9)})
    store.gone = {"1"}
    found, _ = cut(store, [FULL, window(1, 2)])
    assert (found, store.held) == (0, 0)


def test_a_client_that_fails_leaves_nothing_held():
    store = Stored({"0": range(10), "1": range(10)})
    get = store.get

    def failing(namespaces, hashes, wait_s):
        if namespaces == ["1"]:
            raise RuntimeError("no")
        return get(namespaces, hashes, wait_s)

    store.get = failing
    with pytest.raises(RuntimeError, match="no"):
        cut(store, [FULL, window(1, 4)])
    assert store.held == 0


def test_windows_that_come_up_are_waited_for():
    store = Stored({"0": range(10), "1": range(8)}, coming={"1": [8, 9]})
    scheduler = side(store, groups=(FULL, window(1, 4)))
    assert answered(scheduler, request()) == (10 * BLOCK, True)
    assert [wait_s > 0 for _, _, wait_s in store.asked_for][-2:] == [True, True]
    assert store.held == 2


# ---- loads ----


def promised(scheduler, asked, tables, computed=0):
    tokens, _ = answered(scheduler, asked, computed)
    scheduler.allocated(asked, tables, tokens)
    return scheduler.step(output())


def test_of_a_window_only_what_the_engine_has_blocks_for_is_loaded():
    store = Stored({"0": range(10), "1": range(10)})
    scheduler = side(store, groups=(FULL, window(1, 4)))
    tables = [list(range(100, 111)), [0] * 6 + [200, 201, 202, 203, 204]]
    (order,) = promised(scheduler, request(), tables).loads
    hashes = request().block_hashes
    assert [(run.group, run.hashes, run.block_ids) for run in order.runs] == [
        (0, hashes[:10], list(range(100, 110))),
        (1, hashes[6:10], [200, 201, 202, 203]),
    ]
    scheduler.reported(Report(loaded={"r": 1}), ())
    assert store.held == 0


def test_what_the_engine_has_of_a_window_is_not_loaded():
    store = Stored({"0": range(10), "1": range(10)})
    scheduler = side(store, groups=(FULL, window(1, 4)))
    tables = [list(range(100, 111)), [0] * 6 + [200, 201, 202, 203, 204]]
    (order,) = promised(scheduler, request(), tables, computed=8 * BLOCK).loads
    assert [run.block_ids for run in order.runs] == [[108, 109], [202, 203]]


def test_a_load_that_failed_as_a_whole_is_not_tried_again_and_all_is_saved():
    store = Stored({"0": range(10), "1": range(10)})
    scheduler = side(store, groups=(FULL, window(1, 4)))
    promised(scheduler, request(), [list(range(100, 111)), [0] * 6 + [200, 201, 202, 203, 204]])
    scheduler.reported(Report(loaded={"r": 1}), (), {"r", "another's"})
    assert scheduler.matched(request(), 0) == (0, False)
    assert store.held == 0
    tables = (list(range(100, 111)), list(range(200, 211)))
    scheduler.allocated(request(), tables, 0)
    step = scheduler.step(output(new=[("r", tables, 0)], scheduled={"r": request().num_tokens}))
    assert [len(save.run.hashes) for save in step.saves] == [10, 10]


def test_requests_that_share_a_prefix_wait_for_a_load_of_its_windows_too():
    store = Stored({"0": range(10), "1": range(10)})
    scheduler = side(store, groups=(FULL, window(1, 2)))
    promised(scheduler, request("first"), [list(range(100, 111)), [0] * 8 + [200, 201, 202]])
    assert scheduler.matched(request("second"), 0) == (None, False)  # from block 0 on, of which no window was loaded


# ---- saves ----


def due(saves, tracked, before, upto):
    return [(s.run.group, s.run.block_ids, s.run.hashes, s.parent) for s in saves.due(tracked, before, upto)]


def test_each_group_saves_its_full_blocks():
    saves, asked = Saves(Shape((FULL, window(1, 4)), BLOCK), 1000), request()
    tracked = Tracked(asked, [list(range(100, 111)), list(range(200, 211))])
    hashes = asked.block_hashes
    assert due(saves, tracked, 0, 6 * BLOCK + 1) == [
        (0, list(range(100, 106)), hashes[:6], b""),
        (1, list(range(200, 206)), hashes[:6], b""),
    ]
    assert due(saves, tracked, 6 * BLOCK + 1, 8 * BLOCK) == [
        (0, [106, 107], hashes[6:8], hashes[5]),
        (1, [206, 207], hashes[6:8], hashes[5]),
    ]


def test_what_a_window_has_dropped_is_not_saved_again():
    """Its block may be another request's by now."""
    saves, asked = Saves(Shape((FULL, window(1, 4)), BLOCK), 1000), request()
    tracked = Tracked(asked, [list(range(100, 111)), list(range(200, 211))])
    saves.due(tracked, 0, 8 * BLOCK)
    tracked.saved_tokens = 0  # a save was taken back
    assert [blocks for _, blocks, _, _ in due(saves, tracked, 8 * BLOCK, 10 * BLOCK)] == [
        list(range(100, 110)),
        [204, 205, 206, 207, 208, 209],
    ]


def test_blocks_that_a_window_never_had_are_not_saved():
    saves, asked = Saves(Shape((FULL, window(1, 4)), BLOCK), 1000), request()
    tracked = Tracked(asked, [list(range(100, 111)), [0] * 5 + [205, 206, 207, 208, 209, 210]])
    assert due(saves, tracked, 0, 10 * BLOCK)[1][1] == [205, 206, 207, 208, 209]


def test_long_blocks_are_saved_when_they_are_full():
    saves, asked = Saves(Shape((FULL, window(1, 2, 2 * BLOCK)), BLOCK), 1000), request()
    tracked = Tracked(asked, [list(range(100, 111)), list(range(200, 206))])
    hashes = asked.block_hashes
    assert due(saves, tracked, 0, 3 * BLOCK) == [(0, [100, 101, 102], hashes[:3], b""), (1, [200], [hashes[1]], b"")]
    assert due(saves, tracked, 3 * BLOCK, 4 * BLOCK) == [
        (0, [103], [hashes[3]], hashes[2]),
        (1, [201], [hashes[3]], hashes[1]),
    ]


def test_what_a_step_writes_is_told_for_every_group():
    shape = Shape((FULL, window(1, 2, 2 * BLOCK)), BLOCK)
    assert written_blocks(shape, [[10, 11, 12], [20, 21]], 2 * BLOCK + 5) == [12, 21]


def test_a_window_s_block_that_another_request_gets_takes_its_save_back():
    scheduler = side(Stored({"0": [], "1": []}), groups=(FULL, window(1, 4)))
    tables = (list(range(100, 111)), list(range(200, 211)))
    scheduler.matched(request(), 0)
    scheduler.allocated(request(), tables, 0)
    saves = scheduler.step(output(new=[("r", tables, 0)], scheduled={"r": request().num_tokens})).saves
    other = request("other", key=b"o")
    theirs = (list(range(300, 311)), [200, *range(401, 411)])
    scheduler.matched(other, 0)
    scheduler.allocated(other, theirs, 0)
    step = scheduler.step(output(new=[("other", theirs, 0)], scheduled={"other": other.num_tokens}))
    assert step.taken == {saves[1].job_id: {200}}
    assert [save.alone for save in saves] == [False, True]


class Pins:
    """Counts how often each block is held."""

    def __init__(self):
        self.held = Counter()

    def hold(self, block_ids):
        self.held.update(block_ids)

    def release(self, block_ids):
        self.held -= Counter(block_ids)


def test_blocks_of_windows_are_pinned_until_every_worker_has_saved_them():
    saves, pins = Saves(Shape((FULL, window(1, 4)), BLOCK, workers=2), 1000), Pins()
    saves.pins = pins
    _, of_window = saves.due(Tracked(request(), [list(range(100, 111)), list(range(200, 211))]), 0, 3 * BLOCK)
    assert pins.held == {200: 1, 201: 1, 202: 1}
    saves.reported({of_window.job_id: 1}, {})
    assert pins.held
    saves.reported({of_window.job_id: 1}, {})
    assert not pins.held
