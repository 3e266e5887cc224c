"""The keys of `kv_connector_extra_config`, checked by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvstored_client.dialing import REMOTE, target_of

MODES: Final = ("read-write", "read-only", "write-only")


class UnsupportedError(ValueError):
    """This engine cannot be served as it is configured; the message names what stands in the way."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How one engine uses the store. Every key has a default."""

    address: str = ""  # unix:PATH of the session socket; empty: KVSTORED_ADDRESS, else the daemon's default
    tenant: str = ""  # the tenant that the daemon must take this engine for; empty: whichever it is
    token_file: str = ""  # a file with the token, where the daemon knows tenants by token
    mode: str = "read-write"
    min_tokens: int = 256  # shorter prompts, and shorter hits, are left alone
    # How fast the engine computes a prompt. What would take longer to come up from NVMe is computed; 0: load it always.
    prefill_tokens_per_s: float = 0.0
    load_async: bool = True  # False: the step waits for its loads
    lookup_wait_s: float = 2.0  # the longest that a request waits for its blocks to come up before it is computed
    load_timeout_s: float = 30.0  # a load that has not begun by then is given up
    save_wait_s: float = 1.0  # how long a save waits for room
    timeout_s: float = 1.0  # the longest that the daemon may take for one answer
    staging_mib: int = 64  # memory for saves under way, per worker
    weights: str = ""  # directory of the weights, where the model's name does not lead to it
    model_version: str = ""  # text that tells these weights from others, in place of their fingerprint

    @property
    def reads(self) -> bool:
        """Whether blocks are loaded."""
        return self.mode != "write-only"

    @property
    def writes(self) -> bool:
        """Whether blocks are saved."""
        return self.mode != "read-only"


def settings_from(extra: Mapping[str, Any]) -> Settings:
    """Settings from the engine's configuration. Raises UnsupportedError naming a key that is wrong."""
    known = {field.name: field for field in dataclasses.fields(Settings)}
    for key in extra:
        if key not in known:
            raise UnsupportedError(f"kv_connector_extra_config has no key {key!r}: it knows {', '.join(known)}")
    values = {key: _value(key, value, type(known[key].default)) for key, value in extra.items()}
    settings = Settings(**values)
    if settings.mode not in MODES:
        raise UnsupportedError(f"mode {settings.mode!r}: it must be one of {', '.join(MODES)}")
    try:
        target = target_of(settings.address or None)
    except ValueError as error:
        raise UnsupportedError(str(error)) from None
    if target.startswith(REMOTE):
        raise UnsupportedError(f"address {target}: blocks come through shared memory: unix:PATH")
    for key in ("timeout_s", "lookup_wait_s", "load_timeout_s"):
        if not getattr(settings, key):
            raise UnsupportedError(f"{key} is 0: nothing would ever be loaded; it must be more")
    return settings


def _value(key: str, value: object, wanted: type) -> Any:
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise UnsupportedError(f"{key} is {value!r}: it must be of type {wanted.__name__}")
    if isinstance(value, int | float) and not value >= 0:
        raise UnsupportedError(f"{key} is {value}: it must be 0 or more")
    return value
