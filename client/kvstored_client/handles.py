"""What `Client.stage` and `Client.prefetch` give."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from kvstored_client import prefetching
from kvstored_client.driver import ThreadDriver
from kvstored_client.results import Outcome, PrefetchStatus, PutResult
from kvstored_client.staged import Reserved, Staged, commit_staged


class StagedPut(Staged):
    """Blocks that are written where the daemon takes them from; see `Staged`. Left without a commit, it is undone."""

    def __init__(self, driver: ThreadDriver, reserved: Reserved, count: int) -> None:
        super().__init__(reserved, count)
        self._driver = driver

    def commit(self) -> PutResult:
        """Store what the views hold; readable when this returns."""
        return self._driver.data(commit_staged(self._driver.core, self), self.result, begun=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abort()


class Prefetch:
    """A prefetch under way. It goes on when this is dropped; `cancel` ends it."""

    def __init__(self, driver: ThreadDriver, started: prefetching.Started) -> None:
        self._driver = driver
        self._started = started

    @property
    def outcome(self) -> Outcome:
        """HIT: all is resident; PENDING: started; MISS or THROTTLED: nothing was started."""
        return self._started.outcome

    @property
    def resident_blocks(self) -> int:
        """Leading blocks that were in DRAM already."""
        return self._started.resident_blocks

    @property
    def queued_blocks(self) -> int:
        """Blocks on their way."""
        return self._started.queued_blocks

    def poll(self) -> PrefetchStatus:
        """How far it is."""
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> PrefetchStatus:
        """How far it is, when it is done or after `timeout_s`."""
        asking = prefetching.poll(self._driver.core, self._started, timeout_s)
        return self._driver.data(asking, self._started.unknown, begun=True)

    def cancel(self) -> PrefetchStatus:
        """End it; when this returns an answer of the daemon, no copy of it runs any more."""
        cancelling = prefetching.cancel(self._driver.core, self._started)
        return self._driver.data(cancelling, self._started.unknown, begun=True)
