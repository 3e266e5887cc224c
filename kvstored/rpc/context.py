"""What both transports share."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstored.catalog.reordering import Reordering
from kvstored.clock import Clock
from kvstored.config.config import Config
from kvstored.encryption.key_keeper import KeyKeeper
from kvstored.purge.purges import Purges
from kvstored.recorder import Recorder
from kvstored.reporting.metrics import Metrics
from kvstored.rpc.identity import Identity
from kvstored.store.departures import Departures
from kvstored.store.store import Store
from kvstored.tenancy.audit_log import AuditLog
from kvstored.tenancy.changes import TenantChanges


@dataclass(slots=True)
class Context:
    """The store, who may use it, and what is true of the daemon as a whole."""

    config: Config
    store: Store
    identity: Identity
    metrics: Metrics
    audit: AuditLog
    changes: TenantChanges
    clock: Clock
    purges: Purges
    departures: Departures
    recorder: Recorder
    reordering: Reordering
    boot_id: int
    version: str
    started_s: float
    keys: KeyKeeper | None = None  # where there is NVMe
    state: str = "starting"  # starting, serving, draining, stopping
    warnings: list[str] = field(default_factory=list)
