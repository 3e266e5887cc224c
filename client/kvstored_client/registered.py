"""What transfers of paged KV memory are for both clients: the registered memory, and the verbs of its transfers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvstored_proto.layout import Indices

from kvstored_client import own_loads, own_stores, putting, requests
from kvstored_client.chains import Chain
from kvstored_client.core import Core
from kvstored_client.deadline import TOO_LATE, Deadline
from kvstored_client.effects import CONNECT, Verb
from kvstored_client.errors import FAILURES
from kvstored_client.keys import Packed, pack
from kvstored_client.layers import Came, How, LoadBegun, NotStored, Range, StoreBegun
from kvstored_client.namespace import Namespace
from kvstored_client.own_loads import LayerCopies
from kvstored_client.own_stores import LayerStaging
from kvstored_client.paged import CPU, PagedKV
from kvstored_client.putting import Put
from kvstored_client.results import PutResult
from kvstored_client.terms import Terms, check_seconds, check_wait
from kvstored_client.uses import Uses

if TYPE_CHECKING:
    from kvstored_client.device_verbs import DeviceMemory

T = TypeVar("T")
B = TypeVar("B")
SHM: Final = "shm"
INLINE: Final = "inline"
CUDA_IPC: Final = "cuda_ipc"


class Registered:
    """What both clients' transfers have: the memory, who copies, and until when it may be used."""

    def __init__(self, core: Core, kv: PagedKV) -> None:
        self.kv = kv
        self._uses = Uses()
        self._used = kv.used(self._uses)  # what is copied goes by this
        self._core = core
        self._closed = False
        self._failed_last = ""  # what the client did not do
        self._copying: weakref.WeakSet[LayerCopies | LayerStaging] = weakref.WeakSet()  # in threads of their own
        self._listing = threading.Lock()
        self._device: DeviceMemory | None = None
        if kv.device != CPU:
            # All now, and not in the midst of a call, when perhaps no file can be opened.
            from kvstored_client import backends  # noqa: F401
            from kvstored_client.device_verbs import DeviceMemory

            self._device = DeviceMemory(self._used)

    @property
    def backend(self) -> str:
        """Who copies: `shm` or `inline`, the client, or `cuda_ipc`, the daemon; for a GPU known after `ready`."""
        if self._device is not None and self._device.refused_by is None:
            return CUDA_IPC
        return INLINE if self._remote else SHM

    @property
    def _remote(self) -> bool:
        """Whether there is a session, and it shares no memory."""
        return self._core.connection is not None and self._core.connection.carrier is not None

    @property
    def reason(self) -> str:
        """Why the daemon does not copy a GPU's memory, and what failed last; empty where all is well."""
        said = [self._device.reason] if self._device is not None and self._device.reason else []
        if self._failed_last:
            said.append(self._failed_last)
        if not said and not self._core.is_connected():
            said.append(f"no session with the daemon: {self._core.connect_error or 'closed'}")
        return "; ".join(said)

    def load_verb(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        block_ids: Any,
        wait_s: float,
        layers: Range | None = None,
        deadline_s: float = 0.0,
    ) -> Verb[int]:
        """For `load`. Raises RuntimeError after the end, ValueError or TypeError for wrong arguments."""
        self._check()
        check_wait(wait_s)
        self.kv.check_layers(layers)
        if not len(hashes):
            return nothing(0)
        ids = self.kv.layout.check_ids(block_ids, len(hashes))
        how = How(layers, deadline=self._deadline(deadline_s))
        return self._load(requests.one(namespace), pack(hashes), ids, wait_s, how)

    def _load(self, namespace: Namespace, hashes: Packed, ids: Indices, wait_s: float, how: How) -> Verb[int]:
        if self._device is None:
            return own_loads.load(self._core, self._used, namespace, hashes, ids, wait_s, how.layers, how.deadline)
        from kvstored_client import backends

        return backends.load(self._core, self._device, namespace, hashes, ids, wait_s, how)

    def start_load_verb(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        block_ids: Any,
        wait_s: float,
        layers: Range | None,
        by_layer: bool,
        deadline_s: float,
    ) -> Verb[LoadBegun]:
        """For `start_load`; errors as of `load_verb`."""
        self._check()
        check_wait(wait_s)
        first, end = self.kv.check_layers(layers)
        if not len(hashes):
            return nothing(Came(0, end - first))
        ids = self.kv.layout.check_ids(block_ids, len(hashes))
        how = How(layers, by_layer, self._deadline(deadline_s))
        return self._start_load(requests.one(namespace), pack(hashes), ids, wait_s, how)

    def _start_load(
        self, namespace: Namespace, hashes: Packed, ids: Indices, wait_s: float, how: How
    ) -> Verb[LoadBegun]:
        if (yield from self._by_daemon()):
            from kvstored_client import device_loads

            memory = self._device
            assert memory is not None, "the daemon copies a GPU's memory only"
            return (yield from device_loads.start_load(self._core, memory, namespace, hashes, ids, wait_s, how))
        first, end = self.kv.check_layers(how.layers)
        connection = yield CONNECT
        if how.by_layer and connection.carrier is None:
            wait_s = how.deadline.left_s(wait_s)
            begun = yield from own_loads.by_layers(self._core, self._used, namespace, hashes, ids, wait_s, how)
            return self._begun(begun)
        return Came((yield from self._load(namespace, hashes, ids, wait_s, how)), end - first)

    def _by_daemon(self) -> Verb[bool]:
        """Whether the daemon copies. Raises Refused where nobody can."""
        if self._device is None:
            return False
        from kvstored_client import backends

        return (yield from backends.opened(self._core, self._device))

    def store_verb(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        block_ids: Any,
        parent: bytes,
        wait_s: float,
        terms: Terms,
        deadline_s: float = 0.0,
    ) -> Verb[PutResult]:
        """For `store`; errors as of `load_verb`."""
        self._check()
        check_wait(wait_s)
        if not len(hashes):
            return nothing(PutResult())
        chain = self._chain(namespace, hashes, block_ids, parent, terms, deadline_s)
        if self._device is None:
            return putting.run(chain.put(self._core, self._used, wait_s))
        from kvstored_client import backends

        return backends.store(self._core, self._device, chain, wait_s)

    def start_store_verb(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        block_ids: Any,
        parent: bytes,
        wait_s: float,
        terms: Terms,
        deadline_s: float = 0.0,
    ) -> Verb[StoreBegun]:
        """For `start_store`; errors as of `load_verb`."""
        self._check()
        check_wait(wait_s)
        if not len(hashes):
            return nothing(NotStored(0))
        chain = self._chain(namespace, hashes, block_ids, parent, terms, deadline_s)
        if self._device is None:
            return self._begin_store(chain.put(self._core, self._used, wait_s), chain)
        return self._start_store(chain, wait_s)

    def _start_store(self, chain: Chain, wait_s: float) -> Verb[StoreBegun]:
        from kvstored_client import device_stores

        core, memory = self._core, self._device
        assert memory is not None, "else the client copies"
        try:
            if (yield from self._by_daemon()):
                return (yield from device_stores.start_store(core, memory, chain, wait_s))
        except FAILURES as error:
            return NotStored(chain.hashes.length, core.failed_open(error))
        return (yield from self._begin_store(chain.put(core, self._used, wait_s), chain))

    def _begin_store(self, put: Put, chain: Chain) -> Verb[StoreBegun]:
        return self._begun((yield from own_stores.begin(put, self._used, chain.ids, self._given_up)))

    def _begun(self, begun: B) -> B:
        if isinstance(begun, (LayerCopies, LayerStaging)):
            with self._listing:
                self._copying.add(begun)
            if self._closed:  # meanwhile
                begun.stop()
        return begun

    def _chain(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        block_ids: Any,
        parent: bytes,
        terms: Terms,
        deadline_s: float,
    ) -> Chain:
        ids, packed = self.kv.layout.check_ids(block_ids, len(hashes)), requests.chain_of(hashes, parent)
        deadline = self._deadline(deadline_s)
        return Chain(requests.one(namespace), packed, ids, parent, terms.check(), deadline)

    def _deadline(self, seconds: float) -> Deadline:
        check_seconds("deadline_s", seconds)
        return Deadline(seconds, lambda: self._given_up(TOO_LATE))

    def _given_up(self, why: str) -> None:
        """A transfer that the client does itself was not done, or not all of it. In any thread."""
        self._core.stats.transfers_failed += 1
        self._failed_last = why

    def stop_copies(self) -> None:
        """For `close`, after `close_verb`: when this returns no thread of the client copies. Blocks."""
        if self._core.forked:  # which has no such threads
            return
        with self._listing:
            copying = list(self._copying)
        for copies in copying:
            copies.stop()
        self._uses.wait()

    @property
    def _copies(self) -> bool:
        """Whether `stop_copies` may have something to wait for."""
        return bool(self._copying) or self._uses.busy

    def close_verb(self) -> Verb[None] | None:
        """For `close`: what is to be said to the daemon, once."""
        closed, self._closed = self._closed, True
        if self._core.forked:
            return None
        self._uses.end()
        if closed or self._device is None:
            return None
        from kvstored_client import device_verbs

        return device_verbs.unregister(self._core, self._device)

    def register_verb(self) -> Verb[bool] | None:
        """For `ready`: None where nothing has to be asked."""
        self._check()
        if self._device is None:
            return None
        from kvstored_client import backends

        return backends.register(self._core, self._device)

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError("this memory is not registered any more")


def nothing(result: T) -> Verb[T]:
    """No hashes, no question."""
    return result
    yield  # makes this a generator
