"""The settings of the daemon: their names, units, defaults and bounds. One class per section.

Settings that may be absent are turned off by an empty text. How values are written:
`kvstored.config_types`; how they are found and merged: `kvstored.config`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvstored.config_types import (
    GIB,
    MIB,
    PAGE_BYTES,
    Address,
    Bytes,
    FileMode,
    Maybe,
    Seconds,
    Share,
    SocketPath,
    TenantName,
    TokenDigest,
)


class Section(BaseModel):
    """Settings that belong together; a TOML table."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Server(Section):
    """Where clients reach the daemon."""

    session_socket: SocketPath = Path("/run/kvstored/session.sock")
    """Unix socket of the local engines; shared memory goes through it."""
    socket_mode: FileMode = "0660"
    """Permissions of the session socket, octal; that of gRPC has them only where tenants have tokens, else 0600."""
    grpc_socket: Maybe[SocketPath] = Path("/run/kvstored/grpc.sock")
    """Unix socket of gRPC; empty: no gRPC on a Unix socket."""
    tcp_address: Maybe[Address] = None
    """`host:port` of gRPC over TLS; empty: no TCP."""
    tls_certificate: Maybe[Path] = None
    """Certificate chain of the TCP listener, PEM."""
    tls_key: Maybe[Path] = None
    """Its private key, PEM."""
    tls_client_ca: Maybe[Path] = None
    """The authority that signs client certificates, PEM: every TCP client then needs one; empty: tokens only."""
    max_sessions: Annotated[int, Field(ge=1, le=65536)] = 256
    """Client processes at once, both transports together."""
    idle_timeout_s: Annotated[float, Field(ge=1, le=86400)] = 60.0
    """A gRPC session without calls for so long ends."""
    stop_flush_s: Seconds = 30.0
    """A stop writes to NVMe what is only in DRAM, for so long at most; a second signal ends it; 0: not at all."""

    @property
    def socket_mode_bits(self) -> int:
        """`socket_mode` as chmod takes it."""
        return int(self.socket_mode, 8)


class Dram(Section):
    """The memory tier."""

    capacity_bytes: Annotated[Bytes, Field(ge=MIB, multiple_of=PAGE_BYTES)] = GIB
    """Memory for blocks, populated at start."""
    segment_bytes: Annotated[Bytes, Field(ge=0, multiple_of=PAGE_BYTES)] = 0
    """Size of one shared-memory file; 0: max(64 MiB, capacity / 512)."""
    huge_pages: Literal["auto", "never"] = "auto"
    """2 MiB pages: where the system offers them, or never."""
    lock: Literal["auto", "never"] = "auto"
    """mlock the tier: where it is allowed, or never."""
    require_huge_pages: bool = False
    """Do not start without huge pages."""
    require_lock: bool = False
    """Do not start without locked memory."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.segment_bytes > self.capacity_bytes:
            raise ValueError(f"dram.segment_bytes ({self.segment_bytes}) must not exceed dram.capacity_bytes")
        if self.require_huge_pages and self.huge_pages == "never":
            raise ValueError('dram.require_huge_pages = true needs dram.huge_pages = "auto", not "never"')
        if self.require_lock and self.lock == "never":
            raise ValueError('dram.require_lock = true needs dram.lock = "auto", not "never"')
        return self


class Nvme(Section):
    """The tier on local drives; none where `paths` is empty."""

    paths: list[Path] = []
    """Directories, one per drive; each is a log of its own."""
    capacity_bytes: Annotated[Bytes, Field(multiple_of=PAGE_BYTES)] = 16 * GIB
    """Room for blocks in each path."""
    extent_bytes: Annotated[Bytes, Field(ge=32 * MIB, le=4 * GIB, multiple_of=PAGE_BYTES)] = 256 * MIB
    """Size of one log file: written in full, recycled whole."""
    io_threads: Annotated[int, Field(ge=0, le=64)] = 0
    """Threads per path; 0: chosen from the number of CPUs."""
    require_direct_io: bool = False
    """Do not start where the file system refuses O_DIRECT."""
    io_deadline_s: Annotated[float, Field(ge=0, le=600)] = 10.0
    """Longest time for one call to a device: past it the path is off until the call comes back; 0: no limit."""
    retry_s: Annotated[float, Field(ge=0.05, le=3600)] = 5.0
    """How often each path is looked after; one that failed is tried again so soon, then less and less often."""
    scrub_bytes_per_s: Annotated[Bytes, Field(ge=0)] = 32 * MIB
    """How fast all blocks of a path are read again and checked, once a day; 0: never."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.paths)) != len(self.paths):
            raise ValueError("nvme.paths names a directory twice: each must be given once")
        if self.capacity_bytes < 2 * self.extent_bytes:
            raise ValueError(
                f"nvme.capacity_bytes ({self.capacity_bytes}) must be at least twice nvme.extent_bytes "
                f"({self.extent_bytes}): one extent is written while another is recycled"
            )
        return self


class Mover(Section):
    """Background movement between the tiers."""

    high_watermark: Share = 0.9
    """Demotion starts when DRAM is this full."""
    low_watermark: Share = 0.7
    """And goes on to here."""
    batch_share: Share = 0.05
    """Share of DRAM demoted in one batch."""
    queue_blocks: Annotated[int, Field(ge=16, le=1 << 20)] = 4096
    """Blocks waiting to be moved; past it callers are THROTTLED."""
    inflight_bytes: Annotated[Bytes, Field(ge=16 * MIB)] = 256 * MIB
    """Bytes being read or written at once."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.low_watermark >= self.high_watermark:
            raise ValueError(
                f"mover.low_watermark ({self.low_watermark}) must be below mover.high_watermark ({self.high_watermark})"
            )
        return self


class Limits(Section):
    """What one client, and all together, may hold."""

    staging_bytes_per_session: Annotated[Bytes, Field(ge=0, multiple_of=PAGE_BYTES)] = GIB
    """Largest staging ring of one session."""
    staging_bytes_total: Annotated[Bytes, Field(ge=0, multiple_of=PAGE_BYTES)] = 4 * GIB
    """Staging rings of all sessions together."""
    leases_per_session: Annotated[int, Field(ge=1, le=1 << 20)] = 4096
    """Leases one session may hold."""
    reservations_per_session: Annotated[int, Field(ge=1, le=1 << 20)] = 256
    """Reservations one session may hold open."""
    leased_share: Share = 0.75
    """Share of DRAM that leases may hold in place."""
    requests_in_flight: Annotated[int, Field(ge=1, le=1 << 16)] = 64
    """Unanswered requests of one session; past it its socket is not read."""
    reply_queue_bytes: Annotated[Bytes, Field(ge=MIB)] = 4 * MIB
    """Replies that a session has not taken; past it its socket is not read."""
    put_wait_max_s: Seconds = 5.0
    """Longest wait for room that a reservation may ask for."""
    get_wait_max_s: Seconds = 30.0
    """Longest wait that a get, or a poll of a prefetch, may ask for."""
    namespaces_per_session: Annotated[int, Field(ge=1, le=1 << 20)] = 1024
    """Namespaces one session may open."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.staging_bytes_per_session > self.staging_bytes_total:
            raise ValueError(
                f"limits.staging_bytes_per_session ({self.staging_bytes_per_session}) must not exceed "
                f"limits.staging_bytes_total ({self.staging_bytes_total})"
            )
        return self


class Policy(Section):
    """Which block goes first."""

    eviction: Literal["shelf_life", "lru", "lfu", "heat", "s3fifo"] = "shelf_life"
    """Order of eviction, leaves before their parents."""
    heat_half_life: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """For `heat`: after so many turnovers of the tier (as many blocks used as it holds) a block's heat is half."""


class MetricsSettings(Section):
    """The Prometheus endpoint."""

    enabled: bool = True
    """Serve metrics."""
    address: Address = "127.0.0.1:9464"
    """`host:port` of the endpoint; tenant names appear in it, so keep it on loopback."""


class Log(Section):
    """Log lines on standard error."""

    format: Literal["json", "text"] = "json"
    """One JSON object a line, or text for people."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe level that is written."""


class Tenant(Section):
    """Who a caller is and what it may use."""

    name: TenantName
    """Appears in status and metrics."""
    uids: list[Annotated[int, Field(ge=0, lt=1 << 32)]] = []
    """Unix users that are this tenant on the session socket."""
    tokens_sha256: list[TokenDigest] = []
    """SHA-256 of each token, lower-case hex; the token itself is stored nowhere."""
    certificates: list[Annotated[str, Field(min_length=1)]] = []
    """Common names of client certificates on TCP."""
    role: Literal["tenant", "reader", "admin"] = "tenant"
    """`reader` may not write; `admin` also sees and manages every tenant."""
    dram_limit_bytes: Maybe[Annotated[Bytes, Field(ge=0)]] = None
    """Most DRAM its blocks may fill; empty: all of it."""
    nvme_limit_bytes: Maybe[Annotated[Bytes, Field(ge=0)]] = None
    """Most NVMe its blocks may fill; empty: all of it."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if not (self.uids or self.tokens_sha256 or self.certificates):
            raise ValueError(f"tenant {self.name!r} needs at least one of uids, tokens_sha256, certificates")
        return self


def default_tenants() -> list[Tenant]:
    """One tenant for one's own machine: the daemon's user and root."""
    return [Tenant(name="default", uids=sorted({0, os.geteuid()}), role="admin")]


class Config(Section):
    """All settings."""

    server: Server = Server()
    dram: Dram = Dram()
    nvme: Nvme = Nvme()
    mover: Mover = Mover()
    limits: Limits = Limits()
    policy: Policy = Policy()
    metrics: MetricsSettings = MetricsSettings()
    log: Log = Log()
    tenants: list[Tenant] = Field(default_factory=default_tenants, min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for attribute in ("name", "uids", "tokens_sha256", "certificates"):
            _check_disjoint(self.tenants, attribute)
        if self.server.tcp_address is not None:
            self._check_tls()
        return self

    def _check_tls(self) -> None:
        server = self.server
        if server.tls_certificate is None or server.tls_key is None:
            raise ValueError(
                "server.tcp_address needs server.tls_certificate and server.tls_key: TCP is served with TLS only"
            )
        if server.tls_client_ca is None and not any(tenant.tokens_sha256 for tenant in self.tenants):
            raise ValueError(
                "server.tcp_address needs server.tls_client_ca, or a tenant with tokens_sha256: else nobody can log in"
            )
        if server.tls_client_ca is None and any(tenant.certificates for tenant in self.tenants):
            raise ValueError("tenants.certificates needs server.tls_client_ca, which checks them")


def _check_disjoint(tenants: list[Tenant], attribute: str) -> None:
    owners: dict[object, str] = {}
    for tenant in tenants:
        value = getattr(tenant, attribute)
        for item in value if isinstance(value, list) else [value]:
            if item in owners:
                shown = "a token" if attribute == "tokens_sha256" else f"{item!r}"
                raise ValueError(f"tenants: {shown} stands in {attribute} of both {owners[item]!r} and {tenant.name!r}")
            owners[item] = tenant.name


def flatten(config: Config) -> Iterator[tuple[str, Any]]:
    """Every setting as (`section.key`, value), in the order of the sections."""
    for name in Config.model_fields:
        value = getattr(config, name)
        if isinstance(value, Section):
            yield from ((f"{name}.{key}", getattr(value, key)) for key in type(value).model_fields)
        else:
            yield name, value
