"""Client of kvstored, the per-node store of KV cache blocks.

    client = Client()
    namespace = client.namespace(NamespaceSpec(model="m", block_tokens=64))
    hashes = namespace.chain(token_ids)
    found = client.get_into(namespace, hashes, buffer)      # leading blocks delivered, 0: a miss
    client.put(namespace, hashes[found:], more, parent=hashes[found - 1] if found else b"")

`AsyncClient` has the same verbs as coroutines. `spec_from_hf_config` makes the spec of a Hugging Face model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstored_proto.v1.kvstored_pb2 import NamespaceSpec

from kvstored_client.blocks import Blocks
from kvstored_client.buffers import Addresses
from kvstored_client.client import Client
from kvstored_client.errors import KVStoredClientError, Refused, Timeout, Unavailable
from kvstored_client.handles import Prefetch, StagedPut
from kvstored_client.namespace import Namespace
from kvstored_client.results import ClientStats, HintResult, LookupResult, Outcome, PrefetchStatus, PutResult
from kvstored_client.tls import Tls

if TYPE_CHECKING:
    from kvstored_client.aio import AsyncClient
    from kvstored_client.identity import adapter_identity, spec_from_hf_config, weights_fingerprint
    from kvstored_client.paged import PagedKV

__all__ = [
    "Addresses",
    "AsyncClient",
    "Blocks",
    "Client",
    "ClientStats",
    "HintResult",
    "KVStoredClientError",
    "LookupResult",
    "Namespace",
    "NamespaceSpec",
    "Outcome",
    "PagedKV",
    "Prefetch",
    "PrefetchStatus",
    "PutResult",
    "Refused",
    "StagedPut",
    "Timeout",
    "Tls",
    "Unavailable",
    "adapter_identity",
    "spec_from_hf_config",
    "weights_fingerprint",
]


def __getattr__(name: str) -> Any:
    if name == "AsyncClient":  # asyncio only for those who use it
        from kvstored_client.aio import AsyncClient

        return AsyncClient
    if name == "PagedKV":  # numpy only for those who use it
        from kvstored_client.paged import PagedKV

        return PagedKV
    if name in ("adapter_identity", "spec_from_hf_config", "weights_fingerprint"):
        from kvstored_client import identity

        return getattr(identity, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
