"""The index's simulated twin: the index itself over LMDB in memory, whose files live as long as a test wants.

It passes the same contract as the real one (`contract_index`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstored.testing.memory_lmdb import Environment, IndexFiles, Trouble
from kvstored.tiers.directory import VolumeDirectory
from kvstored.tiers.index import Index


class MemoryIndex(Index):
    """An index in memory. `sync` False: commits are durable only after `sync`."""

    def __init__(
        self,
        path: Path,
        volume: int,
        map_bytes: int,
        files: IndexFiles,
        *,
        sync: bool = True,
        trouble: Trouble | None = None,
    ) -> None:
        super().__init__(path, volume, map_bytes)
        self.files = files
        self._syncs = sync
        self._trouble = trouble or Trouble()

    def _open_environment(self) -> Any:
        self._trouble.reading()
        return Environment(self.files, map_bytes=self._map_bytes, sync=self._syncs, trouble=self._trouble)

    def _prepare(self, directory: VolumeDirectory) -> None:
        """What is in memory is neither damaged nor lost."""

    def _mark_clean(self, directory: VolumeDirectory) -> None:
        """There is no file to mark."""
