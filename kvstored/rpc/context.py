"""What both transports share."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstored.clock import Clock
from kvstored.config import Config
from kvstored.metrics import Metrics
from kvstored.rpc.identity import Identity
from kvstored.store import Store


@dataclass(slots=True)
class Context:
    """The store, who may use it, and what is true of the daemon as a whole."""

    config: Config
    store: Store
    identity: Identity
    metrics: Metrics
    clock: Clock
    boot_id: int
    version: str
    started_s: float
    state: str = "starting"  # starting, serving, draining, stopping
    warnings: list[str] = field(default_factory=list)
