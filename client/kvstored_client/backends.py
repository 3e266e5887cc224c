"""Load and store of a GPU's memory by whoever can copy it: the daemon's worker, else the client itself.

The daemon is asked first (`cuda_ipc`). Where it cannot open the memory, the same calls go on through `shm`, with the
reason in `DeviceMemory.reason` and in the log, and it is asked again later and after each reconnect.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from kvstored_proto.layout import Indices

from kvstored_client import device_loads, device_stores, device_verbs, own_loads, putting
from kvstored_client.chains import Chain
from kvstored_client.core import Core
from kvstored_client.cuda_driver import CudaFailed
from kvstored_client.device_verbs import REGISTER_TIMEOUT_S, DeviceMemory
from kvstored_client.effects import CONNECT, Verb
from kvstored_client.errors import FAILED_PRECONDITION, FAILURES, Refused
from kvstored_client.keys import Packed
from kvstored_client.layers import How
from kvstored_client.namespace import Namespace
from kvstored_client.results import Outcome, PutResult

_log: Final = logging.getLogger("kvstored_client")


def opened(core: Core, memory: DeviceMemory, timeout_s: float | None = None) -> Verb[bool]:
    """Whether the daemon has the memory open, or opens it now; False: the client copies.

    Raises Refused where neither can.
    """
    connection = yield CONNECT
    if memory.refused_by is connection and time.monotonic() < memory.ask_again_at_s:
        return False
    try:
        yield from device_verbs.number_of(connection, memory, core.timeout_s() if timeout_s is None else timeout_s)
    except Refused as refused:
        known, memory.refused_by = memory.refused_by is connection, connection
        _check_copier(memory)
        if not known:
            _log.warning("kvstored: the daemon cannot open this GPU memory, the engine copies: %s", refused.message)
        return False
    memory.refused_by = None
    return True


def _check_copier(memory: DeviceMemory) -> None:
    """Raises the Refused that it is called in where the client cannot copy either."""
    try:
        memory.kv.copier  # noqa: B018 - made here, or an exception
    except CudaFailed as error:
        memory.refused_by = None
        if str(error) not in memory.reason:
            memory.reason = f"{memory.reason}; {error}"
        raise Refused(FAILED_PRECONDITION, memory.reason) from None


def register(core: Core, memory: DeviceMemory) -> Verb[bool]:
    """Register now; False, and `reason` says why, where nobody can copy the memory."""
    yield from opened(core, memory, REGISTER_TIMEOUT_S)
    return True


def load(
    core: Core, memory: DeviceMemory, namespace: Namespace, hashes: Packed, ids: Indices, wait_s: float, how: How
) -> Verb[int]:
    """How many leading blocks were copied to the engine's."""
    if (yield from opened(core, memory)):
        return (yield from device_loads.load(core, memory, namespace, hashes, ids, wait_s, how))
    return (yield from own_loads.load(core, memory.kv, namespace, hashes, ids, wait_s, how.layers, how.deadline))


def store(core: Core, memory: DeviceMemory, chain: Chain, wait_s: float) -> Verb[PutResult]:
    """Store the engine's blocks; where nobody can, the result says why."""
    try:
        by_daemon = yield from opened(core, memory)
    except FAILURES as error:
        return PutResult.of([Outcome.MISS] * chain.hashes.length, 0, error=core.failed_open(error))
    if by_daemon:
        return (yield from device_stores.store(core, memory, chain, wait_s))
    return (yield from putting.run(chain.put(core, memory.kv, wait_s)))
