"""What the two clients share: settings, the current session, the breaker, the counters."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import operator
import os
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvstored_proto import frames, page, progress
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored_client.breaker import Breaker
from kvstored_client.connection import Connection
from kvstored_client.dialing import check_tls, target_of
from kvstored_client.effects import Verb, call
from kvstored_client.errors import KVStoredClientError, Refused, Unavailable, failure_of
from kvstored_client.holds import Left
from kvstored_client.results import ClientStats
from kvstored_client.slots import KnownSlots
from kvstored_client.tls import Tls
from kvstored_client.token_file import read_token_file, token_path

VERSION: Final = "0.1.0"
FEATURES: Final = (
    *("durability", "ttl", "hints", "gpu", "gpu_descriptors", "transfer_layers", page.FEATURE),
    *((progress.FEATURE,) if progress.AVAILABLE else ()),
)
CLIENT_ID_BYTES: Final = 16  # who knows it, and has the same uid and tenant, can take over what it holds
PROBE_TIMEOUT_S: Final = 0.25  # a daemon that did not answer last time gets no more than this
WAIT_S_MAX: Final = 86_400.0  # for one answer; the daemon answers sooner
TIMEOUTS_IN_A_ROW_MAX: Final = 3  # then the session is given up, and with it all that it held
STAGING_BYTES_MAX: Final = 1 << 62  # the daemon's limit is lower
WARN_EVERY_S: Final = 60.0
_NOT_FOUND: Final = 5

_log = logging.getLogger("kvstored_client")


@dataclass(frozen=True, slots=True)
class Settings:
    """How to reach the daemon and how long to wait for it."""

    path: str
    token: str = field(repr=False)
    name: str
    staging_bytes: int
    timeout_s: float
    connect_timeout_s: float
    create_group: bool
    join_group: bytes
    token_file: Path | None = None
    tls: Tls = field(default_factory=Tls)

    def current_token(self) -> str:
        """The token to show now. Raises Unavailable where its file cannot be read."""
        return self.token if self.token_file is None else read_token_file(self.token_file)


def settings_of(
    address: str | None,
    token: str | None,
    token_file: str | os.PathLike[str] | None,
    tls: Tls | None,
    name: str,
    staging_bytes: int,
    timeout_s: float,
    connect_timeout_s: float,
    create_group: bool,
    join_group: bytes,
) -> Settings:
    """What a client was told, and what the environment says where it was not. Raises ValueError or TypeError.

    All is looked at here: the first daemon may come much later, in an engine's step.
    """
    path = target_of(address)
    file, security = token_path(token, token_file), check_tls(path, tls)
    name, join_group = name or "", join_group or b""  # None is as if it was not given
    for said, value in (("name", name), ("token", token or "")):
        if not isinstance(value, str):
            raise TypeError(f"{said} is a {type(value).__name__}: it must be text")
        value.encode()  # a UnicodeEncodeError is a ValueError
    if not isinstance(join_group, bytes):
        raise TypeError(f"join_group is a {type(join_group).__name__}: it must be bytes, a client's `group_id`")
    if not 0 <= operator.index(staging_bytes) <= STAGING_BYTES_MAX:
        raise ValueError(f"staging_bytes is {staging_bytes}: bytes of memory for puts, or 0 for none")
    for said, seconds in (("timeout_s", timeout_s), ("connect_timeout_s", connect_timeout_s)):
        if not 0 < seconds < float("inf"):
            raise ValueError(f"{said} is {seconds}: how many seconds to wait, more than 0")
    terms = (name, staging_bytes, timeout_s, connect_timeout_s, create_group, join_group)
    return Settings(path, token or "", *terms, file, security)


class Core:
    """State of one client; the drivers add the waiting."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.breaker = Breaker()
        self.stats = ClientStats()
        self.known_slots = KnownSlots()
        self.connection: Connection | None = None
        self.connect_error: KVStoredClientError | None = None
        self.transfers = itertools.count(1)  # numbers of loads and stores of a GPU's memory
        self.group_id = b""
        self.boot_id = 0
        self._tenant = ""
        self._client_id = secrets.token_bytes(CLIENT_ID_BYTES)
        self._left: Left | None = None
        self.closed = False
        self._pid = os.getpid()
        self._frames_at_timeout = -1
        self._warn_again_at_s = 0.0

    def check_process(self, *, begun: bool = False) -> None:
        """Raises RuntimeError in a process that was forked from the one that made the client, or after close.

        `begun`: not after close, for what was begun before.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this kvstored client was made before a fork and belongs to the parent process: make a new one here"
            )
        if self.closed and not begun:
            raise RuntimeError("this kvstored client is closed")

    def check_open(self) -> None:
        """Raises Unavailable after close: for what goes on meanwhile."""
        if self.closed:
            raise Unavailable("this kvstored client is closed")

    def is_connected(self) -> bool:
        """Whether a session is open at this moment."""
        return self.connection is not None and not self.forked and self.connection.alive()

    def snapshot(self) -> ClientStats:
        """The counters now."""
        late = self.connection.late_replies if self.connection is not None else 0
        return dataclasses.replace(self.stats, late_replies=self.stats.late_replies + late)

    @property
    def forked(self) -> bool:
        """Whether this is another process than the one that made the client."""
        return os.getpid() != self._pid

    def current(self) -> Connection | None:
        """The session, where it is usable now. Raises Unavailable while the breaker says to wait."""
        self.check_open()
        connection = self.connection
        if connection is None or not connection.alive():
            if self.breaker.waiting:
                raise Unavailable("the daemon could not be reached lately")
            return None
        if self.breaker.failures:
            connection.poke()
            if connection.frames_received != self._frames_at_timeout:
                self.answered()  # it was only late
            elif not self.breaker.allow():
                raise Unavailable("the daemon did not answer lately")
        return connection

    def timeout_s(self, wait_s: float = 0.0) -> float:
        """How long to wait for an answer that may itself wait `wait_s` in the daemon."""
        limit_s = self.settings.timeout_s
        return min(wait_s, WAIT_S_MAX) + (min(limit_s, PROBE_TIMEOUT_S) if self.breaker.failures else limit_s)

    # ---- what the drivers report ----

    def answered(self) -> None:
        """The daemon answered."""
        if self.breaker.failures:
            self.breaker.success()
            self._frames_at_timeout = -1

    def timed_out(self, connection: Connection) -> None:
        """It did not, in time. After a few in a row the session is given up."""
        self.stats.timeouts += 1
        self._frames_at_timeout = connection.frames_received
        self.breaker.failure()
        if self.breaker.failures >= TIMEOUTS_IN_A_ROW_MAX:
            connection.fail(Unavailable("the daemon did not answer several calls in a row"))

    def connect_failed(self, error: BaseException) -> KVStoredClientError:
        """No session came about because of `error`, one of `errors.FAILURES`; the same as the client's own."""
        failure = self.connect_error = failure_of(error)
        if self.breaker.closed:
            _log.warning("kvstored is not available, going on without it: %s", failure)
        self._frames_at_timeout = -1
        self.breaker.failure()
        return failure

    def dropped(self) -> None:
        """The session is over; what it held is gone, unless a restarted daemon kept it."""
        connection = self.connection
        if connection is not None:
            self.stats.late_replies += connection.late_replies
            self._left = Left(connection.holds)
            self.connection = None

    def connected(self, connection: Connection) -> None:
        """A new session is open."""
        self.stats.connects += 1
        if self.boot_id:
            self.stats.reconnects += 1
        if not self.breaker.closed:
            _log.warning("kvstored is available again")
        self.connection = connection
        if self._left is not None:
            self._left.resume(connection, connection.opened.resumed_leases)
            self._left = None
        self.connect_error = None
        self.boot_id = connection.opened.boot_id
        self.group_id = connection.opened.group_id
        self._tenant = connection.opened.tenant
        self._frames_at_timeout = -1
        self.breaker.success()

    def tenant(self) -> str:
        """Whose sessions these are; empty while none was open."""
        return self._tenant

    def failed_open(self, error: BaseException) -> KVStoredClientError:
        """A data verb answers a miss because of `error`, one of `errors.FAILURES`; the same as the client's own."""
        failure = failure_of(error)
        if isinstance(failure, Refused):
            self.stats.refused += 1
            self._warn("kvstored refused a call, which counts as a miss: %s", failure)
        else:
            self.stats.misses_unavailable += 1
            if failure is not error:
                self._warn("kvstored: a call counts as a miss: %s", failure)
        return failure

    def _warn(self, text: str, error: Exception) -> None:
        """Say it once a minute: an engine makes thousands of calls a second."""
        now = time.monotonic()
        if now >= self._warn_again_at_s:
            self._warn_again_at_s = now + WARN_EVERY_S
            _log.warning(text, error)

    # ---- opening a session ----

    def open_session(self, connection: Connection) -> Verb[None]:
        """The handshake. Raises KVStoredClientError."""
        join = self.group_id if self.settings.create_group else self.settings.join_group
        try:
            yield from self._handshake(connection, join)
        except Refused as refusal:
            if not join or refusal.code != _NOT_FOUND:
                raise
            # The group went with the daemon's last life: a session of one's own still serves.
            yield from self._handshake(connection, b"")

    def _handshake(self, connection: Connection, join_group: bytes) -> Verb[None]:
        settings = self.settings
        request = pb.OpenSessionRequest(
            protocol_min=frames.PROTOCOL_MIN,
            protocol_max=frames.PROTOCOL_MAX,
            features=FEATURES,
            client_name=settings.name or f"python-{os.getpid()}",
            client_version=VERSION,
            token=settings.current_token(),
            staging_bytes=settings.staging_bytes,
            create_group=settings.create_group and not join_group,
            join_group=join_group,
            resume=pb.Resume(client_id=self._client_id, lease_ids=self._left.in_use() if self._left else []),
        )
        limit_s = settings.connect_timeout_s
        opened = yield from call(connection, pb.OPERATION_OPEN_SESSION, request, pb.OpenSessionReply, limit_s)
        if not frames.PROTOCOL_MIN <= opened.protocol <= frames.PROTOCOL_MAX:
            raise Unavailable(f"the daemon speaks protocol {opened.protocol}, which this client does not know")
        connection.opened = opened
