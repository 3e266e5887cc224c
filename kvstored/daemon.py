"""The daemon: wires everything, starts it, waits, and stops it in order.

Only this module knows all the others; `process` runs it. Signals set flags; a second one ends the
wait for an orderly stop.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from typing import Final

import msgspec

from kvstored import metrics as metrics_server
from kvstored.catalog import Catalog
from kvstored.clock import SystemClock
from kvstored.config import Config
from kvstored.device.file import FileDevice
from kvstored.device.keeper import Keeper, NoKeeper
from kvstored.history import Gone, History
from kvstored.leases import Sessions
from kvstored.logs import get_logger
from kvstored.metrics import Metrics
from kvstored.metrics_export import DaemonCollector
from kvstored.mover import Mover
from kvstored.parts import Below, Limits, Parts, TenantStats
from kvstored.policy.admission import AdmitAll
from kvstored.policy.orders import make_order
from kvstored.policy.quota import Quota
from kvstored.policy.watermarks import Watermarks
from kvstored.promoter import Promoter
from kvstored.revival import Revival
from kvstored.room import Room
from kvstored.rpc import status
from kvstored.rpc.context import Context
from kvstored.rpc.identity import Identity
from kvstored.rpc.listener import SessionServer, clear_stale
from kvstored.rpc.service import GrpcServer
from kvstored.startup import StartTimes
from kvstored.store import Store
from kvstored.tier_settings import dram_config, nvme_config
from kvstored.tiers.dram import DramTier
from kvstored.tiers.nvme import NvmeTier
from kvstored.tiers.staging import StagingPool
from kvstored.warm_restart import WarmRestart

GRACE_S: Final = 2.0
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

log = get_logger("daemon")


class Daemon:
    """One daemon: start, wait, stop."""

    def __init__(self, config: Config, keeper: Keeper | None = None) -> None:
        self.config = config
        self._keeper = keeper or NoKeeper()
        self._times = StartTimes()
        self._metrics = Metrics()
        self._clock = SystemClock()
        # One CPU is the client's, which copies the next batch meanwhile.
        self._copy_threads = max(1, min(4, (os.cpu_count() or 1) - 1))
        self._copiers = ThreadPoolExecutor(self._copy_threads, thread_name_prefix="copy")
        self._stop_asked = asyncio.Event()
        self._hurry = asyncio.Event()
        self._endpoint: metrics_server.MetricsServer | None = None
        self._mover_task: asyncio.Task[None] | None = None
        self.context = self._wire()
        self._warm = WarmRestart(self.context.store)
        self._sessions = SessionServer(self.context, config.server.session_socket, config.server.socket_mode_bits)
        self.context.store.tell_retired = self._sessions.retired
        self._grpc = GrpcServer(self.context)

    # ---- wiring ----

    def _wire(self) -> Context:
        config, counters = self.config, self._metrics.counters
        policy = config.policy
        catalog = Catalog(partial(make_order, policy.eviction, heat_half_life=policy.heat_half_life))
        history = History()
        dram = DramTier(dram_config(config), self._keeper, [tenant.name for tenant in config.tenants])
        quotas = {tenant.name: Quota(tenant.dram_limit_bytes) for tenant in config.tenants}
        room = Room(catalog, dram, self._clock, history, counters, quotas)
        limits = config.limits
        below = self._wire_below(catalog, room, dram, history) if config.nvme.paths else None
        tier = below.tier if below is not None else None
        revival = Revival(catalog, room, dram, self._clock, counters, history, self._copiers, self._copy_threads, tier)
        parts = Parts(
            catalog=catalog,
            dram=dram,
            room=room,
            below=below,
            sessions=Sessions(config.server.max_sessions, limits.namespaces_per_session),
            staging=StagingPool(limits.staging_bytes_total),
            history=history,
            clock=self._clock,
            counters=counters,
            limits=Limits(
                staging_bytes_per_session=limits.staging_bytes_per_session,
                leases_per_session=limits.leases_per_session,
                reservations_per_session=limits.reservations_per_session,
                held_bytes=int(limits.leased_share * config.dram.capacity_bytes),
                put_wait_max_s=limits.put_wait_max_s,
                get_wait_max_s=limits.get_wait_max_s,
            ),
            copiers=self._copiers,
            copy_threads=self._copy_threads,
            stats=defaultdict(TenantStats),
            revival=revival,
        )
        return Context(
            config=config,
            store=Store(parts),
            identity=Identity(config.tenants),
            metrics=self._metrics,
            clock=self._clock,
            boot_id=secrets.randbits(63),
            version=version("kvstored"),
            started_s=self._clock.monotonic(),
        )

    def _wire_below(self, catalog: Catalog, room: Room, dram: DramTier, history: History) -> Below:
        config, counters = self.config, self._metrics.counters
        loop = asyncio.get_running_loop()

        def evicted(tenant: str, digest: bytes, hashes: list[bytes]) -> None:
            gone = Gone("evicted", "the oldest extent on NVMe was recycled", self._clock.wall())
            loop.call_soon_threadsafe(_note_evicted, catalog, history, digest, hashes, gone)

        def dropped(tenant: str, digest: bytes, hashes: list[bytes]) -> None:
            gone = Gone("corrupt", "its bytes on NVMe were unreadable or not what was stored", self._clock.wall())
            loop.call_soon_threadsafe(_note_evicted, catalog, history, digest, hashes, gone)

        nvme = NvmeTier(nvme_config(config), FileDevice(), self._clock, evicted, on_dropped=dropped)
        mover = Mover(
            catalog,
            room,
            dram,
            nvme,
            self._clock,
            counters,
            Watermarks(config.mover.high_watermark, config.mover.low_watermark, config.mover.batch_share),
            AdmitAll(),
            deadline_s=config.nvme.io_deadline_s,
        )
        promoter = Promoter(
            catalog,
            room,
            dram,
            nvme,
            self._clock,
            counters,
            queue_blocks=config.mover.queue_blocks,
            inflight_bytes=config.mover.inflight_bytes,
            deadline_s=config.nvme.io_deadline_s,
        )
        return Below(nvme, mover, promoter)

    # ---- start ----

    async def start(self) -> None:
        """Open the tiers, then listen; when this returns, it serves. Raises KVStoredError or OSError."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._on_signal)
        self._check_sockets()
        parts = self.context.store.parts
        await parts.dram.open()
        await self._warm.enter()
        self._times.ended("dram")
        if parts.below is not None:
            await parts.below.tier.open()
            self._restore_namespaces(parts, parts.below)
            self._mover_task = asyncio.create_task(parts.below.mover.run())
            self._times.ended("nvme")
        self._warm.start()
        if self.config.metrics.enabled:
            read = metrics_server.on_loop(loop, lambda: status.report(self.context))
            collector = DaemonCollector(self._metrics, read)
            address = self.config.metrics.address
            self._endpoint = await asyncio.to_thread(metrics_server.serve, address, [collector])
            if self._endpoint is None:
                self.context.warnings.append(f"no metrics: cannot listen on metrics.address {address}")
        self.context.state = "serving"
        self._sessions.start()
        await self._grpc.start()
        await self._grpc.set_serving(True)
        self._times.ended("listen")
        socket, seconds = str(self.config.server.session_socket), self._times.rounded()
        log.info("serving", session_socket=socket, pid=os.getpid(), start_s=seconds)
        if not any(tenant.role == "admin" for tenant in self.config.tenants):
            self.context.warnings.append("no tenant has the role admin: nobody may verify, flush or drain")
        for warning in (*parts.dram.warnings, *self.context.warnings):
            log.warning("running without", what=warning)

    def _check_sockets(self) -> None:
        """Another daemon that serves here is to be named before memory is taken that may be the other's."""
        server = self.config.server
        for path in filter(None, (server.session_socket, server.grpc_socket)):
            clear_stale(path)

    def _restore_namespaces(self, parts: Parts, below: Below) -> None:
        for namespace in below.tier.namespaces():
            parts.catalog.space(namespace)

    def _on_signal(self) -> None:
        if self._stop_asked.is_set():
            self._hurry.set()
            self.context.store.drains.hurry()
        self._stop_asked.set()

    @property
    def tcp_port(self) -> int:
        """Where gRPC listens on TCP; 0: nowhere."""
        return self._grpc.tcp_port

    # ---- wait and stop ----

    async def wait(self) -> None:
        """Until a signal asks to stop."""
        await self._stop_asked.wait()

    async def stop(self, *, flush: bool = True) -> None:
        """No new clients, no new puts; drain; part with the clients; close the tiers. A second signal hurries."""
        parts = self.context.store.parts
        end_s = self._clock.monotonic() + self.config.server.stop_flush_s
        self.context.state = "stopping"
        self.context.store.drains.begin()
        self._sessions.stop_listening()
        await self._grpc.set_serving(False)
        if flush:
            await self._drain(end_s)
        await self._grpc.close(0.0 if self._hurry.is_set() else GRACE_S)
        self._warm.freeze()
        self._sessions.close()
        await self._warm.stop()
        if parts.below is not None:
            await self._stop_below(parts.below, end_s if flush else 0.0)
        if self._endpoint is not None:
            await asyncio.to_thread(self._endpoint.close)
        await asyncio.to_thread(self._copiers.shutdown)
        if not self.stuck:  # else a thread may still be at its memory
            await parts.dram.close()
        log.info("stopped")

    @property
    def stuck(self) -> bool:
        """After `stop`: a thread has not come back from a device."""
        below = self.context.store.parts.below
        return below is not None and below.tier.stuck

    async def _drain(self, end_s: float) -> None:
        """While clients are still served: flush, and give what they hold a moment to end."""
        left_s = end_s - self._clock.monotonic()
        if left_s > 0 and not self._hurry.is_set():
            drained = await self.context.store.drains.drain(left_s, held_timeout_s=GRACE_S)
            log.info("drained", **msgspec.structs.asdict(drained))

    async def _stop_below(self, below: Below, end_s: float) -> None:
        if self._mover_task is not None:
            self._mover_task.cancel()
            await asyncio.wait([self._mover_task])
        left_s = end_s - self._clock.monotonic()
        if left_s > 0:  # commits that ended when their clients were parted with
            await below.mover.flush(left_s, ended=self._hurry)
        await self.context.store.writes.durability.drained()
        await below.promoter.drained()
        await below.tier.close()


def _note_evicted(catalog: Catalog, history: History, digest: bytes, hashes: list[bytes], gone: Gone) -> None:
    """Blocks left NVMe: those that are in DRAM are there only from now on."""
    space = catalog.spaces.get(digest)
    for hash_ in hashes:
        entry = space.entries.get(hash_) if space is not None else None
        if entry is not None:
            entry.below = False
    history.note(digest, hashes, gone)
