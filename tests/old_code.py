"""The project's code as it was at an earlier commit, for tests of what old and new make of each other's data."""

import pytest

from bench.past_code import unpack


def extract(commit, path, *parts):
    """Unpack the parts of a commit under `path`; skips the test where the checkout's history has it not."""
    try:
        return unpack(commit, path, *parts)
    except LookupError as error:
        pytest.skip(str(error))
