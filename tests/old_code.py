"""The project's code as it was at an earlier commit, for tests of what old and new make of each other's data."""

import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def extract(commit, path, *parts):
    """Unpack the parts of a commit under `path`; skips the test where the checkout's history has it not."""
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit, *parts], capture_output=True)
    if archive.returncode:
        pytest.skip(f"commit {commit} is not in this checkout's history")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(path, filter="data")
    return path
