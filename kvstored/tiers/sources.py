"""What an index can be checked against and made from, and what came of it. Passed between processes as JSON."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Source(msgspec.Struct, frozen=True):
    """A volume that this process, or its parent, has locked."""

    directory: str
    identity: bytes
    extent_bytes: int
    parent_pid: int = 0

    @property
    def index(self) -> Path:
        """Directory of the index."""
        return Path(self.directory) / "index"

    @property
    def extents(self) -> Path:
        """Directory of the extents."""
        return Path(self.directory) / "extents"

    @property
    def tombstones(self) -> Path:
        """File of the tombstones."""
        return Path(self.directory) / "tombstones"

    @property
    def namespaces(self) -> Path:
        """Directory of the namespaces' files."""
        return Path(self.directory) / "namespaces"


class Report(msgspec.Struct):
    """What a check or a rebuild found. The last five are a rebuild's."""

    reason: str = ""
    extents: int = 0
    records: int = 0
    live_bytes: int = 0
    namespaces: int = 0
    sealed_extents: int = 0
    salvaged_extents: int = 0
    salvaged_records: int = 0
    deleted_records: int = 0
    duplicate_records: int = 0
