"""What of the DRAM tier is kept beyond the process: under which names, and in which order.

A segment is noted in the registry, then its memory and its records are handed to the keeper, and
only then it is used; it is dropped there before its memory serves anybody else. All calls block
for round trips: for threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Final

from kvstored.device.keeper import Keeper
from kvstored.keys import Namespace
from kvstored.tiers.lease_ledger import LeaseLedger
from kvstored.tiers.registry import Registry
from kvstored.tiers.segment import Segment

REGISTRY: Final = "registry"
LEDGER: Final = "leases"
MEMORY: Final = "seg"
RECORDS: Final = "slots"


def name_of(kind: str, number: int) -> str:
    """The name under which a descriptor is kept."""
    return f"{kind}-{number}"


def parse_name(name: str) -> tuple[str, int]:
    """Kind and number of a name; an empty kind for one that is none of ours."""
    kind, _, number = name.rpartition("-")
    known = kind in (REGISTRY, LEDGER, MEMORY, RECORDS) and number.isdecimal()
    return (kind, int(number)) if known else ("", 0)


class Kept:
    """The registry and the ledger, and who keeps them; `active` is False where nobody keeps anything."""

    def __init__(
        self, keeper: Keeper, registry: Registry | None, number: int, ledger: LeaseLedger | None, last_segment_id: int
    ) -> None:
        """What was taken over, or None to begin anew; `number` stands in the registry's name."""
        self.keeper = keeper
        self.unkept_segments = 0
        self.boot = 0
        self.active = True
        self.ledger = ledger
        self._lock = threading.Lock()
        self._number = number
        self._registry = registry or Registry()
        fresh = registry is None
        self._registry.last_segment_id = max(self._registry.last_segment_id, last_segment_id)
        if fresh and not self._keep_registry(self._registry):
            self.active = False
            self._registry.close()
        elif self._note(lambda log: log.note_boot(log.boot + 1)):
            self.boot = self._registry.boot
        if self.active and self.ledger is None:
            self._begin_ledger()

    def _keep_registry(self, registry: Registry) -> bool:
        if not self.keeper.keep(name_of(REGISTRY, self._number + 1), registry.fd):
            return False
        self._number += 1
        return True

    def _begin_ledger(self) -> None:
        ledger = LeaseLedger()
        if self.keeper.keep(name_of(LEDGER, self.boot), ledger.fd):
            self.ledger = ledger
        else:
            ledger.close()

    @property
    def namespaces(self) -> list[Namespace]:
        """Those that were noted."""
        return list(self._registry.namespaces.values())

    @property
    def segment_ids(self) -> list[int]:
        """The segments that are noted."""
        return list(self._registry.segments)

    @property
    def last_segment_id(self) -> int:
        """The highest id that any segment had."""
        return self._registry.last_segment_id

    def add(self, segments: Iterable[Segment]) -> None:
        """Have new segments kept, before anything is stored in them."""
        for segment in segments if self.active else ():
            number = segment.segment_id
            kept = (
                self._note(lambda log: log.note_segment(segment.segment_id, segment.pages))  # noqa: B023 - called here
                and self.keeper.keep(name_of(MEMORY, number), segment.memory_fd)
                and self.keeper.keep(name_of(RECORDS, number), segment.records.fd)
            )
            if not kept:
                self.unkept_segments += 1
                self.remove(number)

    def remove(self, segment_id: int) -> None:
        """Have a segment kept no longer."""
        if self.active:
            self.keeper.drop(name_of(MEMORY, segment_id))
            self.keeper.drop(name_of(RECORDS, segment_id))
            self._note(lambda log: log.note_gone(segment_id))

    def knows(self, namespaces: Iterable[Namespace]) -> bool:
        """Whether there is nothing to note."""
        return not self.active or all(namespace.digest in self._registry.namespaces for namespace in namespaces)

    def remember(self, namespaces: Iterable[Namespace]) -> None:
        """Note namespaces, before blocks of them are stored."""
        for namespace in namespaces if self.active else ():
            self._note(lambda log: log.note_namespace(namespace), len(namespace.encoding))  # noqa: B023 - called here

    def forget_namespaces(self, tenant: str) -> None:
        """Note none of a tenant's any longer, by a registry without them; where there is no room for it they stay."""
        with self._lock:
            gone = [n.digest for n in self._registry.namespaces.values() if n.tenant == tenant]
            if gone and self.active:
                for digest in gone:
                    del self._registry.namespaces[digest]
                self._replace(self._registry.compacted(0))

    @property
    def epochs(self) -> bytes:
        """Those that were noted last, packed; empty: none were."""
        return self._registry.epochs if self.active else b""

    def remember_epochs(self, packed: bytes) -> bool:
        """Note which epochs count; False: what is kept does not know."""
        return not self.active or self._note(lambda log: log.note_epochs(packed), len(packed))

    def _note(self, write: Callable[[Registry], bool], more_bytes: int = 0) -> bool:
        """Append to the registry; where it is full, to a larger one. False: that one would not be kept."""
        with self._lock:
            if write(self._registry):
                return True
            larger = self._registry.compacted(4 * more_bytes)
            if not write(larger):
                larger.close()
                return False
            return self._replace(larger)

    def _replace(self, registry: Registry) -> bool:
        """Have another registry kept in place of this one; False, and it is closed, where it would not be kept."""
        old = name_of(REGISTRY, self._number)
        if not self._keep_registry(registry):
            registry.close()
            return False
        self.keeper.drop(old)
        self._registry.close()
        self._registry = registry
        return True

    def close(self) -> None:
        """Unmap; what is kept stays so."""
        self._registry.close()
        if self.ledger is not None:
            self.ledger.close()
