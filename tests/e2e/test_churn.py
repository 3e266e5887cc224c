"""A short churn: clients die by `kill -9` at random, nothing is wrong and nothing is held."""

import pytest

from tests.churn import LEAKS, churn


@pytest.mark.timeout(120)
def test_clients_that_die_at_random_get_no_wrong_byte_and_leave_nothing_held(tmp_path):
    figures = churn(seconds=15, seed=7, directory=tmp_path)
    assert figures["wrong_bytes"] == 0
    assert {leak.key: figures[leak.key] for leak in LEAKS} == {leak.key: 0 for leak in LEAKS}
    assert figures["client_errors"] == 0
    # Without these the run would have shown nothing.
    assert figures["kills"] >= 3
    assert figures["puts"] > 100
    assert figures["hits"] > 100
    assert figures["demoted_blocks"] > 0
    assert figures["promoted_blocks"] > 0
