"""Whole prefixes between the daemon and an engine's paged KV memory, in one call: load and store.

`Client.register` gives a `PagedTransfers`, whatever is behind it:

* `shm`, for tensors of the CPU: the client maps the daemon's memory and copies itself;
* `cuda_ipc`, for tensors of a GPU: the daemon's device worker opens them and copies;
* `shm` for these too, where it cannot open them: the client copies on streams of its own;
* `inline`, over gRPC: as `shm`, with the blocks inside of messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvstored_client.blocks import Blocks
from kvstored_client.layers import Came, Loading, NotStored, Range, Storing
from kvstored_client.namespace import Namespace
from kvstored_client.paged import PagedKV
from kvstored_client.registered import Registered
from kvstored_client.results import PutResult
from kvstored_client.terms import Durability, PutHints, Terms

if TYPE_CHECKING:
    from kvstored_client.driver import ThreadDriver


class PagedTransfers(Registered):
    """Transfers of one registered memory; made by `Client.register`."""

    def __init__(self, driver: ThreadDriver, kv: PagedKV) -> None:
        super().__init__(driver.core, kv)
        self._driver = driver

    def ready(self) -> bool:
        """Register the memory now, not at the first load or store; False: nobody can copy it, and `reason` says why.

        Of a GPU's memory that the daemon cannot open, `backend` is `shm` then and `reason` says why, too.
        """
        verb = self.register_verb()
        return self._driver.data(verb, False) if verb is not None else True

    def load(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        block_ids: Any,
        wait_s: float = 0.0,
        *,
        layers: Range | None = None,
        deadline_s: float = 0.0,
    ) -> int:
        """Bring the leading blocks of a chain into the engine's memory; how many came, 0 for a miss.

        Args:
            namespace: where they are.
            hashes: the blocks, in chain order.
            block_ids: where each goes; a multiple of the hashes where several engine blocks are stored as one.
            wait_s: how long to wait for blocks that are being written or lie on NVMe.
            layers: only those from the first on and before the second; the others stay as they are.
            deadline_s: what has not come after so long is of no use any more; 0: there is no such time. A piece of
                32 MiB at most that is being copied then is finished.

        Engine blocks past those that came may have been written to. Raises ValueError for ids or layers that the memory
        does not have, and where stored blocks are of another size.
        """
        return self._driver.data(self.load_verb(namespace, hashes, block_ids, wait_s, layers, deadline_s), 0)

    def start_load(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        block_ids: Any,
        wait_s: float = 0.0,
        *,
        layers: Range | None = None,
        by_layer: bool = False,
        deadline_s: float = 0.0,
    ) -> Loading:
        """Begin a load and come back at once, for an engine that looks now and then whether it has ended.

        With `by_layer` all blocks of one layer come before those of the next, and `Loading.arrived` tells how many
        layers are in place. Of more hashes than a call carries the leading ones are loaded. By `shm` it has ended when
        this returns, or with `by_layer` its first layer is in place, and a thread copies the others.
        """
        how = (layers, by_layer, deadline_s)
        verb = self.start_load_verb(namespace, hashes, block_ids, wait_s, *how)
        first, end = self.kv.check_layers(layers)
        return Loading(self._driver, self._driver.data(verb, Came(0, 0)), end - first)

    def load_held(self, blocks: Blocks, block_ids: Any) -> int:
        """The same with blocks that are held already (`get`, or `attach` of what the scheduler took); `shm` only."""
        self._check()
        return blocks.copy_into(self._used.at(block_ids))

    def store(
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
        """Store consecutive blocks of a chain from the engine's memory; readable when this returns.

        The blocks must stay as they are until then. Arguments as of `load` and of `Client.put`; of what is not copied
        by `deadline_s` nothing is stored, by `inline` what was sent before.
        """
        terms = Terms(durability, ttl_s, sliding, hint)
        return self._driver.run(self.store_verb(namespace, hashes, block_ids, parent, wait_s, terms, deadline_s))

    def start_store(
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
    ) -> Storing:
        """Begin a store whose layers are copied as the engine says that they are ready (`Storing.ready`).

        Arguments as of `store`. Of more hashes than a call carries the daemon stores the leading ones. By `shm` a
        thread copies the layers, of as many blocks as half of the staging memory takes; what is left, and by `inline`
        all, is copied by `Storing.result`.
        """
        terms = Terms(durability, ttl_s, sliding, hint)
        verb = self.start_store_verb(namespace, hashes, block_ids, parent, wait_s, terms, deadline_s)
        return Storing(self._driver, self._driver.data(verb, NotStored(len(hashes))), self.kv.layers)

    def close(self) -> None:
        """End the registration: when this returns nothing copies, and the memory may be freed. Safe to call twice."""
        verb = self.close_verb()
        self.stop_copies()
        if verb is not None:
            self._driver.data(verb, None, begun=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
