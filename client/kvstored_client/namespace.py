"""A namespace as the client sees it: a spec, and what the daemon made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvstored_proto import namespace as canonical
from kvstored_proto.v1.kvstored_pb2 import NamespaceSpec, OpenNamespaceReply

from kvstored_client import keys
from kvstored_client.terms import Asking, Terms

_UNOPENED = OpenNamespaceReply()


class Namespace:
    """Handle on a namespace: everything that must be equal for blocks to be interchangeable.

    Opened at its first use and again after each reconnect, both by itself.
    """

    def __init__(
        self,
        spec: NamespaceSpec,
        tenant: Callable[[], str] = lambda: "",
        opener: Callable[[Namespace], None] | None = None,
        terms: Terms = Terms("memory"),  # noqa: B008 - it is immutable
        asking: Asking = Asking(),  # noqa: B008 - likewise
    ) -> None:
        """`tenant` tells whose session it is, once one was open ("": never).

        `opener` tries to open it where a property needs that, and gives up without an exception.
        `terms` are those of puts which do not say, `asking` likewise of lookups; neither is part of the digest.
        """
        self.asking = asking.check(spec.block_tokens)
        self.terms = terms.check()
        self.spec = NamespaceSpec()
        self.spec.CopyFrom(spec)  # the caller may go on changing theirs
        self.key = (self.spec.SerializeToString(deterministic=True), terms)
        self.reply = _UNOPENED
        self._tenant = tenant
        self._opener = opener

    @property
    def digest(self) -> bytes:
        """16 bytes that stand for it in every key; empty while the daemon was never reached."""
        return self._opened().digest

    @property
    def chain_seed(self) -> bytes:
        """16 bytes that start its hash chains, equal for all shards of one model; empty while no session was open."""
        seed, tenant = self._opened().chain_seed, self._tenant()
        return seed or (canonical.chain_seed(tenant, self.spec) if tenant else b"")

    def chain(
        self,
        token_ids: Iterable[int],
        block_tokens: int | None = None,
        parent: bytes = b"",
        extra: bytes | Sequence[bytes] = b"",
    ) -> list[bytes]:
        """Block hashes of a token sequence, 32 bytes each, full blocks only; see `keys.chain`.

        `block_tokens` defaults to the spec's. While no session was ever open there is no seed:
        hashes made then are as long and in every verb a miss, also after the daemon is there.
        """
        seed = self.chain_seed
        hashes = keys.chain(seed, token_ids, block_tokens or self.spec.block_tokens, parent, extra)
        return hashes if seed else [keys.UNSEEDED + each[len(keys.UNSEEDED) :] for each in hashes]

    def _opened(self) -> OpenNamespaceReply:
        if self.reply is _UNOPENED and self._opener is not None:
            self._opener(self)
        return self.reply

    def __repr__(self) -> str:
        return f"Namespace(model={self.spec.model!r}, digest={self.reply.digest.hex()})"


def as_list(namespaces: Namespace | Sequence[Namespace]) -> list[Namespace]:
    """One or several, as a list. Raises TypeError for something else, ValueError for none."""
    several = [namespaces] if isinstance(namespaces, Namespace) else list(namespaces)
    if not several:
        raise ValueError("no namespace given")
    for each in several:
        if not isinstance(each, Namespace):
            raise TypeError(f"a {type(each).__name__} is not a namespace: make one with client.namespace(spec)")
    return several
