"""The contracts of paged transfers for `AsyncClient`: its calls, made in an event loop of another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from kvstored_client import AsyncClient, Client, Namespace, PagedKV, PutResult
from kvstored_client.async_layers import AsyncLoading, AsyncStoring
from kvstored_client.layers import Arrived

from kvstored.testing.contract_paged import Registered, lose_daemon
from kvstored.testing.device_arrays import HeldByADevice

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]


class LoopThread:
    """An event loop in a thread of its own, whose coroutines another thread waits for."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it there; its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60.0)

    def client(self, address: str, **settings: Any) -> AsyncClient:
        """A client of that loop, connected."""

        async def made() -> AsyncClient:
            return await AsyncClient(address, **settings).__aenter__()

        return self.run(made())

    def close(self) -> None:
        """End it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class WaitedLoad:
    """`AsyncLoading`, as `Loading`."""

    def __init__(self, run: Run[Any], load: AsyncLoading) -> None:
        self._run, self._load = run, load

    def done(self) -> bool:
        """See `LoadUnderWay`."""
        return self._load.done()

    def arrived(self) -> Arrived:
        """See `LoadUnderWay`."""
        return self._load.arrived()

    def result(self) -> int:
        """See `Loading`."""
        came: int = self._run(self._load.result())
        return came


class WaitedStore:
    """`AsyncStoring`, as `Storing`."""

    def __init__(self, run: Run[Any], store: AsyncStoring) -> None:
        self._run, self._store = run, store

    def ready(self, layers: int) -> None:
        """See `StoreUnderWay`."""

        async def in_the_loop() -> None:
            self._store.ready(layers)

        self._run(in_the_loop())

    def copied(self) -> Arrived:
        """See `StoreUnderWay`."""
        return self._store.copied()

    def result(self) -> PutResult:
        """See `Storing`."""
        result: PutResult = self._run(self._store.result())
        return result

    def cancel(self) -> PutResult:
        """See `Storing`."""
        result: PutResult = self._run(self._store.cancel())
        return result

    def __enter__(self) -> Self:
        self._run(self._store.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._run(self._store.__aexit__(kind, error, at))


class WaitedTransfers:
    """`AsyncPagedTransfers`, as `PagedTransfers`: what is a coroutine there is waited for here."""

    def __init__(self, loop: LoopThread, client: AsyncClient, kv: PagedKV) -> None:
        self._run, self._of_loop = loop.run, client.register(kv)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of_loop, name)
        if not asyncio.iscoroutinefunction(found):
            return found

        def waited(*arguments: Any, **named: Any) -> Any:
            return self._run(found(*arguments, **named))

        return waited

    def start_load(self, *arguments: Any, **named: Any) -> WaitedLoad:
        """See `PagedTransfers`."""
        return WaitedLoad(self._run, self._run(self._of_loop.start_load(*arguments, **named)))

    def start_store(self, *arguments: Any, **named: Any) -> WaitedStore:
        """See `PagedTransfers`."""
        return WaitedStore(self._run, self._run(self._of_loop.start_store(*arguments, **named)))


class InLoop(Registered):
    """A `Bench` whose transfers are those of an `AsyncClient`; the other client looks at what is stored."""

    def __init__(
        self,
        loop: LoopThread,
        mover: AsyncClient,
        client: Client,
        namespace: Namespace,
        arrays: Sequence[Any],
        axis: int,
    ) -> None:
        self._loop, self._mover = loop, mover
        self.client, self.namespace, self.arrays, self.axis = client, namespace, list(arrays), axis
        self.transfers: Any = WaitedTransfers(loop, mover, PagedKV(self.arrays, axis))

    def lose_daemon(self) -> None:
        """See `Bench`."""

        async def in_the_loop() -> None:
            lose_daemon(self._mover)

        self._loop.run(in_the_loop())


class InLoopOnDevice(HeldByADevice, InLoop):
    """The same in the memory of a device."""
