"""Fakes of an engine and of a store, for the scheduler's half of the vLLM connector."""

import threading
import time
from types import SimpleNamespace

from kvstored_client import Outcome
from kvstored_client.engines.vllm.adapters import Adapters
from kvstored_client.engines.vllm.counts import Counts
from kvstored_client.engines.vllm.cuts import tracks_of
from kvstored_client.engines.vllm.lookups import Lookups
from kvstored_client.engines.vllm.requests import Saves
from kvstored_client.engines.vllm.scheduler import SchedulerSide
from kvstored_client.engines.vllm.settings import Settings
from kvstored_client.engines.vllm.shape import Group, Shape

BLOCK = 32


class Held:
    def __init__(self, count, outcome=Outcome.MISS):
        self.count, self.outcome, self.released = count, outcome, 0

    def __len__(self):
        return 0 if self.released else self.count

    def release(self):
        self.released += 1


class Store:
    """Answers `get` from a script; the last answer is given for ever."""

    def __init__(self, *answers):
        self.answers, self.asked, self.gave, self.namespaces = list(answers), [], [], []
        self.gate = threading.Event()
        self.gate.set()

    def get(self, namespaces, hashes, wait_s):
        self.asked.append((list(hashes), wait_s))
        self.namespaces.append(list(namespaces))
        self.gate.wait(60)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        held = Held(*answer)
        self.gave.append(held)
        return held


_made = []


def end_threads():
    """End the threads of all sides that were made."""
    while _made:
        made, store = _made.pop()
        store.gate.set()
        made.close()


FULL = Group(0, "FullAttentionSpec", ("a",), BLOCK, 16384)


class Tracks:
    """The same namespaces each time they are asked for: text, for the fake store."""

    def __init__(self, shape):
        self.shape, self.made = shape, {}

    def __call__(self, generation, adapter):
        names = [[f"{group.number}{generation}{adapter}"] for group in self.shape.groups]
        return self.made.setdefault((generation, adapter), tracks_of(self.shape, names))


def side(store, groups=(FULL,), workers=1, events=None, **settings):
    shape = Shape(tuple(groups), BLOCK, workers=workers, shares_loads=settings.pop("shares_loads", True))
    lookups = Lookups(store, shape, Counts(), settings.pop("lookup_wait_s", 30.0), settings.pop("rate", 0.0))
    chosen = Settings(**{"min_tokens": 0, **settings})
    made = SchedulerSide(chosen, lookups, Saves(shape, 1000), Tracks(shape), Adapters(30.0), events)
    _made.append((made, store))
    return made


def request(name="r", tokens=10 * BLOCK + 5, key=b"k", lora=None):
    hashes = [key + bytes([i]) * 31 for i in range(tokens // BLOCK)]
    return SimpleNamespace(
        request_id=name,
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        block_hashes=hashes,
        lora_request=lora,
    )


def answered(scheduler, asked, computed=0):
    until = time.monotonic() + 60
    while (answer := scheduler.matched(asked, computed))[0] is None:
        assert time.monotonic() < until
        time.sleep(0.001)
    return answer


def tables(blocks):
    """Block ids of each group; of the one where there are no more."""
    return blocks if isinstance(blocks, tuple) else (blocks,)


def output(new=(), cached=(), scheduled=None, resumed=()):
    """A SchedulerOutput. new: (id, block ids, computed); cached: (id, new block ids, computed)."""
    scheduled = scheduled or {}
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(scheduled.values()),
        num_scheduled_tokens=scheduled,
        scheduled_new_reqs=[SimpleNamespace(req_id=r, block_ids=tables(b), num_computed_tokens=c) for r, b, c in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r for r, _, _ in cached],
            new_block_ids=[tables(b) if b else None for _, b, _ in cached],
            num_computed_tokens=[c for _, _, c in cached],
            resumed_req_ids=set(resumed),
        ),
    )


def load(scheduler, asked, blocks=range(100, 111)):
    tokens, beside = answered(scheduler, asked)
    assert beside
    scheduler.allocated(asked, [list(blocks)], tokens)
    return scheduler.step(output())
