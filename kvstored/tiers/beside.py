"""What a volume keeps beside its index, so that deletes and the names of namespaces outlast it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvstored.keys import Namespace
from kvstored.tiers.directory import VolumeDirectory
from kvstored.tiers.formats import ExtentRow
from kvstored.tiers.namespaces import NamespaceFiles
from kvstored.tiers.tombstones import Tombstone, Tombstones


class Beside:
    """Used on the index's writer thread alone; its calls raise DeviceError."""

    def __init__(self, directory: VolumeDirectory) -> None:
        self._names = NamespaceFiles(directory.device, directory.namespaces)
        self._tombstones = Tombstones(directory.device, directory.tombstones)

    def open(self, namespaces: Iterable[Namespace], rows: Iterable[ExtentRow]) -> None:
        """Make it fit the index that was opened."""
        self._names.complete(namespaces)
        self._tombstones.open(rows)

    def close(self) -> None:
        """Let go of files."""
        self._tombstones.close()

    def remember(self, namespace: Namespace) -> None:
        """Keep a namespace, durably."""
        self._names.write(namespace)

    def forget(self, digests: Iterable[bytes]) -> None:
        """Keep namespaces no longer."""
        for digest in digests:
            self._names.remove(digest)

    def deleted(self, tombstones: Sequence[Tombstone]) -> None:
        """Keep, durably, that blocks were deleted."""
        self._tombstones.add(tombstones)

    def recycled(self, rows: Callable[[], Iterable[ExtentRow]]) -> None:
        """An extent was recycled: forget now and then what that made needless."""
        if self._tombstones.overdue:
            self._tombstones.forget(rows())
