"""What the scheduler's half of the vLLM connector takes of a step, in CPU time: with neither an engine nor a store."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any, Final

from kvstored_client.engines.vllm.adapters import Adapters
from kvstored_client.engines.vllm.counts import Counts
from kvstored_client.engines.vllm.cuts import tracks_of
from kvstored_client.engines.vllm.lookups import Lookups
from kvstored_client.engines.vllm.orders import Report
from kvstored_client.engines.vllm.requests import Saves
from kvstored_client.engines.vllm.scheduler import SchedulerSide
from kvstored_client.engines.vllm.settings import Settings
from kvstored_client.engines.vllm.shape import Group, Shape

from bench.common import p99_us

REQUESTS: Final = 256
_BLOCK_TOKENS: Final = 32
_BLOCKS: Final = 62  # of a prompt
_BLOCKS_MAX: Final = _BLOCKS + 32
_STEPS: Final = 300


def waiting_p99_ms() -> float:
    """While all requests wait for a store that does not answer."""
    side, spent_s = _side(), []
    requests = [_request(number) for number in range(REQUESTS)]
    for _ in range(_STEPS):
        started_s = time.thread_time()  # what others of the machine take is not the step's
        for request in requests:
            side.matched(request, 0)
        side.step(_output(requests[:0], 0))
        spent_s.append(time.thread_time() - started_s)
    return p99_us(spent_s) / 1000.0


def generating_p99_ms() -> float:
    """While all generate a token each, and some of them fill a block."""
    side, spent_s = _side(), []
    requests = [_request(number) for number in range(REQUESTS)]
    for number, request in enumerate(requests):
        request.num_prompt_tokens += number % _BLOCK_TOKENS
        side.allocated(request, [list(range(number * _BLOCKS_MAX, (number + 1) * _BLOCKS_MAX))], 0)
    for step in range(_STEPS):
        output = _output(requests, step)
        started_s = time.thread_time()
        saves = side.step(output).saves
        spent_s.append(time.thread_time() - started_s)
        side.reported(Report(dict.fromkeys((save.job_id for save in saves), 1)), ())
    return p99_us(spent_s[2:]) / 1000.0  # the first ones save the prompts


def _side() -> SchedulerSide:
    silent: Any = SimpleNamespace(get=lambda *_: time.sleep(3600))
    shape = Shape((Group(0, "FullAttentionSpec", ("layer",), _BLOCK_TOKENS, 1 << 20),), _BLOCK_TOKENS)
    tracks = tracks_of(shape, [[]])
    lookups = Lookups(silent, shape, Counts(), wait_s=3600.0)
    return SchedulerSide(Settings(), lookups, Saves(shape, 1 << 20), lambda *_: tracks, Adapters(1.0))


def _request(number: int) -> SimpleNamespace:
    """What the scheduler's half looks at of a request."""
    return SimpleNamespace(
        request_id=str(number),
        num_tokens=_BLOCKS * _BLOCK_TOKENS,
        num_prompt_tokens=_BLOCKS * _BLOCK_TOKENS,
        num_computed_tokens=0,
        block_hashes=[os.urandom(32) for _ in range(_BLOCKS_MAX)],
        lora_request=None,
    )


def _output(requests: list[SimpleNamespace], generated: int) -> SimpleNamespace:
    """A step in which each of these, after so many tokens beyond its prompt, generates another."""
    names = [request.request_id for request in requests]
    cached = SimpleNamespace(
        req_ids=names,
        new_block_ids=[None] * len(names),
        num_computed_tokens=[request.num_prompt_tokens + generated for request in requests],
        resumed_req_ids=set(),
    )
    return SimpleNamespace(
        total_num_scheduled_tokens=max(1, len(names)),  # 0: an idle step, which waits for answers
        num_scheduled_tokens=dict.fromkeys(names, 1),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
    )
