"""Which adapter (LoRA) a request is computed with, by what it holds: read beside the engine's steps, once each.

vLLM's block hashes tell adapters apart by name (since 0.31 by path too). What lies there may be another one
tomorrow, or on another node, so the namespace of a request with an adapter has a fingerprint of its files.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from kvstored_client import Unavailable, threads
from kvstored_client.identity import ConfigError, WeightsError, adapter_identity

_LOG = logging.getLogger(__name__)
_KNOWN_MAX: Final = 4096

_Key = tuple[int, str, str]


class Adapters:
    """The adapters of an engine's requests. Used by its scheduling thread."""

    def __init__(self, wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`wait_s`: the longest that a request waits for its adapter's files to be read."""
        self._wait_s = wait_s
        self._clock = clock
        self._reading: dict[_Key, tuple[Future[str], float]] = {}
        self._known: dict[_Key, str | None] = {}
        self._pool: ThreadPoolExecutor | None = None
        self.reason = ""  # why the last one that is not known is not

    def settled(self, request: Any) -> bool:
        """Whether `identity` has its answer; starts finding it."""
        lora = getattr(request, "lora_request", None)
        if lora is None or (key := _key(lora)) in self._known:
            return True
        if key not in self._reading:
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="kvstored-adapter")
            try:
                self._reading[key] = (threads.submit(self._pool.submit, partial(_read, lora)), self._clock())
            except Unavailable:
                return True  # not known this time
        reading, since_s = self._reading[key]
        if not reading.done():
            return self._clock() - since_s >= self._wait_s
        del self._reading[key]
        if len(self._known) >= _KNOWN_MAX:
            self._known.clear()
        error = reading.exception()
        self._known[key] = None if error is not None else reading.result()
        if error is not None:
            _LOG.warning("kvstored: LoRA %s: %s", lora.lora_name, error)
        return True

    def identity(self, request: Any) -> str | None:
        """Text for the namespace's `adapter`, empty for a request without one; None: not known, `reason` says why."""
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return ""
        found = self._known.get(_key(lora))
        if found is None:
            self.reason = (
                f"requests with LoRA {lora.lora_name} are neither loaded nor saved: nothing tells what it holds"
            )
        return found

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _key(lora: Any) -> _Key:
    return int(lora.lora_int_id), str(lora.lora_name), str(lora.lora_path)


def _read(lora: Any) -> str:
    """Raises what says why an adapter's identity is not known."""
    if getattr(lora, "load_inplace", False):
        raise ConfigError("it is loaded in place of another, whose KV the engine itself does not tell from its own")
    if not os.path.isdir(lora.lora_path):
        raise ConfigError(f"{lora.lora_path} is no directory on this machine")
    try:
        return adapter_identity(lora.lora_path, lora.lora_name)
    except (WeightsError, OSError) as error:
        raise ConfigError(str(error)) from error
