"""What every test starts from."""

import logging

import pytest


@pytest.fixture(autouse=True)
def _client_logs_as_before():
    """A command of `kvstorectl` that ran in this process silences the client's warnings: not for the next test."""
    log = logging.getLogger("kvstored_client")
    level = log.level
    yield
    log.setLevel(level)
