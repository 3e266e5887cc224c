"""Sessions, groups, leases and reservations: who holds what.

Plain state without I/O. A session is one client process; what it holds ends with it. A lease
belongs to the session's group, so that a worker can use and release what its scheduler took;
it ends with the group's last member at the latest. The store does the consequences.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

import msgspec

from kvstored.catalog.catalog import Entry, Space
from kvstored.catalog.known import KNOWN_BLOCKS_MAX
from kvstored.errors import InvalidArgument, LimitExceeded, NotFound, PermissionDenied, SessionEnded
from kvstored.keys import split_hashes
from kvstored.lifetime import Lifetime
from kvstored.tiers.session_page import SessionPage
from kvstored.tiers.staging import Staging

ID_BYTES: Final = 16
ADMIN_SESSIONS: Final = 8  # beyond `max_sessions`, or who fills that could not be stopped by anybody
BOOT_SHIFT: Final = 40  # so many bits number the leases of one boot


class Caller(msgspec.Struct, frozen=True):
    """Who speaks, as far as the transport and the configuration know."""

    tenant: str
    role: str  # tenant, reader or admin
    transport: str  # session or grpc
    client: str = ""
    pid: int = 0
    uid: int = -1
    isolation: str = "ok"  # none: shares the daemon's uid or is root
    credential: str = ""  # what it showed, by name: never the secret itself


class Lease(msgspec.Struct, eq=False):
    """Blocks held for a group, in chain order."""

    lease_id: int
    space: Space
    entries: list[Entry]
    slots: array[int]  # theirs; they do not move while held
    runs: list[tuple[int, int]]  # first slot and number of those that lie side by side
    size_bytes: int
    place: int = 0  # in the lease ledger; 0: it is not noted there


class Reservation(msgspec.Struct, eq=False):
    """Blocks being written by a session, by their index in its reserve call.

    `open` are still to be committed or aborted. What is committed stays held in `done` until
    all is, so that a chain enters the eviction order at once and tail first.
    """

    reservation_id: int
    space: Space
    parent: bytes
    open: dict[int, Entry]
    done: dict[int, Entry]
    durable: bool = False  # a commit is answered when its blocks are on NVMe
    copying: int = 0
    # To be done once, when it is finished and before the last commit is answered.
    at_end: Callable[[], Awaitable[object]] | None = None

    @property
    def finished(self) -> bool:
        """Nothing is left to commit and no commit is under way."""
        return not self.open and not self.copying


class Group:
    """The sessions of one engine; the home of their leases."""

    def __init__(self, tenant: str, group_id: bytes) -> None:
        self.tenant = tenant
        self.group_id = group_id
        self.key = group_id or secrets.token_bytes(ID_BYTES)  # in the lease ledger
        self.members: dict[Session, None] = {}  # no set: they are parted with in the order in which they came
        self.leases: dict[int, Lease] = {}
        self.leased_bytes = 0
        self.ending_leases = 0  # in `leases` no more, but still holding their blocks


class Session:
    """One client process and all that it holds."""

    def __init__(self, session_id: bytes, caller: Caller, group: Group, now: float) -> None:
        self.session_id = session_id
        self.caller = caller
        self.group = group
        self.opened_s = now
        self.last_seen_s = now
        self.ended = False
        self.spaces: dict[int, Space] = {}
        self.durable: set[int] = set()  # handles of spaces whose puts are to be durable
        self.lifetimes: dict[int, Lifetime] = {}  # of puts by these handles that do not say
        self.reservations: dict[int, Reservation] = {}
        self.prefetches: set[int] = set()
        # By its last look-up or get, packed and not.
        self._asked: tuple[bytes, tuple[bytes, ...]] = (b"", ())
        self.staging: Staging | None = None
        self.page: SessionPage | None = None
        self.client_id = b""  # the same in all sessions of one client; empty: it is an older one
        self.place = 0  # in the lease ledger; 0: what it leases is not noted there
        self.reserved_bytes = 0
        self.exposed: set[int] = set()  # segments whose descriptor it has
        self.wiping = False  # its staging is being made zeros: nothing may be put into it
        self.wipes = 0  # how often it was
        self.on_settled: Callable[[], None] | None = None  # it has ended; called when no reservation of it is left
        # Set by a transport that answers a call in the turn in which it is served: takes what is to be done as soon as
        # the answer has gone, before anything else runs. None: nothing waits for that.
        self.after_answer: Callable[[Callable[[], None]], None] | None = None
        self.silent = False  # was asked to let go of one and did not answer in time

    @property
    def name(self) -> str:
        """Short, for people: no secret, as the whole id is one for gRPC clients."""
        return self.session_id.hex()[:8]

    def check_may_write(self) -> None:
        """Raises PermissionDenied for a caller whose role only reads."""
        if self.caller.role == "reader":
            raise PermissionDenied("this needs the role tenant; the caller's is reader: it may not write")

    def check_admin(self) -> None:
        """Raises PermissionDenied for a caller that is not an admin."""
        if self.caller.role != "admin":
            raise PermissionDenied(f"this needs the role admin; the caller's is {self.caller.role}")

    def check_open(self) -> None:
        """Raises SessionEnded where it has.

        A call may be begun, and served a turn later: what it then took for a session that has ended, nobody would
        ever give back.
        """
        if self.ended:
            raise SessionEnded("the session has ended: open a new one")

    def space_of(self, namespace_id: int) -> Space:
        """The space behind a namespace handle. Raises NotFound, or SessionEnded."""
        self.check_open()
        space = self.spaces.get(namespace_id)
        if space is None:
            raise NotFound(f"namespace {namespace_id} is not open in this session: open it first")
        return space

    def spaces_of(self, namespace_ids: Sequence[int]) -> list[Space]:
        """The spaces behind several handles; raises InvalidArgument for none or too many."""
        if not 0 < len(namespace_ids) <= 64:
            raise InvalidArgument(f"{len(namespace_ids)} namespaces in one call: 1 to 64 are allowed")
        return [self.space_of(i) for i in namespace_ids]

    def hashes_asked(self, packed: bytes, hash_bytes: int) -> tuple[bytes, ...]:
        """See `split_hashes`; where a call asks for the same as the one before, the very tuple of that one."""
        before, hashes = self._asked
        if not hashes or packed != before or len(hashes[0]) != hash_bytes:
            hashes = tuple(split_hashes(packed, hash_bytes))
            self._asked = (packed, hashes) if len(hashes) <= KNOWN_BLOCKS_MAX else (b"", ())
        return hashes

    def reservation(self, reservation_id: int) -> Reservation:
        """One of its reservations; raises NotFound."""
        found = self.reservations.get(reservation_id)
        if found is None:
            raise NotFound(f"reservation {reservation_id} is not open in this session")
        return found

    def lease(self, lease_id: int) -> Lease:
        """A lease of its group; raises NotFound."""
        found = self.group.leases.get(lease_id)
        if found is None:
            raise NotFound(f"lease {lease_id} is not held by this session's group")
        return found

    @property
    def staging_bytes(self) -> int:
        """Size of its staging ring."""
        return self.staging.size_bytes if self.staging else 0


class Sessions:
    """All sessions and groups of the daemon."""

    def __init__(self, max_sessions: int, max_namespaces: int) -> None:
        self._max_sessions = max_sessions
        self._max_namespaces = max_namespaces
        self._by_id: dict[bytes, Session] = {}
        self._groups: dict[bytes, Group] = {}
        self._first_id = 1
        self._next_id: dict[str, int] = {}  # by tenant: numbers shared by all would tell how busy the others are
        # Set by the store: whether a group of this tenant and id is there from before a restart.
        self.known_before: Callable[[str, bytes], bool] = lambda tenant, group_id: False

    def begin_ids(self, boot: int) -> None:
        """Number from above what was given out in earlier boots on the same memory."""
        assert not self._next_id, "before the first"
        self._first_id = (boot << BOOT_SHIFT) + 1

    def new_id(self, tenant: str) -> int:
        """A number for a lease, reservation or prefetch; unique for its tenant in this boot, and on this memory."""
        number = self._next_id.get(tenant, self._first_id)
        self._next_id[tenant] = number + 1
        return number

    def open(self, caller: Caller, now: float, *, create_group: bool, join_group: bytes) -> Session:
        """A new session; raises LimitExceeded, or NotFound where the tenant has no such group."""
        if len(self._by_id) >= self._max_sessions + (ADMIN_SESSIONS if caller.role == "admin" else 0):
            raise LimitExceeded(f"{self._max_sessions} sessions are open: close some or raise server.max_sessions")
        group = self._group(caller.tenant, create_group, join_group)
        session = Session(secrets.token_bytes(ID_BYTES), caller, group, now)
        group.members[session] = None
        self._by_id[session.session_id] = session
        return session

    def _group(self, tenant: str, create: bool, join: bytes) -> Group:
        if not join:
            group = Group(tenant, secrets.token_bytes(ID_BYTES) if create else b"")
            if create:
                self._groups[group.group_id] = group
            return group
        if create:
            raise InvalidArgument("create_group and join_group exclude each other")
        found = self._groups.get(join)
        if found is None and self.known_before(tenant, join):
            found = self._groups[join] = Group(tenant, join)
        if found is None or found.tenant != tenant:  # one answer for both: it must not tell which
            raise NotFound("no such group: its first session makes it with create_group and hands out the id")
        return found

    def close(self, session: Session) -> list[Lease]:
        """Forget a session; returns the leases that end with its group (none while others are in it)."""
        del self._by_id[session.session_id]
        session.ended = True
        group = session.group
        group.members.pop(session, None)
        if group.members:
            return []
        self._groups.pop(group.group_id, None)
        leases = list(group.leases.values())
        group.leases.clear()
        return leases

    def get(self, session_id: bytes) -> Session | None:
        """By the id that only its client knows."""
        return self._by_id.get(session_id)

    def add_space(
        self, session: Session, space: Space, *, durable: bool = False, lifetime: Lifetime | None = None
    ) -> int:
        """A handle for a space; the same for the same space and durability. Raises LimitExceeded."""
        for handle, known in session.spaces.items():
            same = durable == (handle in session.durable) and lifetime == session.lifetimes.get(handle)
            if known is space and same:
                return handle
        if len(session.spaces) >= self._max_namespaces:
            raise LimitExceeded(f"{self._max_namespaces} namespaces are open in this session")
        handle = len(session.spaces) + 1
        session.spaces[handle] = space
        if durable:
            session.durable.add(handle)
        if lifetime is not None:
            session.lifetimes[handle] = lifetime
        return handle

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)
