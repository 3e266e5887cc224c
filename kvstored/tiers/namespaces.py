"""Namespaces outside of the index, one small file each, so that its blocks keep their names when it is lost."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvstored.device.file import FileDevice
from kvstored.errors import DeviceError
from kvstored.keys import Namespace
from kvstored.tiers.formats import pack_namespace, unpack_namespace

SUFFIX: Final = ".namespace"


class NamespaceFiles:
    """The files of one volume."""

    def __init__(self, device: FileDevice, directory: Path) -> None:
        self._device = device
        self._directory = directory

    def write(self, namespace: Namespace) -> None:
        """Keep one, durably; raises DeviceError."""
        self._device.make_directory(self._directory)
        self._device.replace(self._path(namespace.digest.hex()), pack_namespace(namespace))

    def remove(self, digest: bytes) -> None:
        """Keep one no longer; raises DeviceError."""
        self._device.remove(self._path(digest.hex()), durably=True)

    def complete(self, namespaces: Iterable[Namespace]) -> None:
        """Write those that have no file; raises DeviceError."""
        there = self._device.names(self._directory)
        for namespace in namespaces:
            if namespace.digest.hex() + SUFFIX not in there:
                self.write(namespace)

    def read(self) -> list[Namespace]:
        """All that are whole."""
        found: list[Namespace] = []
        for name in sorted(self._device.names(self._directory)):
            with suppress(ValueError, DeviceError):  # damaged, or no file of ours
                digest = bytes.fromhex(name.removesuffix(SUFFIX))
                found.append(unpack_namespace(digest, self._device.read_whole(self._path(digest.hex())) or b""))
        return found

    def _path(self, name: str) -> Path:
        return self._directory / (name + SUFFIX)
