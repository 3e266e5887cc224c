"""Transfers of paged KV memory for `AsyncClient`; see `transfers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvstored_client.async_layers import AsyncLoading, AsyncStoring
from kvstored_client.effects import Work
from kvstored_client.errors import Unavailable
from kvstored_client.layers import Came, NotStored, Range
from kvstored_client.loop import in_thread
from kvstored_client.namespace import Namespace
from kvstored_client.own_loads import LONG_WORK
from kvstored_client.paged import PagedKV
from kvstored_client.registered import Registered
from kvstored_client.results import PutResult
from kvstored_client.terms import Durability, PutHints, Terms

if TYPE_CHECKING:
    from kvstored_client.loop import LoopDriver


class AsyncPagedTransfers(Registered):
    """The same for `AsyncClient`: see `PagedTransfers`. The event loop is free while bytes are copied."""

    def __init__(self, driver: LoopDriver, kv: PagedKV) -> None:
        super().__init__(driver.core, kv)
        self._driver = driver

    async def ready(self) -> bool:
        """See `PagedTransfers.ready`."""
        verb = self.register_verb()
        return await self._driver.data(verb, False) if verb is not None else True

    async def load(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        block_ids: Any,
        wait_s: float = 0.0,
        *,
        layers: Range | None = None,
        deadline_s: float = 0.0,
    ) -> int:
        """See `PagedTransfers.load`."""
        return await self._driver.data(self.load_verb(namespace, hashes, block_ids, wait_s, layers, deadline_s), 0)

    async def store(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        block_ids: Any,
        parent: bytes = b"",
        wait_s: float = 0.0,
        *,
        durability: Durability | None = None,
        ttl_s: float = 0.0,
        sliding: bool = False,
        deadline_s: float = 0.0,
        hint: PutHints | None = None,
    ) -> PutResult:
        """See `PagedTransfers.store`."""
        terms = Terms(durability, ttl_s, sliding, hint)
        return await self._driver.run(self.store_verb(namespace, hashes, block_ids, parent, wait_s, terms, deadline_s))

    async def start_load(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        block_ids: Any,
        wait_s: float = 0.0,
        *,
        layers: Range | None = None,
        by_layer: bool = False,
        deadline_s: float = 0.0,
    ) -> AsyncLoading:
        """See `PagedTransfers.start_load`."""
        how = (layers, by_layer, deadline_s)
        verb = self.start_load_verb(namespace, hashes, block_ids, wait_s, *how)
        first, end = self.kv.check_layers(layers)
        return AsyncLoading(self._driver, await self._driver.data(verb, Came(0, 0)), end - first)

    async def start_store(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        block_ids: Any,
        parent: bytes = b"",
        wait_s: float = 0.0,
        *,
        durability: Durability | None = None,
        ttl_s: float = 0.0,
        sliding: bool = False,
        deadline_s: float = 0.0,
        hint: PutHints | None = None,
    ) -> AsyncStoring:
        """See `PagedTransfers.start_store`: `async with await transfers.start_store(...) as storing`."""
        terms = Terms(durability, ttl_s, sliding, hint)
        verb = self.start_store_verb(namespace, hashes, block_ids, parent, wait_s, terms, deadline_s)
        return AsyncStoring(self._driver, await self._driver.data(verb, NotStored(len(hashes))), self.kv.layers)

    async def close(self) -> None:
        """See `PagedTransfers.close`."""
        verb = self.close_verb()
        try:
            if verb is not None:
                await self._driver.data(verb, None, begun=True)
        finally:
            if self._copies:
                try:
                    await in_thread(Work(self.stop_copies, LONG_WORK))
                except Unavailable:  # no thread to wait in: then in this one
                    self.stop_copies()
