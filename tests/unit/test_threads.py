"""A volume's threads: they give way to the event loop where they may, and serve all the same where they may not."""

import os
from unittest.mock import Mock

import pytest

from kvstored.device.scheduling import NICE
from kvstored.tiers.threads import real_pool


def nice_of_a_thread(*, gives_way: bool) -> int:
    pool = real_pool(1, "t", gives_way=gives_way)
    try:
        return pool.submit(lambda: os.getpriority(os.PRIO_PROCESS, 0)).result(60)
    finally:
        pool.shutdown()


def test_threads_give_way_where_they_may(monkeypatch):
    set_to = Mock()
    monkeypatch.setattr(os, "setpriority", set_to)
    monkeypatch.setattr(os, "getpriority", Mock(return_value=0))
    nice_of_a_thread(gives_way=True)
    assert [call.args[2] for call in set_to.call_args_list] == [NICE]
    nice_of_a_thread(gives_way=False)
    assert set_to.call_count == 1


@pytest.mark.parametrize("nice", [NICE, NICE + 1, 19])
def test_a_daemon_that_is_nicer_already_stays_so(monkeypatch, nice):
    """Taking priority back needs CAP_SYS_NICE, and an initializer that raises breaks its pool."""
    monkeypatch.setattr(os, "getpriority", Mock(return_value=nice))
    monkeypatch.setattr(os, "setpriority", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert nice_of_a_thread(gives_way=True) == nice
    assert not os.setpriority.called


def test_threads_serve_where_their_priority_may_not_be_set(monkeypatch):
    monkeypatch.setattr(os, "getpriority", Mock(return_value=0))
    monkeypatch.setattr(os, "setpriority", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    assert nice_of_a_thread(gives_way=True) == 0
    assert os.setpriority.called
