"""What transfers of paged KV memory are for both clients: the registered memory, and the verbs of its transfers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kvstored_proto.layout import Indices

from kvstored_client import requests
from kvstored_client.core import Core
from kvstored_client.effects import CONNECT, Verb
from kvstored_client.errors import KVStoredClientError
from kvstored_client.keys import pack
from kvstored_client.layer_loads import LayerCopies
from kvstored_client.layers import Came, How, LoadBegun, NotStored, Range, StoreBegun
from kvstored_client.namespace import Namespace
from kvstored_client.paged import CPU, PagedKV
from kvstored_client.results import Outcome, PutResult
from kvstored_client.terms import Terms

if TYPE_CHECKING:
    from kvstored_client.device_stores import Chain
    from kvstored_client.device_verbs import DeviceMemory

SHM: Final = "shm"
INLINE: Final = "inline"
CUDA_IPC: Final = "cuda_ipc"


class Registered:
    """What both clients' transfers have: the memory, who copies, and until when it may be used."""

    def __init__(self, core: Core, kv: PagedKV) -> None:
        self.kv = kv
        self._core = core
        self._closed = False
        self._device: DeviceMemory | None = None
        if kv.device != CPU:
            from kvstored_client.device_verbs import DeviceMemory

            self._device = DeviceMemory(kv)

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
        """Why the daemon does not copy a GPU's memory, or what failed last; empty where all is well."""
        if self._device is not None and self._device.reason:
            return self._device.reason
        return (
            "" if self._core.is_connected() else f"no session with the daemon: {self._core.connect_error or 'closed'}"
        )

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
        if self._device is None or not len(hashes):
            wait_s = min(wait_s, deadline_s) if deadline_s else wait_s
            return requests.get_into(self._core, namespace, hashes, self.kv.at(block_ids, layers), wait_s, 0)
        from kvstored_client import backends

        self.kv.check_layers(layers)
        how = How(layers, deadline_s=deadline_s)
        ids = self.kv.layout.check_ids(block_ids, len(hashes))
        return backends.load(self._core, self._device, requests.one(namespace), pack(hashes), ids, wait_s, how)

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
        first, end = self.kv.check_layers(layers)
        if not len(hashes):
            return came(0, end - first)
        ids = self.kv.layout.check_ids(block_ids, len(hashes))
        how = How(layers, by_layer, deadline_s)
        return self._start_load(requests.one(namespace), hashes, ids, wait_s, how, (first, end))

    def _start_load(
        self, namespace: Namespace, hashes: Sequence[bytes], ids: Indices, wait_s: float, how: How, layers: Range
    ) -> Verb[LoadBegun]:
        if (yield from self._by_daemon()):
            from kvstored_client import device_loads

            memory = self._device
            assert memory is not None, "the daemon copies a GPU's memory only"
            return (yield from device_loads.start_load(self._core, memory, namespace, pack(hashes), ids, wait_s, how))
        connection = yield CONNECT
        if not how.by_layer or connection.carrier is not None:
            blocks = yield from self.load_verb(namespace, hashes, ids, wait_s, how.layers, how.deadline_s)
            return Came(blocks, layers[1] - layers[0])
        held = yield from requests.get(self._core, namespace, hashes, wait_s)
        if not len(held):
            return Came(0, 0)
        copies = LayerCopies(held, self.kv, ids[: len(held)], layers)
        yield from copies.begin()
        return copies

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
        if self._device is None or not len(hashes):
            return requests.put(self._core, namespace, hashes, self.kv.at(block_ids), parent, wait_s, 0, terms)
        from kvstored_client import backends

        chain = self.chain(namespace, hashes, block_ids, parent, terms)
        return backends.store(self._core, self._device, chain, wait_s, deadline_s)

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
        whole = self.store_verb(namespace, hashes, block_ids, parent, wait_s, terms, deadline_s)
        if self._device is None or not len(hashes):
            return at_the_end(whole, len(hashes))
        return self._start_store(self.chain(namespace, hashes, block_ids, parent, terms), whole, wait_s, deadline_s)

    def _start_store(self, chain: Chain, whole: Verb[PutResult], wait_s: float, deadline_s: float) -> Verb[StoreBegun]:
        from kvstored_client import device_stores

        memory, count = self._device, chain.hashes.length
        assert memory is not None, "else it is `at_the_end`"
        try:
            if (yield from self._by_daemon()):
                return (yield from device_stores.start_store(self._core, memory, chain, wait_s, deadline_s))
        except KVStoredClientError as error:
            self._core.failed_open(error)
            return NotStored(count, error)
        return AtTheEnd(whole, count)

    def chain(
        self, namespace: Namespace, hashes: Sequence[bytes], block_ids: Any, parent: bytes, terms: Terms
    ) -> Chain:
        """What is to be stored of a device's memory. Raises ValueError or TypeError."""
        from kvstored_client.device_stores import Chain

        ids, packed = self.kv.layout.check_ids(block_ids, len(hashes)), requests.chain_of(hashes, parent)
        return Chain(requests.one(namespace), packed, ids, parent, terms.check())

    def close_verb(self) -> Verb[None] | None:
        """For `close`: what is to be said to the daemon, once."""
        closed, self._closed = self._closed, True
        if closed or self._device is None or self._core.closed:
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


class AtTheEnd:
    """A store by layers that is done as a whole, when all of them are ready; see `layers.StoreBegun`."""

    def __init__(self, whole: Verb[PutResult], count: int) -> None:
        self._whole, self._count = whole, count

    def ready(self, layers: int) -> None:
        """See `StoreBegun`."""

    def copied(self) -> Range:
        """See `StoreBegun`."""
        return 0, 0

    def finish(self, *, cancel: bool) -> Verb[PutResult]:
        """See `StoreBegun`."""
        if cancel:
            return PutResult.of([Outcome.MISS] * self._count, 0)
        return (yield from self._whole)


def came(blocks: int, layers: int) -> Verb[LoadBegun]:
    """No question."""
    return Came(blocks, layers)
    yield  # makes this a generator


def at_the_end(whole: Verb[PutResult], count: int) -> Verb[StoreBegun]:
    """No question before the end."""
    return AtTheEnd(whole, count)
    yield  # makes this a generator
