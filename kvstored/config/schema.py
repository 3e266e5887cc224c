"""The settings of the daemon: their names, units, defaults and bounds. One class per section.

Settings that may be absent are turned off by an empty text. How values are written:
`kvstored.config.types`; how they are found and merged: `kvstored.config.config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from kvstored.config.tenants import Tenant, check_disjoint, default_tenants
from kvstored.config.types import (
    GIB,
    MIB,
    PAGE_BYTES,
    Address,
    Bytes,
    DeviceUuid,
    FileMode,
    Maybe,
    Seconds,
    Section,
    Share,
    SocketPath,
)
from kvstored.policy.quota import check_guarantees
from kvstored.segment_size import check_segments, dram_segment_bytes

__all__ = ["Config", "Section", "Tenant", "default_tenants", "flatten"]


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
    """Client processes at once, both transports together; admins may have 8 more: nobody can keep them out."""
    idle_timeout_s: Annotated[float, Field(ge=1, le=86400)] = 60.0
    """A gRPC session without calls for so long ends."""
    state_dir: Path = Path("/var/lib/kvstored")
    """Directory of what admins change at run time, and of the audit log; made when there is something to write."""
    audit_log: Maybe[Path] = None
    """File of admin acts and refusals, JSON lines, 64 MiB at most with its older parts; empty: in `state_dir`."""
    trace_dir: Maybe[Path] = None
    """Where `kvstorectl trace start` records to; made when needed; empty: `traces` in `state_dir`."""
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
        check_segments(self.capacity_bytes, self.segment_bytes)
        if self.require_huge_pages and self.huge_pages == "never":
            raise ValueError('dram.require_huge_pages = true needs dram.huge_pages = "auto", not "never"')
        if self.require_lock and self.lock == "never":
            raise ValueError('dram.require_lock = true needs dram.lock = "auto", not "never"')
        return self


class Nvme(Section):
    """The tier on local drives; none where `paths` is empty."""

    paths: list[Path] = Field(default_factory=list, max_length=64)
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
    write_budget_bytes_per_day: Annotated[Bytes, Field(ge=0)] = 0
    """Most that may be written to each path a day, index and all; short of it stores are shed by value; 0: no limit."""
    reinsert_share: Annotated[float, Field(ge=0, le=0.5)] = 0.25
    """Blocks that were read are written again before their extent is recycled: at most so much of one; 0: none."""
    endurance_tbw: list[Annotated[float, Field(ge=0, le=1e6)]] = Field(default=[])
    """Terabytes that a path's drive takes in its life, by its data sheet: one for all, or one a path; 0: unknown."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.paths)) != len(self.paths):
            raise ValueError("nvme.paths names a directory twice: each must be given once")
        if len(self.endurance_tbw) not in (0, 1, len(self.paths)):
            raise ValueError(
                f"nvme.endurance_tbw has {len(self.endurance_tbw)} numbers for {len(self.paths)} paths: "
                "give one for all of them, or one for each"
            )
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
    queue_blocks: Annotated[int, Field(ge=16, le=1 << 20)] = 8192
    """Blocks waiting to be moved; past it callers are THROTTLED."""
    inflight_bytes: Annotated[Bytes, Field(ge=16 * MIB)] = 256 * MIB
    """Bytes being read or written at once."""
    forecast_half_life_s: Annotated[float, Field(ge=0, le=3600)] = 5.0
    """Demotion starts early where room runs out faster than it is made: by puts decayed so; 0: no forecast."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.low_watermark >= self.high_watermark:
            raise ValueError(
                f"mover.low_watermark ({self.low_watermark}) must be below mover.high_watermark ({self.high_watermark})"
            )
        return self


class PrefetchSettings(Section):
    """Reads from NVMe ahead of time."""

    inflight_bytes: Annotated[Bytes, Field(ge=MIB)] = 64 * MIB
    """Bytes being read at once for nobody who waits: a get waits behind no more than that."""
    predict: bool = False
    """Bring up from NVMe what a conversation with regular turns will ask for next, into room that is free."""


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
    trace_bytes: Annotated[Bytes, Field(ge=4096)] = GIB
    """A recording of the daemon's own traffic ends at this size."""
    trace_s: Annotated[float, Field(gt=0, le=30 * 86400)] = 86400.0
    """A recording ends after so many seconds."""

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
    heat_demote_above: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """For `heat`: a block that is hotter (a use adds 1) leaves DRAM only where somebody waits for its room; 0: off."""
    heat_promote_from: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """For `heat`: a block read from NVMe stays in DRAM from this heat on, else it goes before all others; 0: off."""
    admission: Literal["admit_all", "second_hit", "hinted"] = "admit_all"
    """What DRAM lets go of is written to NVMe: all of it, what was asked for twice lately, or what a hint names."""
    admission_memory_blocks: Annotated[int, Field(ge=1024, le=1 << 26)] = 1 << 18
    """How many blocks asked for lately are remembered for each tenant, about 150 bytes each."""


class Gpu(Section):
    """Transfers to and from the memory of engines on GPUs."""

    enabled: bool = True
    """Use a device worker for each GPU whose memory an engine registers; needs numpy and the CUDA driver."""
    start: Literal["first_use", "now"] = "first_use"
    """When device workers start: with the first registration, or `now`, always one, which pins the DRAM tier ahead."""
    devices: list[DeviceUuid] = Field(default_factory=list)
    """For `now`: UUIDs of the GPUs, as nvidia-smi -L shows them; none: all that the daemon sees."""
    drain_max_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    """A session that ended, or unregistered, has its memory back by then: a worker that holds it on is killed."""
    silence_max_s: Annotated[float, Field(gt=0, le=600)] = 15.0
    """A device worker that owes an answer and is silent for so long is killed and started anew."""


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


class Config(Section):
    """All settings."""

    server: Server = Server()
    dram: Dram = Dram()
    nvme: Nvme = Nvme()
    mover: Mover = Mover()
    prefetch: PrefetchSettings = PrefetchSettings()
    limits: Limits = Limits()
    policy: Policy = Policy()
    gpu: Gpu = Gpu()
    metrics: MetricsSettings = MetricsSettings()
    log: Log = Log()
    tenants: list[Tenant] = Field(default_factory=default_tenants, min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self.check_tenants(self.tenants)
        if self.server.tcp_address is not None:
            self._check_tls()
        return self

    def check_tenants(self, tenants: Sequence[Tenant]) -> None:
        """Raises ValueError where these tenants do not go together, or not with the tiers."""
        check_disjoint(tenants)
        check_guaranteed(tenants, self.dram, self.nvme)

    def _check_tls(self) -> None:
        server = self.server
        if server.tls_certificate is None or server.tls_key is None:
            raise ValueError(
                "server.tcp_address needs server.tls_certificate and server.tls_key: TCP is served with TLS only"
            )
        if server.tls_client_ca is None and any(tenant.certificates for tenant in self.tenants):
            raise ValueError("tenants.certificates needs server.tls_client_ca, which checks them")


def check_guaranteed(tenants: Sequence[Tenant], dram: Dram, nvme: Nvme) -> None:
    """Raises ValueError where the tiers cannot keep what is guaranteed in them all at once."""
    segment_bytes = dram.segment_bytes or dram_segment_bytes(dram.capacity_bytes)
    check_guarantees("dram", {t.name: t.dram_guaranteed_bytes for t in tenants}, dram.capacity_bytes, segment_bytes)
    capacity_bytes = len(nvme.paths) * (nvme.capacity_bytes // nvme.extent_bytes * nvme.extent_bytes)
    check_guarantees("nvme", {t.name: t.nvme_guaranteed_bytes for t in tenants}, capacity_bytes, nvme.extent_bytes)


def flatten(config: Config) -> Iterator[tuple[str, Any]]:
    """Every setting as (`section.key`, value), in the order of the sections."""
    for name in Config.model_fields:
        value = getattr(config, name)
        if isinstance(value, Section):
            yield from ((f"{name}.{key}", getattr(value, key)) for key in type(value).model_fields)
        else:
            yield name, value
