"""The daemon: wires everything, starts it, waits, and stops it in order.

Only this module knows all the others; `process` runs it. Signals set flags; a second one ends the
wait for an orderly stop.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Final

import msgspec

from kvstored.catalog.catalog import Catalog
from kvstored.catalog.history import History
from kvstored.catalog.leases import Sessions
from kvstored.catalog.reordering import Reordering
from kvstored.catalog.room import Room
from kvstored.clock import SystemClock
from kvstored.config.config import Config
from kvstored.daemon import purge_file
from kvstored.daemon.gpu_wiring import end_leftovers, make_gpus, start_workers
from kvstored.daemon.startup import StartTimes
from kvstored.daemon.tier_settings import dram_allotments, dram_config, order_settings
from kvstored.daemon.warm_restart import WarmRestart
from kvstored.daemon.wiring_below import wire_below
from kvstored.device.keeper import Keeper, NoKeeper
from kvstored.device.scheduling import compute_in_long_slices
from kvstored.device.state_directory import StateDirectory
from kvstored.encryption.key_keeper import KeyKeeper
from kvstored.mover.revival import Revival
from kvstored.purge.purges import Purges
from kvstored.recorder import Recorder
from kvstored.reporting import metrics as metrics_server
from kvstored.reporting.logs import get_logger
from kvstored.reporting.metrics import Metrics
from kvstored.reporting.metrics_export import DaemonCollector
from kvstored.rpc import status
from kvstored.rpc.context import Context
from kvstored.rpc.identity import Identity
from kvstored.rpc.listener import SessionServer, clear_stale
from kvstored.rpc.service import GrpcServer
from kvstored.rpc.standing import Standing
from kvstored.store.departures import Departures
from kvstored.store.parts import Below, Limits, Parts, TenantStats
from kvstored.store.store import Store
from kvstored.tenancy.audit_log import AUDIT_FILE, AuditLog
from kvstored.tenancy.changes import TenantChanges
from kvstored.tenancy.file import open_tenants
from kvstored.tiers.dram import DramTier
from kvstored.tiers.epochs import Epochs
from kvstored.tiers.staging import StagingPool

GRACE_S: Final = 2.0

log = get_logger("daemon")


class Daemon:
    """One daemon: start, wait, stop."""

    def __init__(self, config: Config, keeper: Keeper | None = None) -> None:
        self.config = config
        self._keeper = keeper or NoKeeper()
        self._times = StartTimes()
        self._metrics = Metrics()
        self._clock = SystemClock()
        self._state = StateDirectory(config.server.state_dir)
        # One CPU is the client's, which copies the next batch meanwhile: two batches at once would take it away.
        self._copy_threads = max(1, min(4, (os.cpu_count() or 1) - 1))
        self._copiers = ThreadPoolExecutor(self._copy_threads, "copy", compute_in_long_slices)
        self._spare_copier = ThreadPoolExecutor(1, "copy-more", compute_in_long_slices)
        self._stop_asked = asyncio.Event()
        self._hurry = asyncio.Event()
        self._endpoint: metrics_server.MetricsServer | None = None
        self._mover_task: asyncio.Task[None] | None = None
        self.context = self._wire()
        self._warm = WarmRestart(self.context.store)
        self._sessions = SessionServer(self.context, config.server.session_socket, config.server.socket_mode_bits)
        self.context.store.tell_retired = self._sessions.retired
        self.context.store.release_times.observe = self._metrics.observe_release
        self._grpc = GrpcServer(self.context)
        self._standing = Standing(self.context)

    # ---- wiring ----

    def _wire(self) -> Context:
        config, counters = self.config, self._metrics.counters
        orders = order_settings(config)
        catalog = Catalog(orders)
        history, tenants = History(self._clock), open_tenants(config.tenants, self._state, config.check_tenants)
        dram = DramTier(dram_config(config), self._keeper, tenants.names)
        room = Room(catalog, dram, self._clock, history, counters, dram_allotments(config, tenants))
        limits = config.limits
        epochs = Epochs()
        below = wire_below(config, self._clock, counters, epochs, catalog, room, dram, history, tenants)
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
            spare_copier=self._spare_copier,
            copy_threads=self._copy_threads,
            stats=defaultdict(TenantStats),
            revival=revival,
            tenants=tenants,
            epochs=epochs,
            predicts=config.prefetch.predict,
            gpus=make_gpus(config, dram, self._state),
        )
        audit_path = config.server.audit_log or config.server.state_dir / AUDIT_FILE
        store = Store(parts)
        purges, changes = Purges(store), TenantChanges(tenants, self._state, self._clock)
        return Context(
            config=config,
            store=store,
            purges=purges,
            departures=Departures(parts, purges, store.hints.hinting, changes.left),
            identity=Identity(tenants, self._clock.wall),
            metrics=self._metrics,
            audit=AuditLog(audit_path, self._clock, self._state.take),
            changes=changes,
            recorder=Recorder(
                config.server.trace_dir or config.server.state_dir / "traces",
                self._clock,
                # A directory of its own needs nothing of the other: each file is new, under a name of its own.
                (lambda: None) if config.server.trace_dir else self._state.take,
                size_bytes_max=config.limits.trace_bytes,
                seconds_max=config.limits.trace_s,
            ),
            reordering=Reordering(catalog, dram, orders),
            clock=self._clock,
            boot_id=secrets.randbits(63),
            version=version("kvstored"),
            started_s=self._clock.monotonic(),
            keys=KeyKeeper(tenants, below.keys, self._clock) if below is not None and below.keys is not None else None,
        )

    # ---- start ----

    async def start(self) -> None:
        """Open the tiers, then listen; when this returns, it serves. Raises KVStoredError or OSError."""
        loop = asyncio.get_running_loop()
        self._check_sockets()
        parts = self.context.store.parts
        await end_leftovers(self._state)
        await parts.dram.open()
        await self._warm.enter()
        self._times.ended("dram")
        start_workers(self.config, parts.gpus)
        if parts.below is not None:
            await parts.below.tier.open()
            if self.context.keys is not None:
                await self.context.keys.start()
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
        await purge_file.resume(self.context.purges, self._state, self.context.warnings)
        self.context.state = "serving"
        self._standing.start()
        for name in parts.tenants.changes.leaving:
            self.context.departures.begin(name)
        self._sessions.start()
        await self._grpc.start()
        await self._grpc.set_serving(True)
        self._times.ended("listen")
        socket, seconds = str(self.config.server.session_socket), self._times.rounded()
        log.info("serving", session_socket=socket, pid=os.getpid(), start_s=seconds)
        for warning in (*parts.dram.warnings, *self.context.warnings, *status.tenant_warnings(self.context)):
            log.warning("running without", what=warning)

    def _check_sockets(self) -> None:
        """Another daemon that serves here is to be named before memory is taken that may be the other's."""
        server = self.config.server
        for path in filter(None, (server.session_socket, server.grpc_socket)):
            clear_stale(path)

    def _restore_namespaces(self, parts: Parts, below: Below) -> None:
        for namespace in below.tier.namespaces():
            parts.catalog.space(namespace)

    def ask_to_stop(self) -> None:
        """End `wait`; asked again, hurry the stop."""
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
        self._standing.stop()
        await self.context.departures.stop()
        await self._grpc.set_serving(False)
        if flush:
            await self._drain(end_s)
        await self._grpc.close(0.0 if self._hurry.is_set() else GRACE_S)
        await self.context.purges.stop()
        await self.context.store.predictions.stop()
        self._warm.freeze()
        self._sessions.close()
        await self._warm.stop()
        await self.context.store.commits.streamed()
        if self.context.keys is not None:
            await self.context.keys.stop()
        if parts.gpus is not None and self.context.store.transfers is not None:
            await parts.gpus.close()
            await self.context.store.transfers.drained()
        if parts.below is not None:
            await self._stop_below(parts.below, end_s if flush else 0.0)
        if self._endpoint is not None:
            await asyncio.to_thread(self._endpoint.close)
        await asyncio.to_thread(self._copiers.shutdown)
        await asyncio.to_thread(self._spare_copier.shutdown)
        await self.context.recorder.stop("stopping")
        await asyncio.to_thread(self.context.audit.close)
        self._state.close()
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
