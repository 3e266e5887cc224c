"""The settings of one tenant: how it is recognised, what it may do and use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from kvstored.config.types import Bytes, CredentialName, Maybe, Section, TenantName, TokenDigest

CRYPTOGRAPHY_MIN: Final = 47  # the first whose ciphers write to memory that they are given


def _has_cryptography() -> bool:
    try:
        return int(version("cryptography").partition(".")[0]) >= CRYPTOGRAPHY_MIN
    except PackageNotFoundError:
        return False


class Tenant(Section):
    """Who a caller is and what it may use."""

    name: TenantName
    """Appears in status and metrics."""
    uids: list[Annotated[int, Field(ge=0, lt=1 << 32)]] = Field(default_factory=list)
    """Unix users that are this tenant on the session socket."""
    tokens_sha256: list[TokenDigest] = Field(default_factory=list)
    """SHA-256 of each token, lower-case hex; the token itself is stored nowhere."""
    certificates: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Common names of client certificates on TCP."""
    role: Literal["tenant", "reader", "admin"] = "tenant"
    """`reader` may not write; `admin` also sees and manages every tenant."""
    dram_limit_bytes: Maybe[Annotated[Bytes, Field(ge=0)]] = None
    """Most DRAM its blocks may fill; empty: all of it."""
    dram_guaranteed_bytes: Annotated[Bytes, Field(ge=0)] = 0
    """So much DRAM nobody else takes from it, and others make room for."""
    nvme_limit_bytes: Maybe[Annotated[Bytes, Field(ge=0)]] = None
    """Most NVMe its blocks may fill; empty: all of it."""
    nvme_guaranteed_bytes: Annotated[Bytes, Field(ge=0)] = 0
    """So much NVMe nobody else takes from it, and others make room for."""
    weight: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Its part of what is guaranteed to nobody, relative to the others' weights; who has more gives up first."""
    put_bytes_per_s: Maybe[Annotated[Bytes, Field(ge=1)]] = None
    """How fast it may put; past it puts are THROTTLED at once. Bursts of a second, or of one call; empty: no limit."""
    max_sessions: Maybe[Annotated[int, Field(ge=1, le=65536)]] = None
    """Sessions at once; empty: as many as `server.max_sessions` leaves."""
    max_leases: Maybe[Annotated[int, Field(ge=1, le=1 << 30)]] = None
    """Leases at once, of all its sessions together; empty: as many as the sessions may have."""
    max_namespaces: Maybe[Annotated[int, Field(ge=1, le=65536)]] = None
    """Namespaces that are kept for it; empty: an equal part of the daemon's 65,536."""
    staging_limit_bytes: Maybe[Annotated[Bytes, Field(ge=0)]] = None
    """Staging of all its sessions; empty: half of `limits.staging_bytes_total`, all of it where it is alone."""

    hard_pin_bytes: Annotated[Bytes, Field(ge=0)] = 0
    """So much DRAM its clients may pin hard (a hint), within `dram_guaranteed_bytes`; 0: nothing."""
    max_age_s: Maybe[Annotated[float, Field(gt=0, le=3_153_600_000)]] = None
    """Its blocks end so many seconds after they were put, whatever their TTL; empty: only by their TTL."""
    encryption: Literal["", "aes-256-gcm", "chacha20-poly1305"] = ""
    """How its new blocks are encrypted on NVMe; needs one of the next three. Empty: not at all."""
    key_file: Maybe[Path] = None
    """File of its master key: 64 hex digits or base64; in a second line an older one, to be replaced."""
    key_command: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Program and arguments that print the same, run as the daemon's user; only in the configuration file."""
    key_credential: Maybe[CredentialName] = None
    """Name of a credential of the service manager (systemd: LoadCredential=) that holds the same."""
    key_timeout_s: Annotated[float, Field(ge=0.1, le=600)] = 10.0
    """Longest time for reading the key."""

    @model_validator(mode="after")
    def _encrypted(self) -> Self:
        sources = [name for name in ("key_file", "key_command", "key_credential") if getattr(self, name)]
        if len(sources) > 1:
            raise ValueError(f"tenant {self.name!r}: {' and '.join(sources)} are set: its key has one source")
        if self.encryption and not sources:
            raise ValueError(f"tenant {self.name!r}: encryption needs key_file, key_command or key_credential")
        if sources and not _has_cryptography():
            raise ValueError(
                f"tenant {self.name!r}: {sources[0]} needs the package cryptography, {CRYPTOGRAPHY_MIN} or later: "
                "pip install 'kvstored[encryption]'"
            )
        return self

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.hard_pin_bytes > self.dram_guaranteed_bytes:
            raise ValueError(
                f"tenant {self.name!r}: hard_pin_bytes ({self.hard_pin_bytes}) must not exceed "
                f"dram_guaranteed_bytes ({self.dram_guaranteed_bytes}): what is pinned can be taken by nobody"
            )
        for tier in ("dram", "nvme"):
            guaranteed, limit = getattr(self, f"{tier}_guaranteed_bytes"), getattr(self, f"{tier}_limit_bytes")
            if limit is not None and guaranteed > limit:
                raise ValueError(
                    f"tenant {self.name!r}: {tier}_guaranteed_bytes ({guaranteed}) must not exceed "
                    f"{tier}_limit_bytes ({limit})"
                )
        return self


def default_tenants() -> list[Tenant]:
    """One tenant for one's own machine: the daemon's user and root."""
    return [Tenant(name="default", uids=sorted({0, os.geteuid()}), role="admin")]


def check_disjoint(tenants: Sequence[Tenant]) -> None:
    """Raises ValueError where two tenants have the same name or are recognised by the same thing."""
    for attribute in ("name", "uids", "tokens_sha256", "certificates"):
        _check_disjoint(tenants, attribute)


def _check_disjoint(tenants: Sequence[Tenant], attribute: str) -> None:
    owners: dict[object, str] = {}
    for tenant in tenants:
        value = getattr(tenant, attribute)
        for item in value if isinstance(value, list) else [value]:
            if item in owners:
                shown = "a token" if attribute == "tokens_sha256" else f"{item!r}"
                raise ValueError(f"tenants: {shown} stands in {attribute} of both {owners[item]!r} and {tenant.name!r}")
            owners[item] = tenant.name
