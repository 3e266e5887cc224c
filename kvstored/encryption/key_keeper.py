"""Keeps the NVMe tier in keys: reads master keys when they are needed, again and again where they cannot be had.

A tenant whose key is missing is locked (`tiers.tenant_keys`), which is said in `status`; nothing of it is lost.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

from kvstored.background import cancel_all
from kvstored.clock import Clock
from kvstored.config.tenants import Tenant
from kvstored.encryption.key_sources import KeyUnavailable, has_source, read_masters
from kvstored.errors import KVStoredError, NotFound
from kvstored.reporting.logs import get_logger
from kvstored.tenancy.tenants import Tenants
from kvstored.tiers.tenant_keys import TenantKeys

T = TypeVar("T")
LOOK_S: Final = 1.0
RETRY_S: Final = 5.0
RETRY_MAX_S: Final = 60.0
WHAT_TO_DO: Final = "give the key back: it is tried every minute, at once by `kvstorectl tenant rekey {name}`"

_log = get_logger("encryption")


class KeyKeeper:
    """Follows the tenants' settings. All calls are made on the event loop."""

    def __init__(self, tenants: Tenants, keys: TenantKeys, clock: Clock) -> None:
        self._tenants = tenants
        self._keys = keys
        self._clock = clock
        self._due: dict[str, tuple[float, float]] = {}  # tenant -> when it is tried again, and the pause after that
        self._said: dict[str, str] = {}
        self._reading: dict[tuple[object, ...], asyncio.Task[list[bytes]]] = {}  # by source, each once at a time
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        for tenant in tenants:
            keys.configure(tenant.name, tenant.encryption)
        tenants.watch(self._changed)

    async def start(self) -> None:
        """Read all keys that are needed, each within its time limit, and look after them from here on."""
        await self._look()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Look after nothing any more."""
        if self._task is not None:
            await cancel_all([self._task])

    async def rekey(self, name: str) -> int:
        """Read the tenant's key again and wrap its data keys with it; how many. Raises KVStoredError."""
        masters = await self._masters_of(name)
        await self._keys.unlock(name, masters)
        done = await self._keys.rekey(name, masters)
        self._note(name)
        return done

    def warnings(self, only: str | None = None) -> list[str]:
        """What is to be said of tenants whose key is missing: of all, or of one, without what is the host's."""
        found: list[str] = []
        for name, why in sorted(self._keys.locked().items()):
            if only not in (None, name) or name not in self._tenants:
                continue
            said = f"tenant {name}: its encrypted blocks on NVMe cannot be read, for their key is missing"
            if name in self._keys.barred:
                said += "; new ones stay in DRAM"
            found.append(said if only is not None else f"{said}: {why}; {WHAT_TO_DO.format(name=name)}")
        return found

    def _changed(self, name: str) -> None:
        tenant = self._tenants.get(name)
        self._keys.configure(name, tenant.encryption if tenant is not None else "")
        self._due.pop(name, None)
        self._wake.set()

    async def _run(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._wake.wait(), LOOK_S)
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                await self._look()
            except Exception:  # nobody else would look after the others
                _log.exception("looking after keys")

    async def _look(self) -> None:
        now_s = self._clock.monotonic()
        names = [name for name in sorted(self._keys.waiting()) if self._due.get(name, (0.0, 0.0))[0] <= now_s]
        await asyncio.gather(*(self._unlock(name) for name in names if name in self._tenants))

    async def _unlock(self, name: str) -> None:
        pause_s = self._due.get(name, (0.0, RETRY_S))[1]
        self._due[name] = (self._clock.monotonic() + pause_s, min(2 * pause_s, RETRY_MAX_S))
        try:
            await self._keys.unlock(name, await self._masters_of(name))
        except KVStoredError as error:
            self._keys.missing(name, str(error))
        self._note(name)

    async def _masters_of(self, name: str) -> list[bytes]:
        """Of the tenant as it is when they have been read: with those of before a data key may be made that the next
        daemon could not open. Raises KVStoredError.
        """
        while True:
            tenant = self._tenants.get(name)
            if tenant is None:
                raise NotFound(f"there is no tenant {name!r}")
            try:
                masters = await self._masters(tenant)
            except KVStoredError:
                if self._tenants.get(name) == tenant:
                    raise
                continue
            if self._tenants.get(name) == tenant:
                return masters

    async def _masters(self, tenant: Tenant) -> list[bytes]:
        if not has_source(tenant):
            return read_masters(tenant)  # which says so
        try:
            return await asyncio.wait_for(self._read(tenant), tenant.key_timeout_s + LOOK_S)
        except TimeoutError:
            limit = f"key_timeout_s ({tenant.key_timeout_s:g} s)"
            raise KeyUnavailable(f"its key could not be read within {limit}") from None

    async def _read(self, tenant: Tenant) -> list[bytes]:
        """On one thread per source, which may hang (a file system, a FIFO): the next one waits for it to come back."""
        source = (tenant.key_file, tenant.key_credential, *tenant.key_command)
        while source in self._reading:
            await asyncio.wait([self._reading[source]])
        reading = self._reading[source] = asyncio.create_task(_in_thread(lambda: read_masters(tenant)))
        reading.add_done_callback(lambda done: self._came_back(source, done))
        return await asyncio.shield(reading)

    def _came_back(self, source: tuple[object, ...], reading: asyncio.Task[list[bytes]]) -> None:
        del self._reading[source]
        if not reading.cancelled():
            reading.exception()  # perhaps nobody waits for it any more

    def _note(self, name: str) -> None:
        """Say what has changed, once."""
        why = self._keys.locked().get(name, "")
        if not why:
            self._due.pop(name, None)
        if why != self._said.get(name, ""):
            self._said[name] = why
            if why:
                _log.warning("locked", tenant=name, why=why)
            else:
                _log.info("unlocked", tenant=name)


async def _in_thread(work: Callable[[], T]) -> T:
    """The result of something that may never end, on a thread that nothing waits for when the process ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="key", daemon=True).start()
    return await done
