"""Types of settings: sizes with units, addresses, socket paths. Each says what would be right.

Sizes are integers or text with a unit: `"8GiB"`, `"512MiB"`, decimal `"8GB"` too.
"""

from __future__ import annotations

import os
import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Final, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
PAGE_BYTES: Final = 4096
BYTES_MAX: Final = (1 << 63) - 1
SOCKET_PATH_BYTES_MAX: Final = 107  # sun_path, less its closing zero

_UNITS: Final = {
    **{unit: 1 << (10 * power) for power, unit in enumerate(("", "kib", "mib", "gib", "tib"))},
    **{unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb"))},
}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


def parse_bytes(value: object) -> int:
    """A size in bytes from an integer or a text such as `"8GiB"`. Raises ValueError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return _possible(value)
    match = _SIZE.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if match is None or match[2] not in _UNITS:
        raise ValueError('must be a size in bytes, such as 8589934592 or "8GiB"')
    return _possible(Decimal(match[1]) * _UNITS[match[2]])


def _possible(size_bytes: int | Decimal) -> int:
    if size_bytes > BYTES_MAX:  # messages and files that carry it have 64 bits for it
        raise ValueError("must be less than 8 EiB")
    return int(size_bytes)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `"host:port"` or `"[v6]:port"`. Raises ValueError where it is neither."""
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError('must be "host:port", such as "127.0.0.1:9464"')
    return host, int(port)


def _check_address(address: str) -> str:
    split_address(address)
    return address


def _check_socket_path(path: Path) -> Path:
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise ValueError(f"must be at most {SOCKET_PATH_BYTES_MAX} bytes long, the system's limit for a Unix socket")
    return path


def _empty_is_none(value: object) -> object:
    return None if value == "" else value


def _must(pattern: str, right: str) -> BeforeValidator:
    """Text of a fixed form; `right` ends the sentence "must be ..."."""
    form = re.compile(pattern)

    def check(value: object) -> object:
        if not isinstance(value, str) or not form.fullmatch(value):
            raise ValueError(f"must be {right}")
        return value

    return BeforeValidator(check)


def uuid_bytes(uuid: str) -> bytes:
    """The 16 bytes of a `DeviceUuid`."""
    return bytes.fromhex(uuid.removeprefix("GPU-").removeprefix("MIG-").replace("-", ""))


T = TypeVar("T")
Maybe = Annotated[T | None, BeforeValidator(_empty_is_none)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Address = Annotated[str, AfterValidator(_check_address)]
SocketPath = Annotated[Path, AfterValidator(_check_socket_path)]
Share = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(ge=0, le=86400)]
FileMode = Annotated[str, _must("0?[0-7]{3}", 'octal permissions in quotes, such as "0660"')]
DeviceUuid = Annotated[
    str,
    _must(
        "((GPU|MIG)-)?[0-9a-fA-F]{8}-?([0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}",
        "the UUID of a GPU as nvidia-smi -L shows it, such as GPU-01234567-89ab-cdef-0123-456789abcdef",
    ),
]
TenantName = Annotated[
    str, _must("[a-z0-9][a-z0-9._-]{0,62}", "1 to 63 of a-z, 0-9, '.', '_', '-', starting with a letter or a digit")
]
CredentialName = Annotated[
    str, _must("[A-Za-z0-9_][A-Za-z0-9._-]{0,254}", "the name of a credential: letters, digits, '.', '_', '-'")
]
TokenDigest = Annotated[
    str, _must("[0-9a-f]{64}", "the SHA-256 of a token as 64 lower-case hex digits (printf %s TOKEN | sha256sum)")
]


class Section(BaseModel):
    """Settings that belong together; a TOML table."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _sane(cls, value: object) -> object:
        """What is text everywhere else, but no name of a file, and numbers that are none."""
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and "\0" in item:
                raise ValueError("must not contain a zero byte")
            if isinstance(item, bool) and item is not value:
                raise ValueError("must hold numbers or texts, not true or false")
        return value
