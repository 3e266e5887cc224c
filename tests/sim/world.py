"""One seed: a node, its clients, its faults and its restarts, and all invariants checked after each operation."""

import asyncio
import ctypes
import hashlib
import random
from collections import Counter

import xxhash

from kvstored.device.file import AlignedBuffer
from kvstored.store import quarantine
from kvstored.testing.simulated_device import SimulatedDevice
from kvstored.testing.simulated_node import SimulatedNode
from kvstored.testing.virtual import Crash, Delays, GoesRound, NothingToDo, VirtualLoop, abandon, drawn_bytes
from kvstored.tiers.base import Health
from tests.sim import checks, hints, quotas, times
from tests.sim.actions import ACTIONS, bump, hash_of, lookup, purge
from tests.sim.keeper import MemoryKeeper
from tests.sim.model import Model, Violation
from tests.sim.observed import ObservedIndex, ObservedTier
from tests.sim.plan import ORDERLY, POWER_CUT, RESTARTS, ROOT, make_plan

CALLS_MAX = 10  # under way at once
PURGE_SHARE = 0.01  # of the operations of a world that has purges
LOOKUP_SHARE = 0.1  # of those of a world whose lookups prefetch, beside those that it has anyway
CALL_S_MAX = 200.0  # of virtual time; nothing takes as long
CRASH_WITHIN_CALLS = 40  # of the device
STOP_FLUSH_S = 30.0
MEAN_PAUSE_S = 0.002


class World:
    """Runs one seed. `run` raises Violation."""

    def __init__(self, seed, ops):
        self.plan = make_plan(seed, ops)
        self.rng = random.Random(seed)
        self.model = Model()
        self.device = self._make_device()
        self.device.disk.make_folder(ROOT)
        self.device.disk.root.sync()
        self.keeper = MemoryKeeper() if self.plan.keeps_memory else None
        self._in_dram = {}  # what could be read from kept memory when the process died
        self.seen_by = {}  # segment -> the tenant whose clients were given it
        self.delays = Delays(seed, slow_share=self.plan.slow_share)
        self.counts = Counter()
        self.tenant_of = {}  # digest -> tenant
        self.complaints = []
        self.clients = []
        self.leases = {}  # group -> lease id -> what its blocks looked like
        self.scratch = AlignedBuffer(64 << 10)
        self.steps = 0
        self.recent = {}  # tenant -> what was put lately
        self.orphans = []  # clients that have outlived the daemon, and what they read
        self.purge_dice = random.Random(f"purge {seed}")
        self.prefetch_dice = random.Random(f"prefetch {seed}")
        self.hint_dice = random.Random(f"hints {seed}")
        self.hinting = set()  # tasks
        self.times_dice = random.Random(f"times {seed}")
        self.names = times.Names()
        self.floor = 0  # of all epochs
        self.purging = None  # held by the one purge that runs; made anew at each boot, as the loop is
        self.calls = {}  # task -> name, begun at, client
        self.node = None
        self.loop = None
        self._done_ops = 0
        self._now = 1000.0
        self._trace = hashlib.sha256()
        self._crash_in = 0
        self._client_ids = 0
        self._crash_kind = ""
        self._restarted = False
        self._crash_by = 0.0
        self._paths = list(self.plan.node.nvme.paths)

    # ---- a run ----

    def run(self):
        """All boots, one after the other; returns the hash of everything that happened."""
        with self.names.noted(), drawn_bytes(self.plan.seed):
            while self._done_ops < self.plan.ops:
                self._boot(self._live)
            self.device.quiet = True
            self.delays.slow_share = 0.0
            self._boot(self._last)
        if self.keeper is not None:
            self.keeper.power_cut()
        for name, count in self.device.fired.items():
            self.counts[f"fault.{name}"] += count
        self.counts["fault.slow"] += self.delays.slow_calls
        self.counts["hits"] += self.model.hits
        self.counts["hit_bytes"] += self.model.hit_bytes
        self.counts["ops"] += self._done_ops
        self.counts["restarted_seeds"] += self._restarted
        return self._trace.hexdigest()

    def _make_device(self):
        return SimulatedDevice(self.plan.seed, self.plan.faults)

    def _make_loop(self):
        return VirtualLoop(self.delays, start_s=self._now)

    def _boot(self, life):
        """One life of the process."""
        self.loop = loop = self._make_loop()
        self.purging = asyncio.Lock()
        self.device.now, self.device.on_call = loop.time, self._on_device_call
        loop.set_exception_handler(lambda _, context: self.complain(_describe(context)))
        asyncio.set_event_loop(None)
        self.node = SimulatedNode(
            loop,
            self.device,
            self.plan.node,
            keeper=self.keeper,
            make_index=lambda path, volume, size: ObservedIndex(self, path, volume, size),
            observe=lambda tier: ObservedTier(tier, self),
        )
        try:
            loop.run_until_complete(life())
            self._check_complaints()
            self.device.restarted()
        except Crash:
            self._crashed(loop)
        except NothingToDo as error:
            raise Violation(f"deadlock: {error}; {self._pending()}") from None
        except GoesRound as error:
            raise Violation(f"busy for ever: {error}; {self._pending()}") from None
        finally:
            self._now = loop.time()
            self._dispose(loop)

    def _crashed(self, loop):
        self._check_complaints()
        self.device.dead = True
        abandon(loop)
        if self._crash_kind == POWER_CUT:
            self.device.power_cut()
            if self.keeper is not None:
                self.keeper.power_cut()
                self.seen_by.clear()
        else:
            self.device.restarted()
            if self.keeper is not None:
                self._in_dram = checks.ready_blocks(self)
                self.orphans = [orphan for client in self.clients if (orphan := client.orphan(self))]

    def _dispose(self, loop):
        self.device.dead = True
        if not loop.is_closed():
            abandon(loop)
        self.device.dead = False
        cut_entries(self.node)
        for segment in list(self.node.dram._segments.values()):
            segment.close()
        for name in (
            "promoted_blocks",
            "demoted_blocks",
            "evicted_clean_blocks",
            "segments_reclaimed",
            "predicted_blocks",
            "expired_blocks",
            "epoch_blocks",
        ):
            self.counts[name] += self.node.counters[name]
        if not self._in_dram:
            self.orphans.clear()
        self.model.process_ended()
        self.clients.clear()
        self.leases.clear()
        self.calls.clear()
        self.hinting.clear()

    async def _live(self):
        """Until the next restart, or the last operation."""
        self._crash_in = 0
        await self._start()
        if self.rng.random() < 0.5:
            await self._check_durable()
        while self._done_ops < self.plan.ops or self._crash_in:
            self._done_ops += 1
            self._act()
            hints.act(self, hash_of)
            kind = self.plan.restarts.pop(self._done_ops, None)
            if kind is None and self._done_ops >= self.plan.ops:
                kind = self.rng.choice(RESTARTS)
            if kind is not None and not self._crash_in:
                self.counts[f"restart.{kind}"] += 1
                self._restarted |= self._done_ops < self.plan.ops
                if kind == ORDERLY:
                    await self._stop()
                    return
                self._arm(kind)
            await asyncio.sleep(self._pause_s())
            self._check_step()

    async def _start(self):
        if self.keeper is None:
            self.seen_by.clear()
        quotas.watch(self)
        hints.start(self)
        await self.node.start()
        times.note_lost(self)
        checks.kept(self, self._in_dram)
        self._in_dram = {}
        self.orphans_until_s = self.loop.time() + quarantine.UNSEEN_S
        self.node.store.tell_retired = self._tell_retired
        self.note("up")

    async def _last(self):
        """With a quiet device: every path is fine, and what is owed is there."""
        self._crash_in = 0
        self.device.mend()
        await self._start()
        for number, path in enumerate(self._paths):
            if not self._lost_its_format(path):
                line = self.node.nvme.properties()[f"path.{number}"]
                checks.require(line.startswith(f"{path}: ok"), f"nothing is wrong any more, but {line}")
        for tenant, why in self.node.nvme.keys.locked().items():
            lost = any(self._lost_its_key(path, tenant) or self._lost_its_format(path) for path in self._paths)
            checks.require(lost, f"nothing is wrong any more, but {tenant} is locked: {why}")
        await self._check_durable()
        await self._stop()

    async def _check_durable(self):
        """Only where every path is there: what is on another cannot be asked for."""
        if not self.all_paths_ok():
            return
        self.counts["durable_checked"] += len(self.model.owed)
        before, self.device.quiet = self.device.quiet, True
        try:
            await checks.durable(self)
        finally:
            self.device.quiet = before

    def _pause_s(self):
        dice = self.rng.random()
        if dice < 0.9:
            return 2 * MEAN_PAUSE_S * self.rng.random()
        return 0.0 if dice < 0.98 else 15 * self.rng.random()

    # ---- operations ----

    def _act(self):
        dice = self.rng.random() * ACTIONS[-1][0]
        action = next(action for upto, action in ACTIONS if dice < upto)
        if self.plan.purges and self.purge_dice.random() < PURGE_SHARE:
            action = purge
        if self.plan.prefetches and self.prefetch_dice.random() < LOOKUP_SHARE:
            action = lookup
        if self.plan.times and self.times_dice.random() < times.BUMP_SHARE:
            action = bump
        if len(self.calls) >= CALLS_MAX and action.__name__ not in ("kill_session", "cancel_call"):
            return
        client = self.rng.choice(self.clients) if self.clients else None
        name = action.__name__
        if client is None and name != "open_session":
            return
        self.counts[f"op.{name}"] += 1
        made = action(self, client)
        if made is None:
            return
        task = self.loop.create_task(made)
        self.calls[task] = (name, self.loop.time(), client)
        task.add_done_callback(self._call_done)

    def _call_done(self, task):
        name, _, _ = self.calls.pop(task)
        if task.cancelled():
            self.note(name, "cancelled")
        elif (error := task.exception()) is not None:
            if isinstance(error, Crash):
                return
            self.complain(f"{name} ended with {error!r}", error)
        else:
            self.note(name, task.result())

    def note(self, *what):
        """Into the trace."""
        self._trace.update(repr((round(self.loop.time(), 9), *what)).encode())

    # ---- ends ----

    def _arm(self, kind):
        """A crash within the next calls of the device, or now."""
        self._crash_kind = kind
        self._crash_in = self.rng.randrange(CRASH_WITHIN_CALLS)
        self._crash_by = self.loop.time() + 1.0
        if not self._crash_in:
            self._crash()

    def _crash(self):
        self.note("crash", self._crash_kind)
        raise Crash

    def _on_device_call(self):
        if not self.loop.in_thread:
            self.complain("the event loop calls a device: that blocks it")
        if self._crash_in:
            self._crash_in -= 1
            if not self._crash_in:
                self._crash()

    async def _stop(self):
        await self._calls_ended()
        for client in list(self.clients):
            client.end(self)
        await checks.nothing_held(self)
        await self.node.stop(flush_s=self.rng.choice((0.0, STOP_FLUSH_S)))
        self.note("down")

    async def _calls_ended(self):
        if self.calls:
            _, late = await asyncio.wait(list(self.calls), timeout=CALL_S_MAX)
            if late:
                raise Violation(f"calls have not ended after {CALL_S_MAX} s: {self._pending()}")
        self._check_complaints()

    def part_with(self, session):
        """As the transport does: the connection first."""
        for client in [client for client in self.clients if client.session is session]:
            client.end(self)

    def _pending(self):
        return ", ".join(sorted(name for name, _, _ in self.calls.values())) or "no call"

    # ---- checks ----

    def complain(self, what, error=None):
        """An invariant does not hold; raised at the next step."""
        self.complaints.append((what, error))

    def _check_complaints(self):
        if self.complaints:
            what, error = self.complaints[0]
            raise Violation(what) from error

    def _check_step(self):
        if self._crash_in and self.loop.time() > self._crash_by:
            self._crash()
        self._check_complaints()
        mover = self.node.mover_task
        if mover.done():
            raise Violation(f"the mover has ended: {mover.exception()!r}") from mover.exception()
        now = self.loop.time()
        for name, begun, _ in self.calls.values():
            if now - begun > CALL_S_MAX:
                raise Violation(f"{name} has not ended after {CALL_S_MAX} s")
        checks.step(self)

    def check_lease(self, blocks):
        """The blocks of a lease lie where they lay and are what they were."""
        dram = self.node.dram
        for entry, slot, address, size, digest in blocks:
            if dram.address(slot) != address or dram.owner(slot) is not entry:
                raise Violation(f"the leased slot {slot} of {entry.hash} was given away")
            if xxhash.xxh3_64_intdigest(ctypes.string_at(address, size)) != digest:
                raise Violation(f"the bytes of the leased block {entry.hash} changed")

    # ---- for observers ----

    def is_spoilt(self, record):
        """Whether the device has spoilt this record."""
        place = record.location
        path = self._paths[place.volume] / "extents" / f"{place.extent:08d}.ext"
        return self.device.is_spoilt(path, place.offset, record.size_bytes)

    def _lost_its_format(self, path):
        return all(self.device.is_spoilt(path / name, 0, 1) for name in ("FORMAT", "FORMAT.copy"))

    def _lost_its_key(self, path, tenant):
        names = (f"{tenant}.key", f"{tenant}.key.copy")
        return all(self.device.is_spoilt(path / "keys" / name, 0, 1) for name in names)

    def new_client_id(self):
        """What a client calls itself, before and after a restart of the daemon."""
        self._client_ids += 1
        return self._client_ids.to_bytes(16, "big")

    def all_paths_ok(self):
        """Whether every path is open and takes writes."""
        volumes = self.node.nvme._volumes.values()
        return len(volumes) == len(self._paths) and all(volume.health is Health.OK for volume in volumes)

    def table(self, volume):
        """The extents of a volume that is open."""
        found = self.node.nvme._volumes.get(volume)
        return found.table if found is not None else None

    def _tell_retired(self, session, segment_ids):
        if self.rng.random() < 0.7:
            later = self.rng.random() * self.rng.choice((0.01, 5.0))
            self.loop.call_later(later, self.node.store.segments_dropped, session, list(segment_ids))
        return True


def cut_entries(node):
    """Entries are not seen by the collector: what they hang together with would stay for ever, world after world."""
    catalog = node.parts.catalog
    spaces = [*catalog.spaces.values(), *catalog.retired]
    entries = [entry for space in spaces for entry in space.entries.values()]
    for segment in node.dram._segments.values():
        entries += node.dram.occupants(segment.segment_id)
    pools = {entry.pool for entry in entries}.union(*(space.pools.values() for space in spaces))
    for entry in entries:
        entry.prev = entry.next = entry.pool = None
    for pool in pools:
        pool.space = pool.order = None  # of entries that only a lease or a waiting call still has


def _describe(context):
    error = context.get("exception")
    return f"{context['message']}: {error!r}"
