"""Weights that change under a connector, and requests that wait with more adapters than namespaces are kept."""

import time
from types import SimpleNamespace

import pytest
from kvstored_client.engines.vllm import namespaces
from kvstored_proto.v1.kvstored_pb2 import NamespaceSpec
from vllm_fakes import BLOCK, Store, answered, end_threads, output, request, side


@pytest.fixture(autouse=True)
def _threads_end():
    yield
    end_threads()


def test_what_was_computed_before_a_reset_is_not_saved_after_it():
    scheduler, asked = side(Store((0,))), request()
    assert answered(scheduler, asked) == (0, False)
    scheduler.allocated(asked, [list(range(11))], 0)
    first = scheduler.step(output(new=[("r", list(range(11)), 0)], scheduled={"r": BLOCK * 3 + 16}))
    assert [len(save.run.hashes) for save in first.saves] == [3]
    scheduler.reset("new")
    second = scheduler.step(output(cached=[("r", None, BLOCK * 3 + 16)], scheduled={"r": BLOCK * 6}))
    assert (second.generation, second.saves) == ("new", [])


def test_what_an_ended_request_has_left_to_save_is_dropped_by_a_reset():
    scheduler, asked = side(Store((0,))), request(tokens=2 * BLOCK)
    assert answered(scheduler, asked) == (0, False)
    scheduler.allocated(asked, [list(range(4))], 0)
    scheduler.step(output(new=[("r", list(range(4)), 0)], scheduled={"r": BLOCK * 2}))
    asked.block_hashes = [b"k" + bytes([index]) * 31 for index in range(4)]
    asked.num_tokens, asked.num_computed_tokens = 4 * BLOCK, 4 * BLOCK - 1
    assert scheduler.finished("r")
    scheduler.reset("new")
    assert scheduler.step(output()).saves == []


def test_more_adapters_wait_than_namespaces_are_kept(monkeypatch):
    monkeypatch.setattr(namespaces, "_KEPT_MAX", 8)
    scheduler = side(Store((4,)), lookup_wait_s=0.5)
    client = SimpleNamespace(namespace=lambda _spec: object())
    scheduler._tracks_of = namespaces.Namespaces(client, scheduler._shape, [[NamespaceSpec()]]).tracks
    scheduler._adapters = SimpleNamespace(
        settled=lambda _: True, identity=lambda each: each.request_id, reason="", close=lambda: None
    )
    waiting = [request(str(number)) for number in range(9)]
    for _ in range(6000):
        if None not in [scheduler.matched(each, 0)[0] for each in waiting]:
            return
        time.sleep(0.01)
    raise AssertionError("they wait for ever: each look-up is begun anew each time")
