"""Records the daemon's own traffic for `kvstorectl whatif`: which chains were looked up, got and put, and when.

The format is `policy.recording`. The loop only queues what it has in its hands; a thread hashes and writes. What
the thread does not keep up with is dropped and counted. It is off unless an admin turns it on, and then costs
each call one test.

No payload, token or name gets into it: block hashes are hashed again, under a random key that is forgotten at the
end and with the tenant, so that equal blocks of two tenants do not look alike.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from kvstored.catalog.catalog import Space
from kvstored.catalog.leases import Session
from kvstored.clock import Clock
from kvstored.device.new_file import NewFile
from kvstored.errors import DeviceError, FailedPrecondition, InvalidArgument
from kvstored.policy.recording import FORMAT, GET, KEY_BYTES, LOOKUP, PUT, Header, Line, pack
from kvstored.reporting.logs import get_logger

QUEUE_BLOCKS: Final = 1 << 18  # that wait for the thread
POLL_S: Final = 0.05
KEYS_PER_TURN: Final = 64  # hashed before the thread lets others have the interpreter
SALT_BYTES: Final = 32
SIZE_BYTES_MIN: Final = 4096

_log = get_logger("recorder")


class _Call(msgspec.Struct, gc=False):
    """A call as the loop has it in its hands."""

    at_s: float
    kind: str
    session: bytes
    spaces: list[tuple[bytes, Space]]  # with the digest at that moment: an epoch makes it another
    hashes: Sequence[bytes]
    found: int = 0
    parent: bytes = b""
    size_bytes: int = 0


class RecorderStatus(msgspec.Struct, frozen=True):
    """What of the current recording, or of the last one, is known."""

    active: bool = False
    path: str = ""
    calls: int = 0
    dropped_calls: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    ended: str = ""


class Recorder:
    """At most one recording at a time. Calls are made on the event loop."""

    def __init__(
        self,
        directory: Path,
        clock: Clock,
        prepare: Callable[[], None] = lambda: None,
        *,
        size_bytes_max: int,
        seconds_max: float,
        queue_blocks: int = QUEUE_BLOCKS,
    ) -> None:
        """`prepare` is called in a thread before a file is made; what it raises is the reason of a failure."""
        self.on = False  # tested by each call; turned off by the thread too
        self._directory = directory
        self._clock = clock
        self._prepare = prepare
        self._size_bytes_max = size_bytes_max
        self._seconds_max = seconds_max
        self._queue_blocks = queue_blocks
        self._writing: _Writing | None = None
        self._starting = False

    async def start(self, size_bytes: int = 0, seconds: float = 0.0) -> RecorderStatus:
        """Begin; it ends by itself at a size and after a time: those of the configuration, or smaller ones.

        Raises FailedPrecondition where one runs, InvalidArgument for limits that are none, DeviceError.
        """
        if self._starting or (self._writing is not None and self._writing.alive):
            raise FailedPrecondition("a trace is being recorded already: stop it first")
        if not seconds >= 0 or 0 < size_bytes < SIZE_BYTES_MIN:
            raise InvalidArgument(f"a recording may have {SIZE_BYTES_MIN} bytes and a time over 0, or more")
        stamp = datetime.fromtimestamp(self._clock.wall(), UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        path = self._directory / f"trace-{stamp}.jsonl"
        limits = (
            min(size_bytes or self._size_bytes_max, self._size_bytes_max),
            min(seconds or self._seconds_max, self._seconds_max),
        )
        self._starting = True
        try:
            file = await asyncio.to_thread(self._make, path)
            self._writing = _Writing(self, file, self._clock, *limits, self._queue_blocks)
            self.on = True
        finally:
            self._starting = False
        return self._writing.status()

    def _make(self, path: Path) -> NewFile:
        self._prepare()
        return NewFile(path)

    async def stop(self, why: str = "stopped") -> RecorderStatus:
        """End the recording and wait until it is written; nothing happens where there is none."""
        self.on = False
        writing = self._writing
        if writing is not None:
            await asyncio.to_thread(writing.end, why)
        return self.status()

    def status(self) -> RecorderStatus:
        """Of the current recording, or else of the last one since the start."""
        return RecorderStatus() if self._writing is None else self._writing.status()

    # ---- calls; only while `on` ----

    def looked_up(self, session: Session, spaces: Sequence[Space], hashes: Sequence[bytes], found: int) -> None:
        """Note a lookup and the leading blocks that were there."""
        self._note(LOOKUP, session, spaces, hashes, found=found)

    def got(self, session: Session, spaces: Sequence[Space], hashes: Sequence[bytes], found: int) -> None:
        """Note a get and its hits."""
        self._note(GET, session, spaces, hashes, found=found)

    def put(self, session: Session, space: Space, hashes: Sequence[bytes], parent: bytes, size_bytes: int) -> None:
        """Note a put; `size_bytes` is of all its blocks."""
        self._note(PUT, session, [space], hashes, parent=parent, size_bytes=size_bytes)

    def _note(
        self,
        kind: str,
        session: Session,
        spaces: Sequence[Space],
        hashes: Sequence[bytes],
        *,
        found: int = 0,
        parent: bytes = b"",
        size_bytes: int = 0,
    ) -> None:
        if self._writing is not None:
            numbered = [(space.digest, space) for space in spaces]
            now = self._clock.monotonic()
            self._writing.add(_Call(now, kind, session.session_id, numbered, hashes, found, parent, size_bytes))


class _Writing:
    """One recording: the queue, and the thread that empties it."""

    def __init__(
        self, recorder: Recorder, file: NewFile, clock: Clock, size_bytes: int, seconds: float, queue_blocks: int
    ) -> None:
        self._recorder = recorder
        self._file = file
        self._clock = clock
        self._size_bytes = size_bytes
        self._began_s = clock.monotonic()
        self._end_s = self._began_s + seconds
        self._ended_s = 0.0
        self._queue: deque[_Call] = deque()
        self._queue_blocks = queue_blocks
        self._added = self._taken = 0  # blocks; each is counted by one thread alone
        self._dropped = self._said = self._calls = 0
        self._why = ""  # it is to end; set once
        self._wake = threading.Event()
        self._encoder = _Encoder(self._began_s)
        header = Header(FORMAT, clock.wall())
        self._thread = threading.Thread(target=self._work, args=(header,), name="recorder", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def add(self, call: _Call) -> None:
        if self._added - self._taken + len(call.hashes) > self._queue_blocks:
            self._dropped += 1
            return
        self._added += len(call.hashes)
        self._queue.append(call)

    def end(self, why: str) -> None:
        """Ask the thread to end, and wait for it. Blocks."""
        self._why = self._why or why
        self._wake.set()
        self._thread.join()

    def status(self) -> RecorderStatus:
        return RecorderStatus(
            active=self._recorder.on,
            path=str(self._file.path),
            calls=self._calls,
            dropped_calls=self._dropped,
            size_bytes=self._file.size_bytes,
            seconds=(self._ended_s or self._clock.monotonic()) - self._began_s,
            ended="" if self._recorder.on else self._why,
        )

    def _work(self, header: Header) -> None:
        try:
            self._file.write(msgspec.json.encode(header) + b"\n")
            while not self._why:
                self._wake.wait(POLL_S)
                self._empty()
                if self._clock.monotonic() >= self._end_s:
                    self._why = self._why or "time"
            self._recorder.on = False
            self._empty()
            self._file.write(msgspec.json.encode(Line(ended=self._why)) + b"\n")
        except DeviceError as error:
            self._why = str(error)
            _log.warning("the recording has ended", reason=str(error))
        finally:
            self._recorder.on = False
            self._ended_s = self._clock.monotonic()
            self._queue.clear()
            self._encoder.forget()
            self._file.close()

    def _empty(self) -> None:
        """Write what is queued, as far as the size allows."""
        while self._queue:
            if self._file.size_bytes >= self._size_bytes:
                self._why = "size"
                return
            call = self._queue.popleft()
            lines = self._encoder.lines(call)
            if self._dropped > self._said:
                lines.insert(0, Line(dropped=self._dropped - self._said))
                self._said = self._dropped
            self._file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
            self._calls += 1
            self._taken += len(call.hashes)


class _Encoder:
    """Numbers for sessions, namespaces and tenants, and keys for hashes."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._salt = secrets.token_bytes(SALT_BYTES)
        self._sessions: dict[bytes, int] = {}
        self._namespaces: dict[bytes, int] = {}
        self._tenants: dict[str, int] = {}

    def forget(self) -> None:
        self._salt = b""
        self._sessions.clear()
        self._namespaces.clear()
        self._tenants.clear()

    def lines(self, call: _Call) -> list[Line]:
        lines = [line for digest, space in call.spaces if (line := self._introduced(digest, space)) is not None]
        tenant = call.spaces[0][1].tenant
        keys = self._keys(tenant, call.hashes)
        lines.append(
            Line(
                t=round((call.at_s - self._began_s) * 1000, 3),
                kind=call.kind,
                session=self._sessions.setdefault(call.session, len(self._sessions) + 1),
                namespaces=[self._namespaces[digest] for digest, _ in call.spaces],
                keys=pack(keys),
                found=call.found,
                parent=pack(self._keys(tenant, [call.parent])) if call.parent else "",
                bytes=call.size_bytes,
            )
        )
        return lines

    def _introduced(self, digest: bytes, space: Space) -> Line | None:
        if digest in self._namespaces:
            return None
        self._namespaces[digest] = number = len(self._namespaces) + 1
        tenant = self._tenants.setdefault(space.tenant, len(self._tenants) + 1)
        tokens = space.namespace.fields.get("block_tokens", "")
        return Line(namespace=number, tenant=tenant, block_tokens=int(tokens) if tokens.isdecimal() else 0)

    def _keys(self, tenant: str, hashes: Iterable[bytes]) -> bytes:
        named = tenant.encode()
        keyed = hashlib.blake2b(len(named).to_bytes(4, "big") + named, digest_size=KEY_BYTES, key=self._salt)
        keys = bytearray()
        for number, hash_ in enumerate(hashes, 1):
            one = keyed.copy()
            one.update(hash_)
            keys += one.digest()
            if not number % KEYS_PER_TURN:
                time.sleep(0)
        return bytes(keys)
