"""The asyncio client: the verbs of `Client` as coroutines, for one event loop."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, Unpack

from google.protobuf.message import Message
from kvstored_proto.v1 import kvstored_pb2 as pb
from kvstored_proto.v1.kvstored_pb2 import NamespaceSpec

from kvstored_client import prefetching, requests, verbs
from kvstored_client.blocks import Blocks
from kvstored_client.core import Core, settings_of
from kvstored_client.errors import KVStoredClientError
from kvstored_client.hinting import Hints
from kvstored_client.loop import LoopDriver
from kvstored_client.namespace import Namespace
from kvstored_client.results import ClientStats, HintResult, LookupResult, Outcome, PrefetchStatus, PutResult
from kvstored_client.staged import Reserved, Staged, commit_staged
from kvstored_client.terms import Asking, Durability, PutHints, Terms
from kvstored_client.tls import Tls

if TYPE_CHECKING:
    from kvstored_client.async_transfers import AsyncPagedTransfers
    from kvstored_client.paged import PagedKV

R = TypeVar("R", bound=Message)
H = TypeVar("H")


class Held(Generic[H]):
    """`async with client.get(...) as blocks` and, where the holder takes care of it, `await client.get(...)`."""

    def __init__(self, opening: Callable[[], Awaitable[H]], close: Callable[[H], None]) -> None:
        self._opening = opening
        self._close = close
        self._held: H | None = None

    def __await__(self) -> Generator[Any, Any, H]:
        return self._opening().__await__()

    async def __aenter__(self) -> H:
        self._held = await self._opening()
        return self._held

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._held is not None:
            self._close(self._held)


class AsyncStagedPut(Staged):
    """Blocks that are written where the daemon takes them from; see `Staged`. Left without a commit, it is undone."""

    def __init__(self, driver: LoopDriver, reserved: Reserved, count: int) -> None:
        super().__init__(reserved, count)
        self._driver = driver

    async def commit(self) -> PutResult:
        """Store what the views hold; readable when this returns."""
        return await self._driver.data(commit_staged(self._driver.core, self), self.result, begun=True)


class AsyncPrefetch:
    """A prefetch under way. It goes on when this is dropped; `cancel` ends it."""

    def __init__(self, driver: LoopDriver, started: prefetching.Started) -> None:
        self._driver = driver
        self._started = started
        self.outcome = started.outcome
        self.resident_blocks = started.resident_blocks
        self.queued_blocks = started.queued_blocks

    async def poll(self) -> PrefetchStatus:
        """How far it is."""
        return await self.wait(0.0)

    async def wait(self, timeout_s: float) -> PrefetchStatus:
        """How far it is, when it is done or after `timeout_s`."""
        asking = prefetching.poll(self._driver.core, self._started, timeout_s)
        return await self._driver.data(asking, self._started.unknown, begun=True)

    async def cancel(self) -> PrefetchStatus:
        """End it; when this returns an answer of the daemon, no copy of it runs any more."""
        cancelling = prefetching.cancel(self._driver.core, self._started)
        return await self._driver.data(cancelling, self._started.unknown, begun=True)


class AsyncClient:
    """The daemon of this node, for asyncio and uvloop. Arguments and results as in `Client`.

    The constructor does not connect; the first verb does, or `async with`. `Namespace.chain`
    needs the seed, which is there after either of `open` and the first verb on the namespace.
    Cancelling a verb gives back what it held, after a copy that runs has ended.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        tls: Tls | None = None,
        name: str = "",
        staging_bytes: int = 64 << 20,
        timeout_s: float = 2.0,
        connect_timeout_s: float = 1.0,
        create_group: bool = False,
        join_group: bytes = b"",
    ) -> None:
        given = (name, staging_bytes, timeout_s, connect_timeout_s, create_group, join_group)
        self._core = Core(settings_of(address, token, token_file, tls, *given))
        self._driver = LoopDriver(self._core)

    # ---- state ----

    @property
    def connected(self) -> bool:
        """Whether a session is open at this moment."""
        return self._core.is_connected()

    @property
    def stats(self) -> ClientStats:
        """Counts since the start."""
        return self._core.snapshot()

    @property
    def group_id(self) -> bytes:
        """The group that this session made or joined."""
        return self._core.group_id

    @property
    def boot_id(self) -> int:
        """Names the daemon's present life; 0 before the first connection."""
        return self._core.boot_id

    async def close(self) -> None:
        """See `Client.close`."""
        self._driver.close()

    async def __aenter__(self) -> Self:
        try:
            await self._driver.connect()
        except KVStoredClientError:
            pass  # logged; the next call tries again
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    # ---- verbs ----

    def namespace(
        self,
        spec: NamespaceSpec,
        *,
        durability: Durability = "memory",
        ttl_s: float = 0.0,
        sliding: bool = False,
        prefill_tokens_per_s: float = 0.0,
        prefetch: bool = False,
    ) -> Namespace:
        """A handle on a namespace, opened by the first verb that uses it; chains can be made once a session is open."""
        terms = Terms(durability, ttl_s, sliding)
        return Namespace(spec, self._core.tenant, terms=terms, asking=Asking(prefill_tokens_per_s, prefetch))

    async def open(self, namespace: Namespace) -> bool:
        """Learn the namespace's digest and chain seed now; False where the daemon does not answer."""
        await self._driver.data(verbs.open_namespace(self._core, namespace), None)
        return bool(namespace.digest)

    async def lookup(
        self,
        namespaces: Namespace | Sequence[Namespace],
        hashes: Sequence[bytes],
        *,
        prefill_tokens_per_s: float | None = None,
        prefetch: bool | None = None,
        prefetch_deadline_s: float = 0.0,
    ) -> LookupResult:
        """See `Client.lookup`."""
        asked = (prefill_tokens_per_s, prefetch, prefetch_deadline_s)
        looking = requests.lookup(self._core, namespaces, hashes, *asked)
        return await self._driver.data(looking, LookupResult())

    async def contains(self, namespace: Namespace, hashes: Sequence[bytes]) -> list[Outcome]:
        """See `Client.contains`."""
        return await self._driver.data(requests.contains(self._core, namespace, hashes), [Outcome.MISS] * len(hashes))

    def get(
        self, namespaces: Namespace | Sequence[Namespace], hashes: Sequence[bytes], wait_s: float = 0.0
    ) -> Held[Blocks]:
        """Hold the leading blocks: `async with client.get(...) as blocks`.

        `Blocks.copy_into` blocks the loop while it copies; `get_into` does not.
        """
        getting = requests.get(self._core, namespaces, hashes, wait_s)
        return Held(lambda: self._driver.data(getting, Blocks(None, [], Outcome.MISS)), Blocks.release)

    def attach(self, lease_id: int) -> Held[Blocks]:
        """See `Client.attach`."""
        attaching = requests.attach(self._core, lease_id)
        return Held(lambda: self._driver.data(attaching, Blocks(None, [], Outcome.MISS)), Blocks.release)

    async def get_into(
        self,
        namespaces: Namespace | Sequence[Namespace],
        hashes: Sequence[bytes],
        buffers: Any,
        wait_s: float = 0.0,
        *,
        block_bytes: int = 0,
    ) -> int:
        """See `Client.get_into`."""
        return await self._driver.data(
            requests.get_into(self._core, namespaces, hashes, buffers, wait_s, block_bytes), 0
        )

    async def put(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        buffers: Any,
        parent: bytes = b"",
        wait_s: float = 0.0,
        *,
        block_bytes: int = 0,
        durability: Durability | None = None,
        ttl_s: float = 0.0,
        sliding: bool = False,
        hint: PutHints | None = None,
    ) -> PutResult:
        """See `Client.put`. The buffers must stay as they are until it returns."""
        terms = Terms(durability, ttl_s, sliding, hint)
        return await self._driver.run(
            requests.put(self._core, namespace, hashes, buffers, parent, wait_s, block_bytes, terms)
        )

    def stage(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        block_bytes: int,
        parent: bytes = b"",
        wait_s: float = 0.0,
        *,
        durability: Durability | None = None,
        ttl_s: float = 0.0,
        sliding: bool = False,
        hint: PutHints | None = None,
    ) -> Held[AsyncStagedPut]:
        """See `Client.stage`: `async with client.stage(...) as staged`, then `await staged.commit()`."""
        terms = Terms(durability, ttl_s, sliding, hint)
        reserving = requests.stage(self._core, namespace, hashes, block_bytes, parent, wait_s, terms)

        async def opening() -> AsyncStagedPut:
            return AsyncStagedPut(self._driver, await self._driver.data(reserving, (None, [])), len(hashes))

        return Held(opening, AsyncStagedPut.abort)

    def register(self, kv: PagedKV) -> AsyncPagedTransfers:
        """See `Client.register`."""
        from kvstored_client.async_transfers import AsyncPagedTransfers

        return AsyncPagedTransfers(self._driver, kv)

    async def prefetch(
        self,
        namespaces: Namespace | Sequence[Namespace],
        hashes: Sequence[bytes],
        priority: int = 0,
        deadline_s: float = 0.0,
    ) -> AsyncPrefetch:
        """See `Client.prefetch`."""
        starting = requests.prefetch(self._core, namespaces, hashes, priority, deadline_s)
        return AsyncPrefetch(self._driver, await self._driver.data(starting, prefetching.Started()))

    async def cancel_prefetch(self, prefetch_id: int) -> PrefetchStatus:
        """See `Client.cancel_prefetch`."""
        cancelling = requests.cancel_lookup(self._core, prefetch_id)
        return await self._driver.data(cancelling, PrefetchStatus())

    async def touch(self, namespace: Namespace, hashes: Sequence[bytes]) -> int:
        """See `Client.touch`."""
        return await self._driver.data(requests.touch(self._core, namespace, hashes), 0)

    async def delete(self, namespace: Namespace, hashes: Sequence[bytes]) -> int:
        """See `Client.delete`."""
        return await self._driver.data(requests.delete(self._core, namespace, hashes), 0)

    async def hint(self, namespace: Namespace, hashes: Sequence[bytes], **said: Unpack[Hints]) -> HintResult:
        """See `Client.hint`."""
        return await self._driver.data(requests.hint(self._core, namespace, hashes, said), HintResult())

    async def status(self) -> pb.StatusReply | None:
        """See `Client.status`."""
        asking = verbs.ask(self._core, pb.OPERATION_STATUS, pb.StatusRequest(), pb.StatusReply, None)
        return await self._driver.data(asking, None)

    async def call(self, operation: int, request: Message, reply_type: type[R], timeout_s: float | None = None) -> R:
        """Any operation of the protocol, for tools. Raises KVStoredClientError."""
        return await self._driver.run(verbs.ask(self._core, operation, request, reply_type, timeout_s))
