"""What a store of paged memory is to store, whoever copies."""

from __future__ import annotations

from dataclasses import dataclass

from kvstored_proto.layout import Indices

from kvstored_client.core import Core
from kvstored_client.deadline import NEVER, Deadline
from kvstored_client.keys import Packed
from kvstored_client.namespace import Namespace
from kvstored_client.paged import PagedKV
from kvstored_client.putting import Put
from kvstored_client.terms import Terms


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks of an engine, in chain order."""

    namespace: Namespace
    hashes: Packed
    ids: Indices
    parent: bytes
    terms: Terms
    deadline: Deadline = NEVER

    @property
    def durable(self) -> bool:
        """Whether it is answered when it is on NVMe."""
        return self.terms.want_nvme(self.namespace.terms)

    def put(self, core: Core, kv: PagedKV, wait_s: float) -> Put:
        """The same as a put, which the client copies. Raises TypeError where it cannot."""
        source = kv.at(self.ids).place(self.hashes.length, writable=False)
        return Put(core, self.namespace, self.hashes, source, self.parent, wait_s, self.terms, self.deadline)
