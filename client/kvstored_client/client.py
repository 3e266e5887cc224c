"""The synchronous client. Safe in threads; refuses use after a fork."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from google.protobuf.message import Message
from kvstored_proto.v1 import kvstored_pb2 as pb
from kvstored_proto.v1.kvstored_pb2 import NamespaceSpec

from kvstored_client import prefetching, requests, verbs
from kvstored_client.blocks import Blocks
from kvstored_client.core import Core, settings_of
from kvstored_client.driver import ThreadDriver
from kvstored_client.errors import KVStoredClientError
from kvstored_client.handles import Prefetch, StagedPut
from kvstored_client.hinting import Hints
from kvstored_client.namespace import Namespace
from kvstored_client.results import ClientStats, HintResult, LookupResult, Outcome, PrefetchStatus, PutResult
from kvstored_client.terms import Asking, Durability, PutHints, Terms
from kvstored_client.tls import Tls

if TYPE_CHECKING:
    from kvstored_client.paged import PagedKV
    from kvstored_client.transfers import PagedTransfers

R = TypeVar("R", bound=Message)


class Client:
    """A connection to the daemon of this node that is there when the daemon is.

    The data verbs never raise because of the daemon: absent, restarting, slow or full, it
    answers a miss within `timeout_s` (plus a `wait_s` that was asked for), counted in `stats`.
    Wrong arguments raise TypeError or ValueError, use after a fork or after `close` RuntimeError.
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
        """Try to connect; going on without where nobody answers.

        Args:
            address: `unix:PATH` of the session socket; default: KVSTORED_ADDRESS, else
                `unix:/run/kvstored/session.sock`. `grpc:HOST:PORT` (TLS) or `grpc:unix:PATH` is gRPC, without shared
                memory: `get_into`, `put` and paged transfers carry blocks inside of messages.
            token: decides the tenant where the daemon knows it by token.
            token_file: a file with the token, read at each connect; default, without a token: KVSTORED_TOKEN_FILE.
            tls: of `grpc:HOST:PORT`: whom to trust, and the client's own certificate; see `Tls`.
            name: shown in the daemon's status.
            staging_bytes: memory for puts under way; 0 for a client that only reads.
            timeout_s: the longest that a call waits for an answer.
            connect_timeout_s: the longest that opening a session may take.
            create_group: make a group that other sessions of this engine can join (`group_id`).
            join_group: join the group with this id.

        Raises ValueError for an address of another kind, or `tls` where there is none.
        """
        given = (name, staging_bytes, timeout_s, connect_timeout_s, create_group, join_group)
        self._core = Core(settings_of(address, token, token_file, tls, *given))
        self._driver = ThreadDriver(self._core)
        try:
            self._driver.connect()
        except KVStoredClientError:
            pass  # logged; the next call tries again

    # ---- state ----

    @property
    def connected(self) -> bool:
        """Whether a session is open at this moment."""
        return self._core.is_connected()

    @property
    def connect_error(self) -> KVStoredClientError | None:
        """Why the last attempt to open a session failed; None after one that did not."""
        return self._core.connect_error

    @property
    def stats(self) -> ClientStats:
        """Counts since the start."""
        return self._core.snapshot()

    @property
    def group_id(self) -> bytes:
        """The group that this session made or joined; hand it to the engine's other processes."""
        return self._core.group_id

    @property
    def tenant(self) -> str:
        """Whose session the daemon says this is; empty before the first connection."""
        return self._core.tenant()

    @property
    def boot_id(self) -> int:
        """Names the daemon's present life; another number after it restarted, 0 before the first connection."""
        return self._core.boot_id

    def close(self) -> None:
        """End the session and all that it holds. Safe to call twice, and in a forked child.

        What was begun before (a load, a store, a staged put, a prefetch) is answered as where the daemon has gone.
        """
        self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if "_driver" in self.__dict__:  # not where the constructor raised
            self.close()

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
        """A handle on a namespace. The daemon is asked when it is first needed, and again after each reconnect.

        `durability`, `ttl_s` and `sliding`: of puts by this handle that do not say; see `put`.
        `prefill_tokens_per_s` and `prefetch`: of lookups likewise.
        """
        terms = Terms(durability, ttl_s, sliding)
        asking = Asking(prefill_tokens_per_s, prefetch)
        return Namespace(spec, self._core.tenant, self._open_namespace, terms, asking)

    def lookup(
        self,
        namespaces: Namespace | Sequence[Namespace],
        hashes: Sequence[bytes],
        *,
        prefill_tokens_per_s: float | None = None,
        prefetch: bool | None = None,
        prefetch_deadline_s: float = 0.0,
    ) -> LookupResult:
        """How many leading blocks are stored, and where; of several namespaces, what all of them have.

        `prefill_tokens_per_s`: how fast the engine would compute the blocks itself. The result then says how long
        loading them takes, and how much of them is loaded no later than computed. `prefetch`: what is found on NVMe
        starts coming up in the same call, and a get joins it; after `prefetch_deadline_s` (0: no deadline) that is
        not worth doing any more. None: as the namespace has it.
        """
        asked = (prefill_tokens_per_s, prefetch, prefetch_deadline_s)
        looking = requests.lookup(self._core, namespaces, hashes, *asked)
        return self._driver.data(looking, LookupResult())

    def contains(self, namespace: Namespace, hashes: Sequence[bytes]) -> list[Outcome]:
        """For each block by itself: HIT, PENDING or MISS."""
        return self._driver.data(requests.contains(self._core, namespace, hashes), [Outcome.MISS] * len(hashes))

    def get(self, namespaces: Namespace | Sequence[Namespace], hashes: Sequence[bytes], wait_s: float = 0.0) -> Blocks:
        """Hold the leading blocks, to be read where they lie: `with client.get(...) as blocks`.

        `wait_s`: how long to wait for blocks that are being written or lie on NVMe.
        """
        return self._driver.data(requests.get(self._core, namespaces, hashes, wait_s), Blocks(None, [], Outcome.MISS))

    def attach(self, lease_id: int) -> Blocks:
        """Use and later release blocks that another session of the group took (`Blocks.hand_over`)."""
        return self._driver.data(requests.attach(self._core, lease_id), Blocks(None, [], Outcome.MISS))

    def get_into(
        self,
        namespaces: Namespace | Sequence[Namespace],
        hashes: Sequence[bytes],
        buffers: Any,
        wait_s: float = 0.0,
        *,
        block_bytes: int = 0,
    ) -> int:
        """Copy the leading blocks into the caller's memory; returns how many were delivered, 0 for a miss.

        Args:
            namespaces: one, or a list; then `buffers` is a list with one entry per namespace.
            hashes: the blocks, in chain order.
            buffers: one writable buffer per block, or one contiguous buffer, `Addresses`, or `PagedKV.at`.
            wait_s: how long to wait for blocks that are being written or lie on NVMe.
            block_bytes: size of a block in a contiguous buffer; 0: its size divided by the blocks.

        Buffers past the number delivered may have been written to. Raises ValueError where a
        buffer and its block differ in size.
        """
        return self._driver.data(requests.get_into(self._core, namespaces, hashes, buffers, wait_s, block_bytes), 0)

    def put(
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
        """Store consecutive blocks of a chain; readable when this returns.

        Args:
            namespace: where.
            hashes: the blocks, parents first.
            buffers: one buffer per block (read-only is fine), or one contiguous buffer, `Addresses`, or `PagedKV.at`.
            parent: hash of the block before the first; empty where the sequence starts here.
            wait_s: how long to wait and try again where the daemon has no room at the moment.
            block_bytes: size of a block in a contiguous buffer; 0: its size divided by the blocks.
            durability: "memory": done when the blocks are in DRAM. "nvme": when they are on NVMe too, synced, and
                will be there after the daemon or the machine died, unless evicted; the call may take up to 10 s
                more on a slow drive. Blocks for which it cannot be had are refused as NOT_DURABLE, and a daemon
                without NVMe refuses all. None: as the namespace has it.
            ttl_s: the blocks are kept for so long and never served after it; `sliding`: so long after their last
                get or touch (whole seconds). What is stored already keeps what it has. 0: as the namespace has it.
            hint: as {"priority": 2}: see the verb `hint`. What is in DRAM already is meant too.
        """
        terms = Terms(durability, ttl_s, sliding, hint)
        return self._driver.run(
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
    ) -> StagedPut:
        """Get memory to write blocks to: `with client.stage(...) as staged`. Arguments as of `put`, from then on."""
        terms = Terms(durability, ttl_s, sliding, hint)
        reserving = requests.stage(self._core, namespace, hashes, block_bytes, parent, wait_s, terms)
        return StagedPut(self._driver, self._driver.data(reserving, (None, [])), len(hashes))

    def register(self, kv: PagedKV) -> PagedTransfers:
        """Transfers between the daemon and an engine's paged KV memory: whole prefixes in one call. Needs numpy."""
        from kvstored_client.transfers import PagedTransfers

        return PagedTransfers(self._driver, kv)

    def prefetch(
        self,
        namespaces: Namespace | Sequence[Namespace],
        hashes: Sequence[bytes],
        priority: int = 0,
        deadline_s: float = 0.0,
    ) -> Prefetch:
        """Ask for blocks to be brought from NVMe to DRAM; returns at once.

        Higher `priority` goes first. After `deadline_s` it is not worth doing any more; 0: no deadline.
        """
        starting = requests.prefetch(self._core, namespaces, hashes, priority, deadline_s)
        return Prefetch(self._driver, self._driver.data(starting, prefetching.Started()))

    def cancel_prefetch(self, prefetch_id: int) -> PrefetchStatus:
        """Drop what a lookup started (`LookupResult.prefetch_id`); answered when no copy of it runs any more."""
        cancelling = requests.cancel_lookup(self._core, prefetch_id)
        return self._driver.data(cancelling, PrefetchStatus())

    def touch(self, namespace: Namespace, hashes: Sequence[bytes]) -> int:
        """Mark blocks as used; returns how many are stored."""
        return self._driver.data(requests.touch(self._core, namespace, hashes), 0)

    def delete(self, namespace: Namespace, hashes: Sequence[bytes]) -> int:
        """Remove blocks; returns how many there were."""
        return self._driver.data(requests.delete(self._core, namespace, hashes), 0)

    def hint(self, namespace: Namespace, hashes: Sequence[bytes], **said: Unpack[Hints]) -> HintResult:
        """Say what the daemon cannot know of consecutive blocks of a chain that are in DRAM; it may have no effect.

        Args:
            namespace, hashes: Which; pins and priorities hold for what they hang on as well.
            said: `priority` (-3 to 3: counts as so many uses), `ttl_s` (blocks that end do so no earlier),
                `soft_pin_s` (goes last), `hard_pin_s` (is not evicted, within the tenant's `hard_pin_bytes`),
                `continues` (the chain will be asked for again soon), `final` (it will not: name only what no other
                chain hangs on), `unpin`. All end with the block's eviction and with the daemon.
        """
        return self._driver.data(requests.hint(self._core, namespace, hashes, said), HintResult())

    def status(self) -> pb.StatusReply | None:
        """The daemon's status, as far as this caller may see it; None where it does not answer."""
        asking = verbs.ask(self._core, pb.OPERATION_STATUS, pb.StatusRequest(), pb.StatusReply, None)
        return self._driver.data(asking, None)

    def call(self, operation: int, request: Message, reply_type: type[R], timeout_s: float | None = None) -> R:
        """Any operation of the protocol, for tools. Raises KVStoredClientError."""
        return self._driver.run(verbs.ask(self._core, operation, request, reply_type, timeout_s))

    def _open_namespace(self, namespace: Namespace) -> None:
        self._driver.data(verbs.open_namespace(self._core, namespace), None)
