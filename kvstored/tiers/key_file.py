"""The file of a tenant's data key: the key, wrapped by the tenant's master key, one page, the same twice.

    keys/TENANT.key, keys/TENANT.key.copy   JSON, padded with zeros to 4 KiB: `Wrapped`

Written in place, first one and then the other, each synced, never by a new file: so that no block of
the file system keeps what an earlier master key opens, and destroying the key is to overwrite both.
The key is of use only when both are durable. So a file that is damaged is a matter of its copy, and
a damaged one without a copy, or one of zeros, is what a crash left of one never used or destroyed.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from kvstored.device.file import ALIGN_BYTES, FileDevice
from kvstored.errors import CorruptData, DeviceError
from kvstored.tiers.sealing import ALGORITHMS, KEY_ID_BYTES, DataKey, aead

SUFFIX: Final = ".key"
_COPY: Final = ".copy"
_FORMAT: Final = 1
_NONCE_BYTES: Final = 12
_WRAPPING: Final = ALGORITHMS["aes-256-gcm"]


class Wrapped(msgspec.Struct, frozen=True):
    """A data key that only its master key opens; bytes as hex digits, `crc` is that of the rest."""

    format: int
    tenant: str
    id: str
    nonce: str
    key: str
    crc: int = 0

    def expected_crc(self) -> int:
        """What `crc` must be."""
        return zlib.crc32(f"{self.format} {self.tenant} {self.id} {self.nonce} {self.key}".encode())


def wrap(tenant: str, volume: bytes, key: DataKey, master: bytes) -> Wrapped:
    """Encrypt a data key with the master key."""
    nonce = os.urandom(_NONCE_BYTES)
    wrapped = aead(_WRAPPING, master).encrypt(nonce, key.secret, _about(tenant, volume, key.id))
    made = Wrapped(_FORMAT, tenant, key.id.hex(), nonce.hex(), wrapped.hex())
    return msgspec.structs.replace(made, crc=made.expected_crc())


def unwrap(wrapped: Wrapped, volume: bytes, master: bytes) -> DataKey | None:
    """The data key, or None where this is not its master key."""
    from cryptography.exceptions import InvalidTag

    id_ = bytes.fromhex(wrapped.id)
    about = _about(wrapped.tenant, volume, id_)
    try:
        secret = aead(_WRAPPING, master).decrypt(bytes.fromhex(wrapped.nonce), bytes.fromhex(wrapped.key), about)
    except InvalidTag:
        return None
    return DataKey(id_, secret)


def _about(tenant: str, volume: bytes, id_: bytes) -> bytes:
    return b"kvstored data key 1" + volume + id_ + tenant.encode()


def tenants_with_keys(device: FileDevice, directory: Path) -> list[str]:
    """The tenants that have a key file, whole or not; raises DeviceError."""
    names = (name.removesuffix(_COPY) for name in device.names(directory))
    return sorted({name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)})


def read_key(device: FileDevice, directory: Path, tenant: str) -> Wrapped | None:
    """A tenant's wrapped data key, or None where there is none; the copy that is damaged is written anew.

    Raises CorruptData where there was one and neither copy is whole, DeviceError where none can be read.
    """
    found: list[Wrapped | None] = []
    there: list[bytes] = []
    failure: DeviceError | None = None
    for path in _paths(directory, tenant):
        data: bytes | None = b""
        try:
            data = device.read_whole(path)
        except DeviceError as error:  # a bad sector, say: that is what there are two for
            failure = error
        found.append(_decode(data or b"", tenant))
        there += [] if data is None else [data]
    whole = next((wrapped for wrapped in found if wrapped is not None), None)
    if whole is not None:
        damaged = [path for path, one in zip(_paths(directory, tenant), found, strict=True) if one != whole]
        with suppress(DeviceError):
            _write(device, damaged, whole)
        return whole
    if failure is not None:
        raise failure
    if len(there) == 2 and any(map(any, there)):
        raise CorruptData(f"{directory / tenant}{SUFFIX} and its copy are damaged: put them back from a backup")
    return None


def write_key(device: FileDevice, directory: Path, wrapped: Wrapped) -> None:
    """Write both files, durably, one after the other; raises DeviceError."""
    device.make_directory(directory)
    _write(device, _paths(directory, wrapped.tenant), wrapped)


def destroy_key(device: FileDevice, directory: Path, tenant: str) -> None:
    """Overwrite both files with zeros, durably, then remove them; raises DeviceError: then one may be there still."""
    paths = [path for path in _paths(directory, tenant) if device.exists(path)]
    for path in paths:
        _overwrite(device, path, bytes(ALIGN_BYTES))
    for path in paths:
        device.remove(path, durably=True)


def _paths(directory: Path, tenant: str) -> Sequence[Path]:
    return directory / f"{tenant}{SUFFIX}", directory / f"{tenant}{SUFFIX}{_COPY}"


def _write(device: FileDevice, paths: Sequence[Path], wrapped: Wrapped) -> None:
    for path in paths:
        _overwrite(device, path, msgspec.json.encode(wrapped).ljust(ALIGN_BYTES, b"\0"))


def _overwrite(device: FileDevice, path: Path, page: bytes) -> None:
    assert len(page) == ALIGN_BYTES, "one page, written in place"
    file = device.open(path, direct=False)
    try:
        device.write_bytes(file, 0, page)
        device.sync(file)
    finally:
        device.close(file)


def _decode(data: bytes, tenant: str) -> Wrapped | None:
    with suppress(ValueError):
        found = msgspec.json.decode(data[:ALIGN_BYTES].rstrip(b"\0"), type=Wrapped)
        whole = found.crc == found.expected_crc() and found.format == _FORMAT and found.tenant == tenant
        if whole and len(bytes.fromhex(found.id)) == KEY_ID_BYTES:
            return found
    return None
