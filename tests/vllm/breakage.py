"""What tests break in an engine's connector on purpose, and what they do there beside generating."""

import time
from pathlib import Path

from kvstored.testing.vllm_engine import SETTLE_S, settle

WAIT_S = 120.0
_events = []


def zero_saves(options):
    """Every block is stored as zeros, with a content hash that is right."""
    from kvstored_client.engines.vllm.saver import Saver

    def zeros(self, pages, views, block_ids):
        for view in views:
            if view is not None:
                view[:] = bytes(len(view))

    Saver._fill = zeros


def lose_chunks(options):
    """Of each load of the secondary tier only the first three chunks come."""
    from kvstored_client.engines.vllm.tier_jobs import Jobs

    load = Jobs._load
    Jobs._load = lambda self, keys, chunk_ids: load(self, keys[:3], chunk_ids[:3])


def hold_loads(options):
    """Each load says that it has begun (`entered`), and waits until it may go on (`go`)."""
    from kvstored_client.engines.vllm.loader import Loader

    load, directory = Loader._load_piece, Path(options["directory"])

    def held(self, *args):
        (directory / "entered").touch()
        await_file(directory / "go")
        return load(self, *args)

    Loader._load_piece = held


def abort_in_load(llm, prompt, directory):
    """Abort a request while its load is held; the share of the KV memory in use before it, after it, and at the end."""
    from vllm import SamplingParams

    engine, scheduler = llm.llm_engine, llm.llm_engine.engine_core.engine_core.scheduler
    engine.add_request("aborted", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=4, detokenize=False))
    until = time.monotonic() + SETTLE_S
    while not (Path(directory) / "entered").exists():
        engine.step()
        assert time.monotonic() < until, "no load begins"
    used = scheduler.kv_cache_manager.usage
    engine.abort_request([next(iter(scheduler.requests))], internal=True)
    for _ in range(20):
        engine.step()
    kept = scheduler.kv_cache_manager.usage
    (Path(directory) / "go").touch()
    settled = settle(llm)
    return {"used": used, "kept": kept, "left": scheduler.kv_cache_manager.usage, **settled}


def await_file(path):
    """Until it is there."""
    until = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < until, f"{path} does not come"
        time.sleep(0.002)


def watch_events(llm):
    """From now on keep what would be published about blocks."""
    publisher = llm.llm_engine.engine_core.engine_core.scheduler.kv_event_publisher
    publisher.publish = lambda batch: _events.extend(batch.events)
    return {}


def events(llm):
    """What was published since the last call about blocks outside of the engine: kind, hashes, parent, and tokens."""
    taken = [each for each in _events if getattr(each, "medium", None) == "CPU"]
    _events.clear()
    return {
        "events": [
            (type(e).__name__, e.block_hashes, getattr(e, "parent_block_hash", None), getattr(e, "token_ids", []))
            for e in taken
        ]
    }


def lose_loads(llm):
    """From now on nothing comes of what is loaded."""
    from kvstored_client.engines.vllm.loader import Loader

    Loader._load_piece = lambda *args: 0
    return {}
