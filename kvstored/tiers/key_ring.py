"""The data keys of one volume, by tenant: there, or locked and why.

The master key is with whoever calls: it is used and not kept. What blocks is run in the volume's
threads; what was found out is looked up by the event loop, and by threads, without waiting.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from kvstored.errors import CorruptData, DeviceError
from kvstored.tiers.base import Record
from kvstored.tiers.directory import VolumeDirectory
from kvstored.tiers.key_file import (
    Wrapped,
    destroy_key,
    read_key,
    tenants_with_keys,
    unwrap,
    wrap,
    write_key,
)
from kvstored.tiers.sealing import DataKey, Lock, key_id, lock_of

NOT_THERE: Final = "its key has not been read yet"
NO_FIT: Final = "its data key was wrapped with another master key"

_log = logging.getLogger(__name__)

KnownKeys = dict[bytes, tuple[str, DataKey]]
"""Data keys by id, with their tenant."""


class OpenKeys(Protocol):
    """What all volumes share.

    `algorithms`: whose new blocks are encrypted, and how. `known`: keys that were unwrapped since the start;
    it outlives a volume, so that one that is opened anew does not need the master keys again.
    """

    algorithms: dict[str, int]
    known: KnownKeys


class KeyRing:
    """The data keys of one open volume."""

    def __init__(self, directory: VolumeDirectory, shared: OpenKeys) -> None:
        self.algorithms: Mapping[str, int] = shared.algorithms
        self.open: dict[str, DataKey] = {}
        self.locked: dict[str, str] = {}
        self.using: Counter[str] = Counter()  # stores under way
        self._ids: dict[bytes, DataKey] = {}
        self._directory = directory
        self._known = shared.known

    # --- asked for every batch ---

    def opens(self, record: Record) -> bool:
        """Whether a record's bytes can be had."""
        return not record.seal or key_id(record.seal) in self._ids

    def lock_of(self, record: Record, about: bytes) -> Lock | None:
        """How an encrypted record is read; None where its key is not there."""
        key = self._ids.get(key_id(record.seal))
        return None if key is None else lock_of(key, record.seal, about)

    @contextmanager
    def use(self, tenant: str) -> Iterator[None]:
        """Keep the tenant's key from being overwritten while blocks are encrypted with it."""
        self.using[tenant] += 1
        try:
            yield
        finally:
            self.using[tenant] -= 1

    # --- in the volume's threads ---

    def load(self) -> None:
        """Find out which tenants have a key here; those known from before are open at once. Raises DeviceError."""
        for tenant in tenants_with_keys(self._directory.device, self._directory.keys):
            wrapped = self._read(tenant)
            if wrapped is not None and (known := self._known.get(bytes.fromhex(wrapped.id))) is not None:
                self._open(tenant, known[1])
            elif wrapped is not None:
                self.locked[tenant] = NOT_THERE

    def unlock(self, tenant: str, masters: Sequence[bytes], *, make: bool) -> None:
        """Unwrap the tenant's data key with the master key that fits, made with the first if there is none.

        What fits another than the first is wrapped anew with the first. Raises DeviceError.
        """
        wrapped = self._read(tenant)
        if wrapped is None:
            if make and tenant not in self.locked:
                self._make(tenant, masters[0])
            return
        for number, master in enumerate(masters):
            key = unwrap(wrapped, self._directory.identity, master)
            if key is not None:
                self._open(tenant, key)
                if number:
                    self._replace_master(tenant, key, masters[0])
                return
        self.locked[tenant] = NO_FIT

    def rewrap(self, tenant: str, masters: Sequence[bytes]) -> bool:
        """Wrap the data key with the first master key. False: it is locked, or there is none. Raises DeviceError."""
        if tenant not in self.open:
            self.unlock(tenant, masters, make=False)
        key = self.open.get(tenant)
        if key is not None:
            self._write(tenant, key, masters[0])
        return key is not None

    def destroy(self, tenant: str) -> None:
        """Overwrite the wrapped data key, every copy, durably; raises DeviceError: then it may be there still."""
        destroy_key(self._directory.device, self._directory.keys, tenant)
        self.locked.pop(tenant, None)

    def _read(self, tenant: str) -> Wrapped | None:
        try:
            wrapped = read_key(self._directory.device, self._directory.keys, tenant)
        except (CorruptData, DeviceError) as error:
            self.locked[tenant] = str(error)
            return None
        if wrapped is None:
            self.locked.pop(tenant, None)
        return wrapped

    def _make(self, tenant: str, master: bytes) -> None:
        self._directory.allow_sealed()
        key = DataKey.random()
        self._write(tenant, key, master)
        self._open(tenant, key)

    def _replace_master(self, tenant: str, key: DataKey, master: bytes) -> None:
        try:
            self._write(tenant, key, master)
        except DeviceError as error:  # it is open all the same
            _log.warning("tenant %s: its earlier master key is still needed: %s", tenant, error)

    def _write(self, tenant: str, key: DataKey, master: bytes) -> None:
        wrapped = wrap(tenant, self._directory.identity, key, master)
        write_key(self._directory.device, self._directory.keys, wrapped)

    def _open(self, tenant: str, key: DataKey) -> None:
        self._known[key.id] = (tenant, key)
        self._ids[key.id] = key
        self.open[tenant] = key
        self.locked.pop(tenant, None)

    # --- on the event loop ---

    def take(self, tenant: str) -> DataKey | None:
        """Take the key away: from here on nothing is encrypted or decrypted with it."""
        key = self.open.pop(tenant, None)
        if key is not None:
            self._ids.pop(key.id, None)
        return key
