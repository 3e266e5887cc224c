"""The scheduler's half of the vLLM connector, with fakes for the engine and the store."""

import threading
import time
from types import SimpleNamespace

import pytest
from kvstored_client import LookupResult, Outcome, Unavailable, threads
from kvstored_client.engines.vllm import adapters
from kvstored_client.engines.vllm.adapters import Adapters
from kvstored_client.engines.vllm.cuts import tracks_of
from kvstored_client.engines.vllm.orders import ALL, Report, Run
from kvstored_client.engines.vllm.requests import Saves, Tracked
from kvstored_client.engines.vllm.shape import Group, Shape
from vllm_fakes import BLOCK, FULL, Held, Store, answered, end_threads, load, output, request, side

from tests.shortages import no_threads


@pytest.fixture(autouse=True)
def _threads_end():
    yield
    end_threads()


# ---- lookups ----


def test_the_first_ask_never_waits_and_a_later_one_has_the_answer():
    store = Store((4,))
    store.gate.clear()
    scheduler = side(store)
    assert scheduler.matched(request(), 0) == (None, False)  # and no answer, for which it would have waited
    store.gate.set()
    assert answered(scheduler, request()) == (4 * BLOCK, True)
    assert len(store.asked) == 1  # asked once, however often the engine does


def test_a_request_for_which_there_is_no_thread_to_ask_in_is_computed_and_the_next_is_asked_for():
    store = Store((4,))
    scheduler = side(store)
    with no_threads():
        assert scheduler.matched(request(), 0) == (0, False)
    assert store.asked == []
    assert answered(scheduler, request("next")) == (4 * BLOCK, True)
    unasked = side(store)
    with no_threads():
        assert unasked.matched(request(), 0) == (0, False)
        unasked.close()


def test_what_no_thread_can_wait_for_is_no_promise(monkeypatch):
    class Kept(Held):
        def __len__(self):  # as of blocks of the client, which know it after their release, too
            return self.count

    def refused(*_):
        raise Unavailable("can't start new thread")

    store, held = Store((4,)), Kept(2, Outcome.PENDING)
    scheduler = side(store)
    monkeypatch.setattr(store, "get", lambda *_: held)
    monkeypatch.setattr(threads, "submit", refused)
    assert answered(scheduler, request()) == (0, False)
    assert held.released == 1


def test_at_least_one_token_is_left_to_compute():
    store = Store((2,))
    scheduler = side(store)
    answered(scheduler, request(tokens=2 * BLOCK + 1))
    answered(scheduler, request("exact", tokens=2 * BLOCK))
    assert [len(hashes) for hashes, _ in store.asked] == [2, 1]


def test_only_what_the_engine_lacks_is_asked_for():
    store = Store((2,))
    scheduler = side(store)
    assert answered(scheduler, request(), computed=3 * BLOCK) == (2 * BLOCK, True)
    assert store.asked[0][0] == request().block_hashes[3:10]


def test_blocks_that_come_up_are_waited_for_elsewhere():
    store = Store((1, Outcome.PENDING), (10,))
    scheduler = side(store)
    assert answered(scheduler, request()) == (10 * BLOCK, True)
    assert store.asked[0][1] == 0.0
    assert store.asked[1][1] > 1.0
    assert [held.released for held in store.gave] == [1, 0]


@pytest.mark.parametrize(("paying", "loaded", "waits"), [(1, 1, 0), (6, 6, 1)])
def test_what_is_computed_faster_is_not_waited_for(paying, loaded, waits):
    store = Store((1, Outcome.PENDING), (paying,))
    store.lookup = lambda namespaces, hashes, *, prefill_tokens_per_s: LookupResult(10, paying_blocks=paying)
    scheduler = side(store, rate=1000.0)
    assert answered(scheduler, request()) == (loaded * BLOCK, True)
    assert [len(hashes) for hashes, _ in store.asked] == [10, paying][: 1 + waits]


def test_a_request_that_waits_too_long_is_computed_and_a_late_answer_is_let_go():
    store = Store((10,))
    store.gate.clear()
    scheduler = side(store, lookup_wait_s=0.01)
    assert answered(scheduler, request()) == (0, False)
    while not store.asked:  # else it is dropped before it is asked
        time.sleep(0.001)
    store.gate.set()
    scheduler.close()
    assert [held.released for held in store.gave] == [1]
    assert scheduler.take_counts()["lookup_late"] == 1


def test_a_lookup_that_fails_is_a_miss():
    scheduler = side(Store(RuntimeError("no")))
    assert answered(scheduler, request()) == (0, False)


def test_short_requests_and_short_hits_pass_untouched():
    store = Store((3,))
    scheduler = side(store, min_tokens=4 * BLOCK)
    assert scheduler.matched(request(tokens=4 * BLOCK), 0) == (0, False)
    assert store.asked == []
    assert answered(scheduler, request("hit")) == (0, False)
    scheduler.allocated(request("hit"), [[1]], 0)
    assert [held.released for held in store.gave] == [1]


def test_a_write_only_engine_asks_nothing():
    store = Store((3,))
    assert side(store, mode="write-only").matched(request(), 0) == (0, False)
    assert store.asked == []


def adapter(where, name="tone", content=b"\1", number=1):
    where.mkdir(parents=True, exist_ok=True)
    (where / "adapter_config.json").write_text('{"r": 8}')
    (where / "adapter_model.safetensors").write_bytes(content * 4096)
    return SimpleNamespace(lora_int_id=number, lora_name=name, lora_path=str(where), load_inplace=False)


def saved_whole(scheduler, asked):
    """The one save of a request that the engine computes as a whole."""
    assert answered(scheduler, asked) == (0, False)
    scheduler.allocated(asked, [list(range(11))], 0)
    new = [(asked.request_id, list(range(11)), 0)]
    return scheduler.step(output(new=new, scheduled={asked.request_id: asked.num_tokens})).saves


def test_requests_with_an_adapter_are_apart_by_what_it_holds(tmp_path):
    store = Store((0,))
    scheduler = side(store)
    same = adapter(tmp_path / "one")
    loras = [None, same, adapter(tmp_path / "two", content=b"\2"), adapter(tmp_path / "one", name="other"), same]
    identities = [saved_whole(scheduler, request(str(i), lora=lora))[0].adapter for i, lora in enumerate(loras)]
    assert identities[0] == ""
    assert len(set(identities)) == 4
    assert identities[1] == identities[4]
    assert store.namespaces == [[f"0{identity}"] for identity in identities]


def test_an_adapter_that_was_changed_and_loaded_anew_is_another(tmp_path):
    scheduler = side(Store((0,)))
    before = saved_whole(scheduler, request("a", lora=adapter(tmp_path / "one")))
    after = saved_whole(scheduler, request("b", lora=adapter(tmp_path / "one", content=b"\2", number=2)))
    assert before[0].adapter != after[0].adapter


@pytest.mark.parametrize(
    "lora",
    [
        SimpleNamespace(lora_int_id=1, lora_name="x", lora_path="someone/on-the-hub", load_inplace=False),
        SimpleNamespace(lora_int_id=1, lora_name="x", lora_path="/tmp", load_inplace=True),
        SimpleNamespace(lora_int_id=1, lora_name="x", lora_path="/dev", load_inplace=False),  # no adapter there
    ],
)
def test_requests_with_an_adapter_that_nothing_tells_are_left_alone(lora, caplog):
    store = Store((3,))
    scheduler = side(store)
    for number in range(3):
        assert saved_whole(scheduler, request(str(number), lora=lora)) == []
    assert store.asked == []
    assert [record.getMessage().count("nothing tells what it holds") for record in caplog.records].count(1) == 1


def test_a_request_does_not_wait_for_its_adapter_for_ever(tmp_path, monkeypatch):
    now, go_on = [0.0], threading.Event()
    monkeypatch.setattr(adapters, "adapter_identity", lambda *_: go_on.wait(60) and "late")
    found, asked = Adapters(2.0, clock=lambda: now[0]), request(lora=adapter(tmp_path / "one"))
    assert not found.settled(asked)
    now[0] = 2.5
    assert found.settled(asked)
    assert found.identity(asked) is None
    go_on.set()
    found.close()
    assert found.settled(asked)
    assert found.identity(asked) == "late"


def test_an_engine_that_never_hits_is_told_where_to_look_once(caplog):
    scheduler = side(Store((0,)))
    first = SimpleNamespace(reply=SimpleNamespace(digest=b"\x12" * 16))
    scheduler._tracks_of.made["", ""] = tracks_of(scheduler._shape, [[first]])
    for number in range(120):
        answered(scheduler, request(str(number)))
        scheduler.allocated(request(str(number)), [[1]], 0)
    assert [r.getMessage().count("12" * 16) for r in caplog.records] == [1]


# ---- leases ----


def test_a_promise_is_held_until_the_worker_has_loaded():
    store = Store((4,))
    scheduler = side(store)
    step = load(scheduler, request())
    assert step.loads[0].runs[0].hashes == request().block_hashes[:4]
    assert step.loads[0].block_ids == [100, 101, 102, 103]
    assert store.gave[0].released == 0
    scheduler.reported(Report(loaded={"r": 1}), ())
    assert store.gave[0].released == 1


def test_a_load_ends_when_every_worker_has_it():
    store = Store((4,))
    scheduler = side(store, workers=2)
    load(scheduler, request())
    scheduler.reported(Report(loaded={"r": 1}), ())
    assert store.gave[0].released == 0
    scheduler.reported(Report(loaded={"r": 1}), ())
    assert store.gave[0].released == 1


@pytest.mark.parametrize("leave", ["abort", "another's choice", "shutdown", "reset"])
def test_what_is_not_loaded_is_let_go(leave):
    store = Store((4,))
    scheduler = side(store)
    answered(scheduler, request())
    if leave == "abort":
        assert scheduler.finished("r") is False
    elif leave == "another's choice":  # the engine computes it: a request that skips the prefix cache
        scheduler.allocated(request(), [[1]], 0)
    elif leave == "shutdown":
        scheduler.close()
    else:
        scheduler.reset("x")
    assert [held.released for held in store.gave] == [1]


def test_an_abort_in_mid_load_keeps_the_hold_until_the_worker_reports():
    store = Store((4,))
    scheduler = side(store)
    load(scheduler, request())
    assert scheduler.finished("r") is False  # the engine keeps its blocks by itself
    assert store.gave[0].released == 0
    scheduler.reported(Report(loaded={"r": 1}), ())
    assert store.gave[0].released == 1


def test_a_request_that_lost_blocks_of_its_own_is_asked_for_anew():
    store = Store((2,))
    scheduler = side(store)
    answered(scheduler, request(), computed=4 * BLOCK)
    answered(scheduler, request(), computed=2 * BLOCK)
    assert [hashes[0] for hashes, _ in store.asked] == [request().block_hashes[4], request().block_hashes[2]]
    assert [held.released for held in store.gave] == [1, 0]


def test_a_promise_is_good_for_a_request_that_gained_blocks_of_its_own():
    store = Store((6,))
    scheduler = side(store)
    answered(scheduler, request())
    assert scheduler.matched(request(), 2 * BLOCK) == (4 * BLOCK, True)
    scheduler.allocated(request(), [list(range(11))], 4 * BLOCK)
    order = scheduler.step(output()).loads[0]
    assert (order.runs[0].hashes, order.block_ids) == (request().block_hashes[2:6], [2, 3, 4, 5])


def test_requests_that_share_a_prefix_load_it_once():
    store = Store((4,))
    scheduler = side(store)
    load(scheduler, request("first"))
    for _ in range(20):
        assert scheduler.matched(request("second"), 0) == (None, False)
        time.sleep(0.001)
    assert len(store.asked) == 1
    scheduler.reported(Report(loaded={"first": 1}), ())
    assert answered(scheduler, request("second"), computed=4 * BLOCK)[0] is not None


def test_without_a_prefix_cache_each_loads_its_own():
    scheduler = side(Store((4,)), shares_loads=False)
    load(scheduler, request("first"))
    assert answered(scheduler, request("second")) == (4 * BLOCK, True)


def test_a_request_whose_load_failed_is_never_loaded_again():
    store = Store((4,))
    scheduler = side(store)
    load(scheduler, request())
    scheduler.reported(Report(loaded={"r": 1}), {102})
    assert scheduler.matched(request(), 0) == (0, False)
    assert len(store.asked) == 1


# ---- saves ----


def computed_whole(scheduler, asked, blocks):
    scheduler.matched(asked, 0)
    scheduler.allocated(asked, [blocks], 0)
    return scheduler.step(output(new=[(asked.request_id, blocks, 0)], scheduled={asked.request_id: asked.num_tokens}))


def test_full_blocks_are_saved_once_and_with_their_parent():
    scheduler = side(Store((0,)))
    asked, blocks = request(), list(range(50, 61))
    answered(scheduler, asked)
    scheduler.allocated(asked, [blocks], 0)
    step = scheduler.step(output(new=[("r", blocks, 0)], scheduled={"r": 3 * BLOCK + 7}))
    assert [(s.run.hashes, s.run.block_ids, s.parent) for s in step.saves] == [
        (asked.block_hashes[:3], [50, 51, 52], b"")
    ]
    step = scheduler.step(output(cached=[("r", None, 3 * BLOCK + 7)], scheduled={"r": asked.num_tokens - 103}))
    assert [s.run.hashes for s in step.saves] == [asked.block_hashes[3:10]]
    assert step.saves[0].parent == asked.block_hashes[2]


def test_what_was_loaded_is_not_saved():
    scheduler = side(Store((4,)))
    load(scheduler, request(), range(11))
    scheduler.reported(Report(loaded={"r": 1}), ())
    step = scheduler.step(output(new=[("r", list(range(11)), 4 * BLOCK)], scheduled={"r": 6 * BLOCK}))
    assert [s.run.hashes for s in step.saves] == [request().block_hashes[4:10]]


def test_what_failed_to_load_is_saved_when_it_was_computed():
    scheduler = side(Store((4,)))
    load(scheduler, request(), range(11))
    scheduler.reported(Report(loaded={"r": 1}), {2, 3})
    step = scheduler.step(output(new=[("r", list(range(11)), 2 * BLOCK)], scheduled={"r": 8 * BLOCK}))
    assert step.saves[0].run.hashes == request().block_hashes[:10]


def test_a_read_only_engine_saves_nothing():
    scheduler = side(Store((0,)), mode="read-only")
    assert computed_whole(scheduler, request(), list(range(11))).saves == []


def test_a_finished_request_leaves_when_it_is_saved():
    scheduler = side(Store((0,)))
    step = computed_whole(scheduler, request(), list(range(11)))
    assert scheduler.finished("r") is True
    assert scheduler.saving
    assert scheduler.step(output()).leaving == ["r"]
    scheduler.reported(Report(saved={step.saves[0].job_id: 1}), ())
    assert not scheduler.saving


def test_a_finished_request_without_saves_leaves_at_once():
    scheduler = side(Store((0,)))
    step = computed_whole(scheduler, request(), list(range(11)))
    scheduler.reported(Report(saved={step.saves[0].job_id: 1}), ())
    assert scheduler.finished("r") is False


def generating(scheduler, asked, upto):
    """Steps of one token from the end of the prompt on; the saves of each step that has some."""
    saves = []
    for computed in range(asked.num_prompt_tokens, upto):
        asked.num_tokens, asked.num_computed_tokens = computed + 1, computed + 1
        if (computed + 1) % BLOCK == 0:
            asked.block_hashes.append(b"g" + bytes([computed // BLOCK]) * 31)
        step = scheduler.step(output(cached=[("r", None, computed)], scheduled={"r": 1}))
        saves += [step.saves] if step.saves else []
    return saves


def test_what_is_generated_is_saved_many_blocks_at_a_time():
    scheduler = side(Store((0,)))
    asked = request()
    assert len(computed_whole(scheduler, asked, list(range(40))).saves) == 1
    ((save,),) = generating(scheduler, asked, 30 * BLOCK)
    assert (len(save.run.hashes), save.parent) == (16, asked.block_hashes[9])


def test_what_is_left_of_a_request_is_saved_when_it_ends():
    scheduler = side(Store((0,)))
    asked = request()
    step = computed_whole(scheduler, asked, list(range(40)))
    assert generating(scheduler, asked, 13 * BLOCK + 1) == []
    scheduler.reported(Report(saved={step.saves[0].job_id: 1}), ())
    assert scheduler.finished("r") is True  # the engine keeps its blocks
    step = scheduler.step(output())
    assert step.leaving == ["r"]
    assert [s.run for s in step.saves] == [Run(0, asked.block_hashes[10:13], [10, 11, 12])]
    assert scheduler.step(output()).saves == []
    assert scheduler.saving


def test_the_last_token_of_a_request_has_no_kv():
    scheduler = side(Store((0,)))
    asked = request()
    step = computed_whole(scheduler, asked, list(range(40)))
    generating(scheduler, asked, 11 * BLOCK)  # of the last one nothing is known
    scheduler.reported(Report(saved={step.saves[0].job_id: 1}), ())
    assert asked.num_tokens == 11 * BLOCK
    assert scheduler.finished("r") is False


def test_a_window_s_blocks_are_saved_one_by_one():
    scheduler = side(Store((0,)), groups=(Group(0, "SlidingWindowSpec", ("a",), BLOCK, 16384, 4 * BLOCK),))
    asked = request()
    computed_whole(scheduler, asked, list(range(1, 41)))
    assert [len(save.run.hashes) for (save,) in generating(scheduler, asked, 13 * BLOCK)] == [1, 1, 1]


class Heard:
    """What an engine's events are told."""

    def __init__(self):
        self.said = []

    def begun(self, save, request, end_tokens):
        self.said.append(("begun", save.job_id, request.request_id, end_tokens))

    def ended(self, save, stored):
        self.said.append(("ended", save.job_id, stored))

    def gone(self, load, missing):
        self.said.append(("gone", load.request_id, missing))


def test_events_tell_what_all_workers_have_stored():
    heard = Heard()
    scheduler = side(Store((0,)), workers=3, events=heard)
    job = computed_whole(scheduler, request(), list(range(11))).saves[0].job_id
    one, other = Report({job: 1}, {job: 0b1111111111}), Report({job: 1}, {job: 0b0001111111})
    scheduler.reported(one.merge(other), ())
    assert heard.said == [("begun", job, "r", 10 * BLOCK)]
    scheduler.reported(Report({job: 1}, {job: ALL}), ())  # its part another one stores
    assert heard.said[1:] == [("ended", job, 0b0001111111)]


def test_events_tell_what_did_not_come():
    heard = Heard()
    scheduler = side(Store((4,)), events=heard)
    load(scheduler, request())
    scheduler.reported(Report(loaded={"r": 1}), {102, 103, 7})
    assert heard.said == [("gone", "r", {102, 103, 7})]


def test_a_request_that_ends_in_mid_load_is_not_waited_for_because_of_older_saves():
    scheduler = side(Store((0,), (4,)))
    computed_whole(scheduler, request(), list(range(11)))  # then it is preempted
    answered(scheduler, request("other"))
    load(scheduler, request(), range(30, 41))
    assert scheduler.finished("r") is False  # it would be reported twice: as saved, and as loaded


def test_blocks_whose_save_has_ended_take_nothing_back():
    scheduler = side(Store((0,)))
    save = computed_whole(scheduler, request(), list(range(11))).saves[0]
    computed_whole(scheduler, request("other", key=b"o"), list(range(20, 31)))  # and goes on
    scheduler.reported(Report(saved={save.job_id: 1}), ())
    assert computed_whole(scheduler, request("third", key=b"t"), list(range(11))).taken == {}


def test_a_save_whose_blocks_another_request_gets_is_taken_back():
    scheduler = side(Store((0,)))
    save = computed_whole(scheduler, request(), list(range(11))).saves[0]
    step = computed_whole(scheduler, request("other", key=b"o"), list(range(10, 21)))
    assert step.taken == {}  # block 10 is full in neither
    step = computed_whole(scheduler, request("third", key=b"t"), list(range(9, 20)))
    assert step.taken[save.job_id] == {9}
    assert step.saves[0].job_id not in step.taken


def test_a_load_into_blocks_that_are_being_saved_takes_the_save_back():
    scheduler = side(Store((4,)), min_tokens=0)
    save = computed_whole(scheduler, request(), list(range(11))).saves[0]
    step = load(scheduler, request("other", key=b"o"), range(3, 14))
    assert step.taken[save.job_id] == set(range(3, 7))


def test_blocks_that_a_request_shares_with_the_one_being_saved_take_nothing_back():
    scheduler = side(Store((0,)))
    computed_whole(scheduler, request(), list(range(11)))
    scheduler.matched(request("other"), 10 * BLOCK)
    scheduler.allocated(request("other"), [[*range(10), 40]], 0)
    shared = ("other", [*range(10), 40], 10 * BLOCK)
    assert scheduler.step(output(new=[shared], scheduled={"other": 5})).taken == {}


def test_a_resumed_request_saves_what_was_taken_back():
    scheduler = side(Store((0,)))
    asked = request()
    computed_whole(scheduler, asked, list(range(11)))
    step = computed_whole(scheduler, request("other", key=b"o"), list(range(11)))
    assert len(step.taken) == 1
    resumed = output(cached=[("r", list(range(20, 31)), 0)], scheduled={"r": asked.num_tokens}, resumed=["r"])
    step = scheduler.step(resumed)
    assert [(s.run.hashes, s.run.block_ids) for s in step.saves] == [(asked.block_hashes, list(range(20, 30)))]


def test_too_many_saves_under_way_are_not_begun():
    saves = Saves(Shape((FULL,), BLOCK), 10)
    assert saves.due(Tracked(request(), [list(range(11))]), 0, 10 * BLOCK) != []
    assert saves.due(Tracked(request("o"), [list(range(20, 31))]), 0, 10 * BLOCK) == []
    assert saves.skipped == 1


def test_after_a_reset_everything_goes_to_another_namespace():
    scheduler = side(Store((4,)))
    scheduler.reset("x")
    assert load(scheduler, request()).generation == "x"


# ---- cost ----


def test_a_waiting_request_costs_no_question_and_no_thread_a_step():
    store = Store((4,))
    store.gate.clear()
    scheduler = side(store)
    before = set(threading.enumerate())
    waiting = [request(str(i), key=bytes([i % 256])) for i in range(256)]
    for _ in range(50):
        for each in waiting:
            assert scheduler.matched(each, 0) == (None, False)
    until = time.monotonic() + 60
    while not store.asked:
        assert time.monotonic() < until
        time.sleep(0.001)
    assert len(store.asked) == 1  # the others wait in line behind it
    assert len(set(threading.enumerate()) - before) == 1
