"""Staging: memory that one client writes and the daemon copies from.

A client maps its staging read-write, so nothing in it can be trusted to stay as it is. The
memory is the session's own and goes with it: it is never given to another.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

from kvstored.device.memory import MODE_CLIENTS_WRITE, Mapping
from kvstored.errors import DeviceError, InvalidArgument
from kvstored.keys import SLOT_ALIGN_BYTES

SESSION_BYTES_MAX: Final = 16 << 30
UNMAP_AT_ONCE_BYTES: Final = 4 << 20  # more goes to a thread: the kernel takes 0.2 s for 1 GiB


class Staging:
    """The staging memory of one session; `StagingPool.create` makes it."""

    def __init__(self, mapping: Mapping, on_gone: Callable[[int], None]) -> None:
        self.size_bytes = mapping.size_bytes
        self._mapping = mapping
        self._on_gone = on_gone
        self._holds = 0
        self._closing = False
        self._on_ended: Callable[[], None] = lambda: None

    def read_write_fd(self) -> int:
        """The descriptor for the client to map; it stays the staging's."""
        return self._mapping.fd

    def address_of(self, offset: int, size_bytes: int) -> int:
        """Where the client's bytes lie in this process; raises InvalidArgument outside of the memory."""
        if self._closing or offset < 0 or size_bytes < 0 or offset + size_bytes > self.size_bytes:
            raise InvalidArgument(f"staging has no {size_bytes} bytes at {offset}: its size is {self.size_bytes}")
        return self._mapping.address + offset

    def zero(self) -> None:
        """Make zeros of it; blocks. Its client must have nothing in it that is still to be committed."""
        self._mapping.zero()

    def hold(self) -> None:
        """A copy from this memory begins: it stays mapped until as many `unhold`."""
        assert not self._closing, "nothing begins at its end"
        self._holds += 1

    def unhold(self) -> None:
        """A copy from this memory is over."""
        assert self._holds, "unheld more often than held"
        self._holds -= 1
        if self._closing and not self._holds:
            self._unmap()

    def close(self, on_ended: Callable[[], None] = lambda: None) -> None:
        """Give the memory back, at once or when the last copy is over, then call `on_ended`; harmless when repeated."""
        if not self._closing:
            self._closing = True
            self._on_ended = on_ended
            if not self._holds:
                self._unmap()

    def _unmap(self) -> None:
        if self.size_bytes <= UNMAP_AT_ONCE_BYTES:
            self._give_back()
            self._given_back()
            return
        giving = asyncio.get_running_loop().run_in_executor(None, self._give_back)
        giving.add_done_callback(lambda _: self._given_back())

    def _given_back(self) -> None:
        self._on_gone(self.size_bytes)
        self._on_ended()

    def _give_back(self) -> None:
        # A client that outlives its session, or a fork of it, may keep its mapping: without this
        # it would keep the memory too, outside of every account.
        try:
            self._mapping.punch()
        finally:
            self._mapping.close()


class StagingPool:
    """Makes staging memory, up to a limit for all sessions together and one for those of a tenant."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes_of: Counter[str] = Counter()  # per tenant

    @property
    def used_bytes(self) -> int:
        """Of all sessions."""
        return self.used_bytes_of.total()

    async def create(self, size_bytes: int, tenant: str = "", limit_bytes: int | None = None) -> Staging | None:
        """Populated staging memory, its size rounded up to 4 KiB; None over a limit, `limit_bytes` being the tenant's.

        Raises InvalidArgument for a size that makes no sense, DeviceError where there is no memory.
        """
        if not 0 < size_bytes <= SESSION_BYTES_MAX:
            raise InvalidArgument(f"staging of {size_bytes} bytes: 1 to {SESSION_BYTES_MAX} are allowed")
        size = -(-size_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
        most = self.limit_bytes if limit_bytes is None else limit_bytes
        if self.used_bytes + size > self.limit_bytes or self.used_bytes_of[tenant] + size > most:
            return None
        self.used_bytes_of[tenant] += size
        making = asyncio.get_running_loop().run_in_executor(None, _make, size)
        try:
            mapping = await asyncio.shield(making)
        except asyncio.CancelledError:
            # The thread goes on; whatever comes of it is taken back then.
            making.add_done_callback(lambda done: self._discard(done, tenant, size))
            raise
        except DeviceError:
            self._gone(tenant, size)
            raise
        return Staging(mapping, partial(self._gone, tenant))

    def _discard(self, made: asyncio.Future[Mapping], tenant: str, size: int) -> None:
        if not made.cancelled() and made.exception() is None:
            made.result().close()
        self._gone(tenant, size)

    def _gone(self, tenant: str, size_bytes: int) -> None:
        self.used_bytes_of[tenant] -= size_bytes
        assert self.used_bytes_of[tenant] >= 0, "given back once"
        if not self.used_bytes_of[tenant]:
            del self.used_bytes_of[tenant]


def _make(size_bytes: int) -> Mapping:
    mapping = Mapping(size_bytes, name="kvstored-staging", mode=MODE_CLIENTS_WRITE, huge_pages=True)
    try:
        mapping.populate()
    except DeviceError:
        mapping.close()
        raise
    return mapping
