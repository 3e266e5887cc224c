"""What admins did and who was refused: one JSON object a line, in order, in a file that only grows.

Written by a thread of its own, so that no call waits for the disk that does not ask to. What cannot be
written is kept for a while and tried again; what is lost then is counted, on record too as soon as the
file takes lines again, and said in `status`. Refused peers have a rate, or they could fill the disk.

    seq         number of the line, over restarts
    time        UTC, ISO 8601
    act         operation, as the schema names it
    outcome     ok, or what went wrong; "refused: " and what is missing
    by          tenant, role, credential, transport, client, and pid and uid; absent where it is not known
    with        what it was done with, a fact each: never a token, a key or a block
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from kvstored.catalog.leases import Caller
from kvstored.clock import Clock
from kvstored.device.append_file import AppendFile
from kvstored.errors import KVStoredError
from kvstored.reporting.logs import Throttle, get_logger
from kvstored.tenancy.refusal_rate import RefusalRate
from kvstored.tenancy.tokens import without_secrets

AUDIT_FILE: Final = "audit.jsonl"
FILE_BYTES: Final = 16 << 20
FILES: Final = 4
QUEUE_RECORDS: Final = 4096
RETRY_S: Final = 5.0
SETTLE_S: Final = 2.0
CLOSE_S: Final = 2.0
TEXT_MAX: Final = 256
RECORDS_PER_READ_MAX: Final = 1000

_WHO: Final = ("tenant", "role", "credential", "transport", "client")

Detail = str | int | float | bool | None
_Record = dict[str, Any]
_throttle = Throttle(get_logger("audit"))


class _Numbered(msgspec.Struct):
    """What is needed of an earlier line."""

    seq: int = 0


class AuditLog:
    """The audit log of one daemon. All calls but `settled` and `read` are made on the event loop and never block."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        prepare: Callable[[], None] = lambda: None,
        *,
        file_bytes: int = FILE_BYTES,
        queue_records: int = QUEUE_RECORDS,
    ) -> None:
        """`prepare` is called in the thread before the file is opened; what it raises is the reason of a failure."""
        self._clock = clock
        self._prepare = prepare
        self._file = AppendFile(path, file_bytes=file_bytes, files=FILES)
        self._rate = RefusalRate(clock)
        self._queue_records = queue_records
        self._changed = threading.Condition()
        self._queue: deque[_Record] = deque()
        self._added = self._tried = self._unsaid = self._seq = 0
        self._numbered = self._closing = False
        self._thread: threading.Thread | None = None
        self._failure = ""
        self.counters: dict[str, int] = {"audit_records": 0, "audit_lost": 0, "audit_refusals_held_back": 0}

    # ---- writing ----

    def record(self, act: str, caller: Caller | None = None, *, outcome: str = "ok", **details: Detail) -> None:
        """Note that somebody did something; `details` are short facts, and no secrets."""
        when = datetime.fromtimestamp(self._clock.wall(), UTC).isoformat(timespec="milliseconds")
        record: _Record = {"time": when, "act": act, "outcome": without_secrets(outcome)[:TEXT_MAX]}
        if caller is not None:
            record["by"] = _short({name: getattr(caller, name) for name in _WHO})
            record["by"] |= {"pid": caller.pid, "uid": caller.uid} if caller.uid >= 0 else {}
        if details:
            record["with"] = _short(details)
        self._add(record)

    def refused(self, act: str, peer: str, reason: str, caller: Caller | None = None) -> None:
        """Note a refusal, unless this peer (a uid, an address) or all together were refused too often of late."""
        held_back = self._rate.admit(peer)
        if held_back is None:
            self.counters["audit_refusals_held_back"] += 1
            return
        more: dict[str, Detail] = {"held_back": held_back} if held_back else {}
        self.record(act, caller, outcome=f"refused: {reason}", peer=peer, **more)

    def _add(self, record: _Record) -> None:
        with self._changed:
            if self._closing or len(self._queue) >= self._queue_records:
                self.counters["audit_lost"] += 1
                self._unsaid += 1
                return
            self._queue.append(record)
            self._added += 1
            self.counters["audit_records"] += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="audit", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    async def settled(self) -> None:
        """Wait until what was recorded is on disk, or cannot be written for now; 2 s at most."""
        with self._changed:
            wanted = self._added
            if self._tried >= wanted:
                return
        await asyncio.to_thread(self._wait_tried, wanted, SETTLE_S)

    def _wait_tried(self, wanted: int, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._tried >= wanted, timeout_s)

    @property
    def warning(self) -> str:
        """What `status` is to say; empty: nothing."""
        return f"the audit log is not written: {self._failure}" if self._failure else ""

    def close(self) -> None:
        """Write what is left, as far as the disk takes it now. Blocks, 2 s at most."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    # ---- the thread ----

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._wanted, RETRY_S if self._failure else None)
                batch, added, unsaid, closing = list(self._queue), self._added, self._unsaid, self._closing
            written = self._write(batch, unsaid) if batch else True
            with self._changed:
                if written:
                    for _ in batch:
                        self._queue.popleft()
                    self._unsaid -= unsaid if batch else 0
                self._tried = added
                self._changed.notify_all()
            if closing:
                self._file.close()
                return

    def _wanted(self) -> bool:
        return self._closing or self._added > self._tried

    def _write(self, batch: list[_Record], unsaid: int) -> bool:
        records = [*batch, {"time": batch[-1]["time"], "act": "lost", "records": unsaid}] if unsaid else batch
        try:
            self._prepare()
            if not self._numbered:
                self._seq = self._last_number()
                self._numbered = True
            lines = [msgspec.json.encode({"seq": self._seq + n, **one}) + b"\n" for n, one in enumerate(records, 1)]
            self._file.append(lines)
        except KVStoredError as error:
            self._failure = str(error)
            _throttle.warning("the audit log cannot be written", reason=str(error))
            return False
        self._seq += len(lines)
        self._failure = ""
        return True

    def _last_number(self) -> int:
        for line in reversed(self._file.tail(RECORDS_PER_READ_MAX)):
            try:
                return msgspec.json.decode(line, type=_Numbered).seq
            except msgspec.MsgspecError:
                continue  # cut by a power failure
        return 0

    # ---- reading ----

    def read(self, limit: int, after: int = 0) -> list[bytes]:
        """The last `limit` lines that have a number above `after`, oldest first. Blocks; raises DeviceError."""
        lines = self._file.tail(min(limit, RECORDS_PER_READ_MAX))
        return [line for line in lines if not after or _number(line) > after]


def _short(facts: Mapping[str, Detail]) -> dict[str, Detail]:
    return {
        name: without_secrets(value)[:TEXT_MAX] if isinstance(value, str) else value for name, value in facts.items()
    }


def _number(line: bytes) -> int:
    try:
        return msgspec.json.decode(line, type=_Numbered).seq
    except msgspec.MsgspecError:
        return 0
