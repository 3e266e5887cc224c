"""A worker's half of the connector: carries out what the scheduler's half ordered, and reports how it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from kvstored_client import Namespace
from kvstored_client.engines.vllm.counts import Counts
from kvstored_client.engines.vllm.loader import Loader
from kvstored_client.engines.vllm.orders import ALL, Report, Step
from kvstored_client.engines.vllm.saver import Saver
from kvstored_client.engines.vllm.settings import Settings
from kvstored_client.paged import PagedKV

_IDLE_WAIT_S: Final = 0.001  # a step that computes nothing may wait so long for a load


class WorkerSide:
    """Loads and saves of one worker. Called by its one thread, in the order of a step."""

    def __init__(
        self,
        settings: Settings,
        client: Any,
        pages: Sequence[PagedKV],
        namespaces_of: Callable[[str, str], Sequence[Namespace]],
        *,
        saves: bool = True,
    ) -> None:
        """`pages` by group; `namespaces_of` has a generation's and an adapter's, by group. `saves`: whether this worker
        stores; of workers that hold the same bytes one does."""
        self._settings = settings
        self._client = client
        self._namespaces_of = namespaces_of
        self._stores = saves and settings.writes
        self.counts = Counts()
        self._loader = Loader(client, pages, self.counts, settings.load_timeout_s)
        self._saver = Saver(client, pages, self.counts, settings.save_wait_s)
        self._leaving: set[str] = set()
        self._saved: Step | None = None  # the last step whose saves were begun
        self._now: list[str] = []  # loaded within this step
        self._drop_saves = False
        self._finished: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._failed: set[str] = set()

    def before(self, step: Step) -> None:
        """Before anything is written: what was to be saved of it is given up."""
        self._saver.cancel(step.taken)

    def load(self, step: Step) -> None:
        """Begin the loads, or carry them out where the step waits for them."""
        if not step.loads:
            return
        loads = [(load, self._namespaces_of(step.generation, load.adapter)) for load in step.loads]
        if self._settings.load_async:
            self._loader.submit(loads)
            return
        # What this step computes upon blocks that did not come is wrong, and must not be stored.
        self._drop_saves = not self._loader.load_now(loads)
        self._now = [load.request_id for load in step.loads]

    def save(self, step: Step) -> None:
        """The step has been computed: begin its saves. A second call for one step does nothing."""
        if step is self._saved:
            return
        self._saved = step
        if self._stores and not self._drop_saves:
            self._saver.submit([(save, self._namespaces_of(step.generation, save.adapter)) for save in step.saves])
        else:
            self._saver.refuse(step.saves, ALL if not self._stores else 0)  # another worker stores them
        self._drop_saves = False
        self._leaving.update(step.leaving)
        if step.idle:
            self._loader.wait(_IDLE_WAIT_S)

    def end(self, step: Step) -> None:
        """Before it is asked what has finished. Before 0.31 vLLM says nothing of saves in steps without a forward pass,
        which bring those of requests that have ended."""
        if step.idle:
            self.save(step)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Requests whose blocks are not needed any more for saves, and those whose loads have ended."""
        ended, bad, failed = self._loader.take_ended()
        self._bad_blocks |= bad
        self._failed |= failed
        self._finished |= ended
        gone = self._leaving - self._saver.requests() if self._leaving else set()
        self._leaving -= gone
        return gone, ended

    def take_bad_blocks(self) -> set[int]:
        """Blocks that did not come, of loads that were reported; asked after `take_finished`."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_failed(self) -> set[str]:
        """Requests whose loads did not bring all blocks, of those that were reported; asked after `take_finished`."""
        failed, self._failed = self._failed, set()
        return failed

    def take_report(self) -> Report:
        """What has ended, for the scheduler's half; asked after `take_finished`."""
        loaded = dict.fromkeys([*self._finished, *self._now], 1)
        self._finished, self._now = set(), []
        stored = self._saver.take_ended()
        return Report(dict.fromkeys(stored, 1), stored, loaded)

    def take_counts(self) -> dict[str, float]:
        """What was counted since the last call."""
        return self.counts.take()

    def close(self) -> None:
        """End the loads and saves under way, then the session."""
        self._loader.close()
        self._saver.close()
        self._client.close()
