"""The daemon as a process, before it is one."""

import gc

import pytest

from kvstored.daemon import process


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    monkeypatch.setattr(process, "raise_limits", lambda: None)  # this process keeps its own
    yield
    gc.unfreeze()


def test_what_was_imported_is_no_work_for_the_collector_when_the_daemon_begins(monkeypatch):
    async def main(config, manager):
        return len(gc.get_objects()), gc.get_freeze_count()

    monkeypatch.setattr(process, "_main", main)
    looked_at, passed_over = process.run(None)
    assert passed_over > 10_000
    assert looked_at < passed_over / 10
