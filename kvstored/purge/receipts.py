"""What a purge is to take away and what it did: selections, receipts, and the file that keeps both over restarts.

A receipt is on file before its purge is acknowledged, so a purge that a crash cut short is known to be
unfinished, and is begun again by the next daemon.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from kvstored.errors import KVStoredError
from kvstored.keys import Namespace

RECEIPTS_MAX: Final = 1000
RESUMES_MAX: Final = 8  # of one purge: what eight daemons could not do somebody has to look at
LINES_MAX: Final = 100  # of sessions, and of what remains
VERSION: Final = 1

RUNNING: Final = "running"
WAITING: Final = "waiting"
COMPLETE: Final = "complete"
INCOMPLETE: Final = "incomplete"
DRY_RUN: Final = "dry_run"


class Selection(msgspec.Struct, frozen=True):
    """Which blocks: those that fit all that is set. `before_s` is wall clock: stored before it."""

    tenant: str = ""
    digest: bytes = b""
    model: str = ""
    model_version: str = ""
    older_than_s: float = 0.0
    before_s: float = 0.0

    def takes(self, namespace: Namespace) -> bool:
        """Whether blocks of this namespace may be among them."""
        fields = namespace.fields
        return (
            self.tenant in ("", namespace.tenant)
            and self.digest in (b"", namespace.digest)
            and self.model in ("", fields.get("model", ""))
            and self.model_version in ("", fields.get("model_version", ""))
        )

    def at(self, now_s: float) -> Selection:
        """The same with its age counted from `now_s`, wall clock: without this an age says nothing."""
        return msgspec.structs.replace(self, before_s=now_s - self.older_than_s) if self.older_than_s else self

    @property
    def whole_tenant(self) -> bool:
        """Whether it is all that a tenant has."""
        return bool(self.tenant) and not (self.digest or self.model or self.before_s)


class Receipt(msgspec.Struct):
    """What one purge did so far; see `PurgeReceipt` of the schema."""

    purge_id: str
    selection: Selection
    by: str
    begun_s: float
    deadline_s: float
    tenants: list[str] = []  # whose memory and files are wiped: known from the start, for a namespace may be forgotten
    state: str = WAITING
    duration_s: float = 0.0
    phase: str = ""
    steps_done: int = 0
    steps: int = 0
    dram_blocks: int = 0
    dram_bytes: int = 0
    nvme_blocks: int = 0
    nvme_bytes: int = 0
    dram_zeroed_bytes: int = 0
    nvme_zeroed_bytes: int = 0
    staging_zeroed_bytes: int = 0
    leases: int = 0
    leases_ended: int = 0
    sessions_ended: list[str] = []
    sessions_ended_count: int = 0
    remains: list[str] = []
    notes: list[str] = []
    resumed: int = 0  # how often a daemon began it again that had not begun it
    settled_s: float = 0.0  # wall clock: nothing that comes into a tier from here on was stored before it began
    keys_destroyed: bool = False  # the tenant's data keys on NVMe: what was put since has new ones

    @property
    def unfinished(self) -> bool:
        """Whether something is still to be done, by this daemon or the next."""
        return self.state in (WAITING, RUNNING, INCOMPLETE)

    @property
    def under_way(self) -> bool:
        """Whether it waits or runs."""
        return self.state in (WAITING, RUNNING)

    def at(self, phase: str, done: int = 0, steps: int = 0) -> None:
        """Progress."""
        self.phase, self.steps_done, self.steps = phase, done, steps

    def remain(self, line: str) -> None:
        """Note what is left; past a number of lines only that there is more."""
        if len(self.remains) < LINES_MAX:
            self.remains.append(line)
        elif len(self.remains) == LINES_MAX:
            self.remains.append("and more")


class _File(msgspec.Struct):
    version: int
    receipts: list[Receipt]


class Receipts:
    """The receipts that are kept, newest last, at most `RECEIPTS_MAX` beside those of purges under way."""

    def __init__(self) -> None:
        self._by_id: dict[str, Receipt] = {}
        # Set by the daemon: where they are kept. They block; `save` raises KVStoredError.
        self.save: Callable[[bytes], None] | None = None

    def add(self, receipt: Receipt) -> None:
        """Keep one; the oldest of who has most makes room, one with nothing left to do first."""
        self._by_id[receipt.purge_id] = receipt
        while len(self._by_id) > RECEIPTS_MAX:
            ended = [old for old in self._by_id.values() if not old.under_way]
            if not ended:
                break
            most = Counter(old.by for old in ended).most_common(1)[0][0]
            del self._by_id[min((old for old in ended if old.by == most), key=lambda old: old.unfinished).purge_id]

    def get(self, purge_id: str) -> Receipt | None:
        """By its id."""
        return self._by_id.get(purge_id)

    def all(self) -> list[Receipt]:
        """Newest first."""
        return list(self._by_id.values())[::-1]

    def packed(self) -> bytes:
        """What is to be on file at this moment."""
        return msgspec.json.encode(_File(VERSION, list(self._by_id.values())))

    def restore(self, data: bytes) -> None:
        """Take over what an earlier daemon left. Raises KVStoredError where it is damaged or a later version's."""
        try:
            found = msgspec.json.decode(data, type=_File)
        except msgspec.MsgspecError as error:
            raise KVStoredError(f"the receipts of purges are damaged: {error}") from error
        if found.version != VERSION:
            raise KVStoredError(f"the receipts of purges are of version {found.version}: {VERSION} was expected")
        self._by_id = {receipt.purge_id: receipt for receipt in found.receipts}


def new_id() -> str:
    """Short enough to be typed."""
    return secrets.token_hex(6)
