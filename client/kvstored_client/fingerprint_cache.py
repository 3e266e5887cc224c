"""Fingerprints of files that were hashed before: in memory, and in one small file of the user's cache directory.

A file is known by device, inode, size, mtime and ctime, so that a changed or replaced one is hashed anew. The cache
file is only a saving: where it is absent, damaged, somebody else's or cannot be written, files are hashed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

ENTRIES_MAX: Final = 4096
_FILE_BYTES_MAX: Final = 1 << 20
_VERSION: Final = 1
# A file that was changed this recently may change again within one tick of its file system's clock.
SETTLED_S = 2.0


def cache_path() -> Path | None:
    """The cache file: `$XDG_CACHE_HOME/kvstored/weights.json`, or below `~/.cache`; None without a home."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "kvstored" / "weights.json"


class FingerprintCache:
    """Digests of files by what `stat` says of them. Safe for threads, and for several processes on one file."""

    def __init__(self, path: Path | None) -> None:
        """`path` is the cache file; None keeps digests in memory only."""
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}
        self._fresh: dict[str, str] = {}
        self._loaded = False

    def get(self, stat: os.stat_result, kind: str) -> str | None:
        """The digest of a file with this `stat`, or None. `kind` names the way of hashing."""
        with self._lock:
            if not self._loaded:
                self._known |= _read(self._path)
                self._loaded = True
            return self._known.get(_key(stat, kind))

    def put(self, stat: os.stat_result, kind: str, digest: str) -> None:
        """Remember a digest; `save` writes it. A file that was changed just now is not remembered."""
        if time.time() - max(stat.st_mtime_ns, stat.st_ctime_ns) / 1e9 < SETTLED_S:
            return
        with self._lock:
            self._known[_key(stat, kind)] = self._fresh[_key(stat, kind)] = digest
            self._known = _newest(self._known)

    def save(self) -> None:
        """Add what is new to the cache file, replaced in one step; a failure is no error."""
        with self._lock:
            fresh, self._fresh = self._fresh, {}
            if fresh and self._path is not None:
                kept = {key: value for key, value in _read(self._path).items() if key not in fresh}
                _write(self._path, _newest(kept | fresh))


def _key(stat: os.stat_result, kind: str) -> str:
    return f"{kind}:{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _newest(entries: dict[str, str]) -> dict[str, str]:
    """The last ones entered, as many as are kept."""
    return dict(list(entries.items())[-ENTRIES_MAX:])


def _checksum(entries: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(list(entries.items())).encode()).hexdigest()


def _read(path: Path | None) -> dict[str, str]:
    """All entries of a cache file, none where anything about it is wrong."""
    if path is None:
        return {}
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():  # somebody else could say what our weights are
                return {}
            content = json.loads(file.read(_FILE_BYTES_MAX))
        entries: dict[str, str] = content["entries"]
        whole = content["version"] == _VERSION and content["checksum"] == _checksum(entries)
        return _newest(entries) if whole else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _write(path: Path, entries: dict[str, str]) -> None:
    content = {"version": _VERSION, "checksum": _checksum(entries), "entries": entries}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".weights-")
    except OSError:
        return
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
