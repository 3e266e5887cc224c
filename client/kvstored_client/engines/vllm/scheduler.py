"""The scheduler's half of the connector: what to load, what to save, what is held meanwhile. No step waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from kvstored_client.engines.vllm.adapters import Adapters
from kvstored_client.engines.vllm.counts import Counts
from kvstored_client.engines.vllm.cuts import Held, Track
from kvstored_client.engines.vllm.lookups import Lookups
from kvstored_client.engines.vllm.orders import Load, Report, Run, Save, Step
from kvstored_client.engines.vllm.pins import Pins
from kvstored_client.engines.vllm.requests import Saves, Tracked, written_blocks
from kvstored_client.engines.vllm.settings import Settings

_LOG = logging.getLogger(__name__)
_MISSES_BEFORE_A_WORD: Final = 100
_IDLE_WAIT_S: Final = 0.001  # a step that computes nothing may wait so long for an answer


class Events(Protocol):
    """Who hears what is stored and what is gone: `kv_events.KVEvents`."""

    def begun(self, save: Save, request: Any, end_tokens: int) -> None:
        """A save has begun, whose last block ends after so many tokens at most."""

    def ended(self, save: Save, stored: int) -> None:
        """It is over; bit i of `stored` says whether its block i is in the store."""

    def gone(self, load: Load, missing: set[int]) -> None:
        """A load did not bring these of its blocks."""


class SchedulerSide:
    """State of all requests, as the engine's scheduler tells it. Used by one thread."""

    def __init__(
        self,
        settings: Settings,
        lookups: Lookups,
        saves: Saves,
        tracks_of: Callable[[str, str], tuple[Track, ...]],
        adapters: Adapters,
        events: Events | None = None,
    ) -> None:
        """`tracks_of` makes the namespaces of a generation and an adapter's identity, the same ones each time; `events`
        hears what is stored, where somebody wants to know."""
        self._settings = settings
        self._lookups = lookups
        self._saves = saves
        self._tracks_of = tracks_of
        self._adapters = adapters
        self._events = events
        self._shape = lookups.shape
        self.counts: Counts = lookups.counts
        self._generation = ""
        self._tracked: dict[str, Tracked] = {}
        self._orders: list[Load] = []
        self._leaving: list[str] = []
        self._last_saves: list[Save] = []  # of requests that have ended
        self._under_way: dict[str, tuple[Load, Held | None, int]] = {}  # loads: order, hold, workers that reported
        self._brings: dict[str, set[bytes]] = {}  # the block hashes that each of them is for
        self._loading: set[bytes] = set()  # all of these
        self._told: set[str] = set()
        self._hits = self._misses = 0

    def use_pins(self, pins: Pins) -> None:
        """The engine can hold blocks for those who save them."""
        self._saves.pins = pins

    # ---- what is there ----

    def matched(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed_tokens` that can be loaded, and whether beside the steps; None: ask again."""
        tracked = self._track(request)
        if not self._settings.reads or tracked.no_load:
            return 0, False
        if not self._adapters.settled(request):
            return None, False
        if not self._served(tracked):
            return 0, False
        unit = self._shape.unit_tokens
        start = computed_tokens // unit
        # At least one token is left for the model to compute, for its logits.
        end = min(len(request.block_hashes) * self._shape.hash_tokens, request.num_tokens - 1) // unit
        if end <= start or (end - start) * unit < self._settings.min_tokens:
            self._lookups.drop(request.request_id)
            return 0, False
        if self._shape.shares_loads and request.block_hashes[start * unit // self._shape.hash_tokens] in self._loading:
            return None, False  # another request loads it: then it is in the engine's own cache
        tracks = tracked.tracks_in(self._generation, self._tracks_of)
        found = self._lookups.answer(request.request_id, start, request.block_hashes, end, tracks)
        if found is None:
            return None, False
        tokens = (found - start) * unit
        if tokens < max(1, self._settings.min_tokens):
            return 0, False
        return tokens, self._settings.load_async

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """The engine has taken blocks of each group for the request; `external_tokens` of them are to be loaded."""
        tracked, request_id = self._track(request), request.request_id
        tracked.block_ids = [list(table) for table in block_ids]
        if request_id in self._under_way:
            return  # the second call of a load beside the steps
        if external_tokens <= 0:
            if self._lookups.drop(request_id):
                self._missed()
            return
        end = self._lookups.range_of(request_id)[1] * self._shape.unit_tokens
        order = Load(request_id, self._runs(tracked, end - external_tokens, end), tracked.adapter)
        self._under_way[request_id] = (order, self._lookups.take(request_id), 0)
        per_hash = self._shape.hash_tokens
        brings = set(request.block_hashes[(end - external_tokens) // per_hash : end // per_hash])
        self._brings[request_id] = brings
        self._loading |= brings
        self._orders.append(order)
        tracked.loading = frozenset(order.block_ids)
        tracked.saved_tokens = end
        self.counts.add(hit_tokens=external_tokens)
        self._hits += 1

    def _runs(self, tracked: Tracked, start_tokens: int, end_tokens: int) -> list[Run]:
        """What to load of each group so that the request can go on after `end_tokens`, of which it has `start`."""
        runs = []
        for group, table in zip(self._shape.groups, tracked.block_ids, strict=True):
            end = end_tokens // group.block_tokens
            first = max(start_tokens // group.block_tokens, group.first_needed(end_tokens))
            if first < end:
                keys = self._shape.keys(group.block_tokens, tracked.request.block_hashes, first, end)
                runs.append(Run(group.number, keys, table[first:end]))
        return runs

    # ---- a step ----

    def step(self, output: Any) -> Step:
        """The orders of this step."""
        idle = not output.total_num_scheduled_tokens
        step = Step(loads=self._orders, leaving=self._leaving, idle=idle, generation=self._generation)
        self._orders, self._leaving = [], []
        step.saves, self._last_saves = self._last_saves, []
        saving = self._saves.blocks_under_way > 0
        written = [block for load in step.loads for block in load.block_ids] if saving else []
        due: list[tuple[Tracked, int, int]] = []
        for tracked, before in self._scheduled(output):
            if saving:
                written += written_blocks(self._shape, tracked.block_ids, before)
            upto = before + output.num_scheduled_tokens[tracked.request.request_id]
            if self._saves.any_due(tracked, upto):
                due.append((tracked, before, upto))
        # Before this step's own saves: those read what it writes.
        step.taken = self._saves.take_back(written) if saving else {}
        for tracked, before, upto in due:
            step.saves += self._begin_saves(tracked, before, upto)
        if idle and self._lookups.waiting:
            self._lookups.wait(_IDLE_WAIT_S)
        return step

    def _scheduled(self, output: Any) -> Iterable[tuple[Tracked, int]]:
        """The requests of a step with their tokens computed so far; their block ids are brought up to date."""
        for new in output.scheduled_new_reqs:
            tracked = self._tracked.get(new.req_id)
            if tracked is not None:
                tracked.block_ids = [list(table) for table in new.block_ids]
                yield tracked, new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request_id, added, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if request_id in cached.resumed_req_ids:
                tracked.block_ids = [list(table) for table in added] if added else [[] for _ in self._shape.groups]
                tracked.stale = False
                tracked.saved_tokens = min(tracked.saved_tokens, computed)  # its saves may have been taken back
            elif added:
                for table, more in zip(tracked.block_ids, added, strict=True):
                    table.extend(more)
            yield tracked, computed

    def _begin_saves(self, tracked: Tracked, before: int, upto: int) -> list[Save]:
        """The saves that are due of a request of which so many tokens are computed before and after a step."""
        if not self._settings.writes or not self._to_be_saved(tracked):
            return []
        saves = self._saves.due(tracked, before, upto)
        if self._events is not None:
            for save in saves:
                self._events.begun(save, tracked.request, tracked.saved_tokens)
        return saves

    def _to_be_saved(self, tracked: Tracked) -> bool:
        request = tracked.request
        long = request.num_prompt_tokens >= self._settings.min_tokens
        return long and not tracked.stale and self._adapters.settled(request) and self._served(tracked)

    # ---- what the workers report ----

    def reported(
        self, report: Report | None, invalid_block_ids: Iterable[int], failed_requests: Iterable[str] = ()
    ) -> None:
        """Loads and saves that have ended, blocks that did not come, and requests whose loads failed as a whole."""
        invalid = set(invalid_block_ids)
        failed = set(failed_requests)
        if invalid or failed:
            for request_id, tracked in self._tracked.items():
                if request_id in failed or not invalid.isdisjoint(tracked.loading):
                    tracked.no_load = True
                    if self._events is not None and request_id in self._under_way:
                        order = self._under_way[request_id][0]
                        self._events.gone(order, invalid or set(order.block_ids))
                    tracked.saved_tokens = 0  # what is computed in their place is worth storing again
        if report is None:
            return
        self._saves_ended(report.saved, report.stored)
        for request_id, count in report.loaded.items():
            self._load_ended(request_id, count)

    def _saves_ended(self, workers: Mapping[int, int], stored: Mapping[int, int]) -> None:
        for save, count in self._saves.reported(workers, stored):
            if self._events is not None:
                self._events.ended(save, count)

    def _load_ended(self, request_id: str, workers: int) -> None:
        if request_id not in self._under_way:
            return
        order, held, before = self._under_way[request_id]
        if before + workers < self._shape.workers:
            self._under_way[request_id] = (order, held, before + workers)
            return
        del self._under_way[request_id]
        self._loading -= self._brings.pop(request_id)
        if held is not None:
            held.release()
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.loading = frozenset()

    # ---- the end of a request, and of everything ----

    def finished(self, request_id: str) -> bool:
        """The request has ended, however; whether its blocks must stay until the workers have saved them."""
        self._lookups.drop(request_id)
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None and tracked.block_ids and request_id not in self._under_way and self._saves.batched:
            # What was left for a larger save. The KV of its last token may not be computed.
            computed = min(tracked.request.num_computed_tokens, tracked.request.num_tokens - 1)
            self._last_saves += self._begin_saves(tracked, computed, computed)
        # While a load fills its blocks the engine keeps them by itself, and what was to be saved of them is gone.
        if request_id in self._under_way or not self._saves.under_way(request_id):
            return False
        self._leaving.append(request_id)
        return True

    def reset(self, generation: str) -> None:
        """From now on nothing is of use that was stored before: the engine's weights may have changed."""
        for request_id, tracked in self._tracked.items():
            self._lookups.drop(request_id)
            tracked.stale = bool(tracked.block_ids)  # what it saves from now on would count as of the new weights
        jobs, self._last_saves = [save.job_id for save in self._last_saves], []
        self._saves_ended(dict.fromkeys(jobs, self._shape.workers), dict.fromkeys(jobs, 0))
        self._generation = generation

    @property
    def digest(self) -> str:
        """The digest of the first group's and shard's namespace; empty while the daemon was never reached."""
        return self._tracks_of("", "")[0].namespaces[0].digest.hex()

    @property
    def saving(self) -> bool:
        """Whether saves are under way."""
        return self._saves.blocks_under_way > 0

    def take_counts(self) -> dict[str, float]:
        """What was counted since the last call."""
        if self._saves.skipped:
            self.counts.add(skipped_saves=self._saves.skipped)
            self._saves.skipped = 0
        return self.counts.take()

    def close(self) -> None:
        """Let go of all that is held."""
        self._lookups.close()
        self._adapters.close()
        for _, held, _ in self._under_way.values():
            if held is not None:
                held.release()
        self._under_way.clear()

    def _track(self, request: Any) -> Tracked:
        tracked = self._tracked.setdefault(request.request_id, Tracked(request))
        tracked.request = request
        return tracked

    def _served(self, tracked: Tracked) -> bool:
        """Whether a request's KV is a function of its prefix, its adapter and the model's weights alone."""
        identity = self._adapters.identity(tracked.request)
        if identity is None:
            self._tell_once(self._adapters.reason)
            return False
        tracked.adapter = identity
        return True

    def _missed(self) -> None:
        """Nothing was loaded for a request that was looked up. Where that is so from the start, say what to look at."""
        self._misses += 1
        if self._misses == _MISSES_BEFORE_A_WORD and not self._hits:
            digest = self._tracks_of(self._generation, "")[0].namespaces[0].reply.digest.hex()  # the daemon is unasked
            self._tell_once(
                f"the first {self._misses} requests had nothing stored in namespace {digest or '(no daemon)'}. If "
                "others have computed the same prompts, theirs differs: `kvstorectl namespaces` shows which there are, "
                "`kvstorectl explain` in what they differ"
            )

    def _tell_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            _LOG.warning("kvstored: %s", message)
