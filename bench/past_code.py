"""The project's code as it was at an earlier commit, unpacked from the checkout's history."""

from __future__ import annotations

import subprocess
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


def unpack(commit: str, path: Path, *parts: str) -> Path:
    """Unpack parts of a commit (`kvstored`, `client`, `proto`) under a directory, and return that.

    Raises LookupError where the history of this checkout has no such commit.
    """
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, *parts], capture_output=True, check=False, stdin=subprocess.DEVNULL
    )
    if archive.returncode:
        raise LookupError(f"commit {commit} is not in this checkout's history: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(path, filter="data")
    return path
