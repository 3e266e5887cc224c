"""A whole daemon in the caller's own event loop, for tests that want to look inside while it serves."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvstored.catalog.catalog import STATE_NAMES
from kvstored.config.config import Config
from kvstored.daemon.daemon import Daemon
from kvstored.testing.waiting import PATIENCE_S

MIB = 1 << 20
POLL_S = 0.01


def tenant(name: str, **settings: Any) -> dict[str, Any]:
    """A tenant's settings; its token is `token_of(name)`."""
    return {"name": name, "tokens_sha256": [hashlib.sha256(token_of(name).encode()).hexdigest()], **settings}


def token_of(name: str) -> str:
    """The token of a tenant made with `tenant`."""
    return f"token of {name}"


def config_in(directory: Path, settings: Mapping[str, Any], *, nvme: bool = False) -> Config:
    """A small daemon's configuration, all of its files in one directory; `settings` are sections."""
    own: dict[str, dict[str, Any]] = {
        "server": {
            "session_socket": directory / "session.sock",
            "grpc_socket": directory / "grpc.sock",
            "state_dir": directory / "state",
        },
        "dram": {"capacity_bytes": 8 * MIB, "segment_bytes": MIB, "huge_pages": "never", "lock": "never"},
        "limits": {"staging_bytes_per_session": 4 * MIB},
        "metrics": {"enabled": False},
        "nvme": {
            "capacity_bytes": 64 * MIB,
            "extent_bytes": 32 * MIB,
            "paths": [directory / "nvme"] if nvme else [],
            "io_deadline_s": 60.0,  # a disk that others use too is slow, and is none that hangs
        },
    }
    merged: dict[str, Any] = dict(own)
    for section, values in settings.items():
        merged[section] = {**own.get(section, {}), **values} if isinstance(values, Mapping) else values
    return Config.model_validate(merged)


@asynccontextmanager
async def serving(
    directory: Path, settings: Mapping[str, Any] | None = None, *, nvme: bool = False
) -> AsyncIterator[Daemon]:
    """A daemon that serves until the end of the block."""
    if nvme:
        (directory / "nvme").mkdir(exist_ok=True)
    daemon = Daemon(config_in(directory, settings or {}, nvme=nvme))
    try:
        await daemon.start()
        yield daemon
    finally:
        await daemon.stop(flush=False)


def check_nothing_held(daemon: Daemon) -> None:
    """AssertionError where sessions hold anything, or, without a lower tier to move blocks, anything is held at all."""
    parts = daemon.context.store.parts
    assert set(daemon.context.store.held().values()) == {0}, daemon.context.store.held()
    parts.dram.audit()
    if parts.below is None:
        spaces = [*parts.catalog.spaces.values(), *parts.catalog.retired]
        held = [entry for space in spaces for entry in space.entries.values() if entry.holds]
        assert not held, [(entry.pool.space.tenant, STATE_NAMES[entry.state], entry.holds) for entry in held]
        used, stored = parts.dram.usage().used_bytes, sum(space.used_bytes for space in spaces)
        assert used == stored, f"{used} bytes of slots for {stored} bytes of blocks"


async def eventually(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds that nothing signals. Raises TimeoutError."""
    for _ in range(int(timeout_s / POLL_S)):
        if condition():
            return
        await asyncio.sleep(POLL_S)
    raise TimeoutError(f"not so within {timeout_s:g} s")
