"""The file of what admins changed: one JSON object with a CRC, replaced in one step.

{"format": 1, "crc32": of the bytes of the body as they stand here, "body": Changes}
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

import msgspec

from kvstored.config.tenants import Tenant, check_disjoint
from kvstored.device.state_directory import StateDirectory
from kvstored.errors import ConfigError, DeviceError, InvalidArgument
from kvstored.tenancy.merge import Changes, Check
from kvstored.tenancy.tenants import Tenants

FILE_NAME: Final = "tenants.json"
FORMAT: Final = 1


class _Envelope(msgspec.Struct):
    """The file."""

    format: int
    crc32: int
    body: msgspec.Raw


def write_changes(state: StateDirectory, changes: Changes) -> None:
    """Keep them, durably; blocks. Raises ConfigError or DeviceError, and then the file is what it was."""
    body = msgspec.json.encode(changes)
    envelope = _Envelope(FORMAT, zlib.crc32(body), msgspec.Raw(body))
    state.replace(FILE_NAME, msgspec.json.encode(envelope) + b"\n")


def read_changes(state: StateDirectory, *, take: bool = True) -> Changes:
    """What was kept; nothing where there is no file. Blocks.

    Takes the directory where there is a file, unless told not to. Raises ConfigError, which names the file, where it
    cannot be read, is damaged or is of a later version: to go on without it could let somebody in who was shut out.
    """
    path = state.path / FILE_NAME
    try:
        data = state.read(FILE_NAME)
        if data is None:
            return Changes()
        if take:
            state.take()
    except DeviceError as error:
        raise ConfigError(
            f"server.state_dir: {error}: make it readable and writable for the daemon, or name another directory"
        ) from None
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
    except msgspec.MsgspecError:
        raise _damaged(str(path)) from None
    if envelope.format > FORMAT:
        raise ConfigError(f"{path} has format {envelope.format}, this kvstored reads {FORMAT}: upgrade kvstored")
    if envelope.format < FORMAT or zlib.crc32(bytes(envelope.body)) != envelope.crc32:
        raise _damaged(str(path))
    try:
        return msgspec.json.decode(envelope.body, type=Changes)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} says what this kvstored does not know ({error}): upgrade kvstored") from None


def open_tenants(
    configured: Sequence[Tenant], state: StateDirectory, check: Check = check_disjoint, *, take: bool = True
) -> Tenants:
    """What is configured, and what admins changed since; blocks. Raises ConfigError, also where both do not fit.

    `take` as for `read_changes`: a daemon may have the directory while somebody checks its next configuration.
    """
    changes = read_changes(state, take=take)
    try:
        return Tenants(configured, changes, check)
    except InvalidArgument as error:
        raise ConfigError(
            f"{state.path / FILE_NAME} and the configuration do not go together: {error}: change the configuration"
        ) from None


def _damaged(path: str) -> ConfigError:
    return ConfigError(
        f"{path} is damaged: put back a copy of it, or move it away, and what admins changed about tenants is forgotten"
    )
