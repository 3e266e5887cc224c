"""What the tiers have in common: the words the store and the mover use to talk to them.

A tier owns bytes and their account. It knows keys only as opaque parts of a record, and calls nothing above it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol, TypeAlias

import msgspec

from kvstored.keys import Namespace
from kvstored.lifetime import Expiry
from kvstored.tiers.path_wear import PathWear


class Health(enum.StrEnum):
    """What a tier can do at the moment."""

    OK = "ok"
    READ_ONLY = "read_only"
    OFF = "off"


class PathStatus(msgspec.Struct, frozen=True):
    """What one path of a tier can do: for status. `retry_in_s` is 0 where nothing is to be retried."""

    number: int
    path: str
    health: Health
    reason: str
    since_s: float  # wall clock
    retry_in_s: float
    direct_io: bool
    scrubbed_bytes: int
    scrub_corrupt_blocks: int
    scrub_passed_s: float  # wall clock, when the last complete pass ended; 0: none did

    def describe(self) -> str:
        """One line for people."""
        direct = "direct I/O" if self.direct_io else "buffered, the file system refuses direct I/O"
        if self.health is Health.OK:
            return f"{self.path}: ok, {direct}"
        since = datetime.fromtimestamp(self.since_s, UTC).isoformat(timespec="seconds")
        again = f"since {since}, tried again in {self.retry_in_s:.0f} s"
        if self.health is Health.OFF:
            return f"{self.path}: off: {self.reason} ({again})"
        return f"{self.path}: {self.health.value} ({self.reason}), {again}, {direct}"


class Usage(msgspec.Struct, frozen=True):
    """Where a tier's bytes are: used + dead + retired + free = capacity, always.

    `used`: slots or records that hold a block (or are reserved for one). `dead`: bytes that
    nothing can use until their segment or extent is recycled. `retired`: memory handed to a
    tenant's sessions that may not serve another. `free`: the rest.
    """

    capacity_bytes: int
    used_bytes: int
    dead_bytes: int
    retired_bytes: int
    free_bytes: int
    blocks: int

    def balanced(self) -> bool:
        """Whether the account adds up (DESIGN invariant 4)."""
        return self.used_bytes + self.dead_bytes + self.retired_bytes + self.free_bytes == self.capacity_bytes


class Location(msgspec.Struct, frozen=True, gc=False):
    """Where a record lies on NVMe. `generation` is the extent's: a recycled one makes it stale."""

    volume: int
    extent: int
    generation: int
    offset: int


class Record(msgspec.Struct, frozen=True, gc=False):
    """An index entry of the lower tier."""

    location: Location
    size_bytes: int
    content_hash: bytes
    parent: bytes
    created_s: float
    seal: bytes = b""  # how its bytes are encrypted; empty: they are not
    expiry: Expiry | None = None  # None: it does not end


class Store(msgspec.Struct, frozen=True, gc=False):
    """One block to be written below. `address` is where its bytes lie in this process until the write is done."""

    digest: bytes
    hash: bytes
    parent: bytes
    address: int
    size_bytes: int
    content_hash: bytes
    expiry: Expiry | None = None


class Load(msgspec.Struct, frozen=True, gc=False):
    """One block to be read: `address` has room for the size rounded up to 4 KiB."""

    digest: bytes
    hash: bytes
    record: Record
    address: int
    used: bool = True  # somebody wants it; not only a check


class Wiped(msgspec.Struct):
    """What was made zeros, and what could not be and why (a line each)."""

    size_bytes: int = 0
    left: list[str] = []


Told: TypeAlias = Callable[[int, int, int], None]
"""Told how far long work is: steps done, steps in all, bytes."""


class Allotment(Protocol):
    """What each tenant may use of a tier; `kvstored.policy.quota.Allotments` is one, its words are explained there."""

    def room(self, tenant: str, used_bytes: int, wanted_bytes: int) -> int:
        """How many of the wanted bytes it may take."""
        ...

    def excess(self, tenant: str, used_bytes: int) -> int:
        """Bytes over its limit."""
        ...

    def spare(self, tenant: str, used_bytes: int) -> int:
        """Bytes over its guarantee."""
        ...

    def guaranteed(self, tenant: str) -> int:
        """Its guarantee in bytes."""
        ...

    def entitled(self, tenant: str, used_bytes: int, wanted_bytes: int) -> bool:
        """Whether so much more is within its guarantee."""
        ...

    def losers(self, asker: str, used_bytes: Mapping[str, int], wanted_bytes: int) -> Sequence[tuple[str, int]]:
        """Who has to make room for it, and how many bytes at most."""
        ...


class NoAllotment:
    """An `Allotment` without limits, guarantees and shares: the oldest goes first, whoever has it."""

    def room(self, tenant: str, used_bytes: int, wanted_bytes: int) -> int:
        """See `Allotment`."""
        return wanted_bytes

    def excess(self, tenant: str, used_bytes: int) -> int:
        """See `Allotment`."""
        return 0

    def spare(self, tenant: str, used_bytes: int) -> int:
        """See `Allotment`."""
        return used_bytes

    def guaranteed(self, tenant: str) -> int:
        """See `Allotment`."""
        return 0

    def entitled(self, tenant: str, used_bytes: int, wanted_bytes: int) -> bool:
        """See `Allotment`."""
        return False

    def losers(self, asker: str, used_bytes: Mapping[str, int], wanted_bytes: int) -> Sequence[tuple[str, int]]:
        """See `Allotment`."""
        return ()


class LowerTier(Protocol):
    """A tier below DRAM. Each call takes a batch and awaits once; results, not exceptions."""

    barred: set[str]
    """Tenants of whom nothing may be written at present: their blocks are to be encrypted, and the key is not there."""
    stuck: bool
    """After `close`: a thread has not come back from its device and may still be at memory that it was given."""

    async def open(self) -> None:
        """Make ready; raises DeviceError or ConfigError where that is impossible."""
        ...

    async def close(self) -> None:
        """Finish what is under way, make everything durable, let go of files and threads."""
        ...

    async def find(self, tenant: str, digest: bytes, hashes: Sequence[bytes], *, prefix: bool) -> list[Record | None]:
        """Index entries, one per hash; with `prefix` up to the first miss. Their extents are pinned until `unpin`."""
        ...

    def unpin(self, records: Sequence[Record]) -> None:
        """Give back the pins that `find` took; every record found is unpinned exactly once."""
        ...

    async def load(self, loads: Sequence[Load]) -> list[bool]:
        """Read blocks straight to their addresses and check their content hash.

        False: not readable or not what was written; such a record is dropped and counted. Cancelling the caller does
        not stop the copy: await returns only when no thread writes to any address any more.
        """
        ...

    async def store(self, tenant: str, stores: Sequence[Store]) -> list[bool]:
        """Write blocks, make them durable and findable. False: not stored (no room, device error).

        Returns only when no thread reads from any address any more. What is there already is not written again.
        """
        ...

    async def delete(self, tenant: str, digest: bytes, hashes: Sequence[bytes]) -> int:
        """Remove index entries; returns how many there were."""
        ...

    async def forget(self, digest: bytes, entries: Sequence[tuple[bytes, Record]]) -> tuple[int, int]:
        """Remove entries (hash, record), if unchanged, that no reader can reach any more: blocks and bytes.

        An index that is made anew may have them again. Those of a path that is off are passed over; DeviceError.
        """
        ...

    async def wipe(self, tenants: Collection[str], told: Told, *, erased: Collection[str] = ()) -> Wiped:
        """Make zeros of every byte that no record of these tenants keeps alive, also where it lies in free room.

        `erased`: those whose data keys were destroyed. What never held other than encrypted bytes is left then.
        What is alive, and all that other tenants stored, stays as it is. Goes on with the rest where a part fails.
        """
        ...

    async def list_records(
        self, digest: bytes | None, cursor: bytes, limit: int
    ) -> tuple[list[tuple[bytes, bytes, Record]], bytes]:
        """A page of the index as (digest, hash, record), and the cursor of the next one (empty: no more)."""
        ...

    async def evicted_s(self, digest: bytes, hash_: bytes) -> float | None:
        """When a block was evicted last, by a record that outlasts the daemon; None: never, or too long ago."""
        ...

    async def remember_namespace(self, tenant: str, digest: bytes, encoding: bytes, fields: dict[str, str]) -> None:
        """Keep a namespace across restarts."""
        ...

    async def forget_namespaces(self, tenant: str) -> None:
        """Keep none of a tenant's any longer: nothing of it is stored. Raises DeviceError where a path cannot now."""
        ...

    def limit_ages(self, max_age_of: Callable[[str], float], now_s: Callable[[], float]) -> None:
        """How old a tenant's blocks may become, in s (0: no limit), and by which clock. What has ended is not found."""
        ...

    async def remember_epochs(self) -> None:
        """Write down which epochs are wanted (`Epochs.wanted`), durably. Raises DeviceError where that is in doubt."""
        ...

    def namespaces(self) -> list[Namespace]:
        """Those that were kept."""
        ...

    def usage(self) -> Usage:
        """The account."""
        ...

    def tenant_usage(self) -> Mapping[str, tuple[int, int]]:
        """Per tenant: bytes used and blocks."""
        ...

    async def trim(self, tenant: str) -> bool:
        """Drop some of the oldest blocks of a tenant that is over its limit; whether it did."""
        ...

    @property
    def health(self) -> Health:
        """What it can do now."""
        ...

    def properties(self) -> dict[str, str]:
        """For status: paths, direct I/O, what it runs without."""
        ...

    def paths(self) -> Sequence[PathStatus]:
        """For status: each path, if it has any."""
        ...

    def wear(self) -> Sequence[PathWear]:
        """What was written to each path that was open once."""
        ...

    def write_budget(self) -> tuple[int, int] | None:
        """Bytes left today of the paths that take blocks (negative: overdrawn), and of a whole day; None: no limit."""
        ...

    def counters(self) -> dict[str, int]:
        """For status and metrics: monotonic counts."""
        ...
