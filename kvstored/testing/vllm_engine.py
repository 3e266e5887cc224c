"""One vLLM engine in a process of its own, driven by lines of JSON: an engine with a connector cannot be made twice.

    echo '{"do": "generate", "prompts": [[5, 6, 7]]}' | python -m kvstored.testing.vllm_engine '{"model": "/tmp/tiny"}'

Options: `model`, `engine` (arguments of `vllm.LLM`), `kvstored` (the connector's settings; without it there is no
connector), `by_name` (the connector is found as the plugin that it is installed as), `transfer` (another connector:
arguments of `KVTransferConfig`), `events` (the engine makes KV events, and publishes them nowhere), `prepare`
(`module:function`, called with the options before anything else), `actions` (a module whose functions can be done too).
`vllm_process` is the other end.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

KV_CACHE_BYTES: Final = 64 << 20
SETTLE_S: Final = 120.0
_connectors: dict[int, tuple[Any, Any]] = {}  # by scheduler: its connector, and the worker's


def make(options: Mapping[str, Any]) -> Any:
    """The engine. Raises what vLLM raises."""
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    arguments = {
        "max_model_len": 2048,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "seed": 0,
        "block_size": 32,
        "disable_log_stats": False,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        **options.get("engine", {}),
    }
    if options.get("events"):
        arguments["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    if "kvstored" in options:
        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KVStoredConnector",
            kv_connector_module_path=None if options.get("by_name") else "kvstored_client.engines.vllm",
            kv_role="kv_both",
            kv_connector_extra_config=options["kvstored"],
        )
    elif "transfer" in options:
        arguments["kv_transfer_config"] = KVTransferConfig(kv_role="kv_both", **options["transfer"])
    return LLM(model=options["model"], **arguments)


def generate(
    llm: Any, prompts: list[list[int]], tokens: int = 16, salt: str = "", lora: tuple[str, int, str] | None = None
) -> dict[str, Any]:
    """Greedy continuations, what was not computed of each prompt, and how long all took, in CPU time of the process
    too. `lora`: name, number and path of the adapter to use.
    """
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    asked = [{"prompt_token_ids": ids, **({"cache_salt": salt} if salt else {})} for ids in prompts]
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    adapter = LoRARequest(*lora) if lora else None
    started_s, cpu_started_s = time.monotonic(), time.process_time()
    outputs = llm.generate(asked, greedy, use_tqdm=False, lora_request=adapter)
    return {
        "seconds": time.monotonic() - started_s,
        "cpu_seconds": time.process_time() - cpu_started_s,
        "outputs": [list(each.outputs[0].token_ids) for each in outputs],
        "cached": [each.num_cached_tokens for each in outputs],
        "finished": [each.outputs[0].finish_reason for each in outputs],
    }


def settle(llm: Any) -> dict[str, Any]:
    """Wait until every save has been reported, then forget the engine's own prefix cache."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)  # not there where it has a process of its own
    until_s = time.monotonic() + SETTLE_S
    while core is not None and core.scheduler.has_requests():
        core.step()
        assert time.monotonic() < until_s, "saves do not end"
        time.sleep(0.001)
    while not (done := llm.reset_prefix_cache()) and time.monotonic() < until_s:
        time.sleep(0.05)
    return {"reset": done}


def connect(llm: Any, on: bool) -> dict[str, Any]:
    """Take the connector out of the engine, which then is vLLM alone, or put it back. Only after `settle`."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    kept = _connectors.setdefault(id(scheduler), (scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT))
    scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = kept if on else (None, None)
    return {}


def counters(llm: Any) -> dict[str, float]:
    """The connector's counters, and vLLM's own about external hits and preemptions, by name."""
    totals: dict[str, float] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:")
        if name.startswith(("kvstored", "external_prefix", "num_preempt")) and hasattr(metric, "value"):
            totals[name] = totals.get(name, 0) + metric.value
    return totals


def _prepare(options: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Environment and actions."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # On any CPU, and one thread unless said: two that wait for each other stand still where others use the CPUs too.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    actions: dict[str, Callable[..., Any]] = {each.__name__: each for each in (generate, settle, connect, counters)}
    if "actions" in options:
        actions |= vars(importlib.import_module(options["actions"]))
    if "prepare" in options:
        module, _, function = options["prepare"].partition(":")
        getattr(importlib.import_module(module), function)(options)
    return actions


def main() -> None:
    """Make the engine, then do what each line says."""
    options = json.loads(sys.argv[1])
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)  # what the engine prints is no answer

    def answer(value: object) -> None:
        print(json.dumps(value), file=answers, flush=True)

    actions = _prepare(options)
    try:
        llm = make(options)
    except Exception as error:
        answer({"refused": f"{type(error).__name__}: {error}"})
        return
    answer({})
    for line in sys.stdin:
        command = json.loads(line)
        answer(actions[command.pop("do")](llm, **command))


if __name__ == "__main__":
    main()
