"""The store: what both transports call. Sessions here; reading and writing in `reads` and `writes`.

Every operation plans (state, no await) and then acts (I/O, no state). What the catalogue alone
can answer is answered without a task: such calls return their result, others an awaitable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvstored_proto import namespace as wire
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.catalog.catalog import Space
from kvstored.catalog.leases import Caller, Lease, Session
from kvstored.errors import DeviceError, InvalidArgument
from kvstored.keys import NAMESPACE_BYTES_MAX, Namespace
from kvstored.lifetime import Lifetime
from kvstored.store.commits import Commits
from kvstored.store.drains import Drains
from kvstored.store.epochs import Bumps
from kvstored.store.expiry import Expiries
from kvstored.store.hints import Hints
from kvstored.store.parts import Parts
from kvstored.store.predictions import Predictions
from kvstored.store.prefetches import Prefetches
from kvstored.store.quarantine import Quarantine
from kvstored.store.quota_audit import QuotaAudit
from kvstored.store.reads import Reads
from kvstored.store.release_times import Cause, ReleaseTimes
from kvstored.store.releases import PostedReleases
from kvstored.store.tenant_limits import TenantLimits
from kvstored.store.transfers import Transfers
from kvstored.store.writes import Writes
from kvstored.tiers.staging import Staging

RETURN_WAIT_S: Final = 10.0  # for a session to let go of a segment that is to serve another tenant


class Store:
    """One node's blocks and who uses them."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.limits = TenantLimits(
            *(parts.tenants, parts.sessions, parts.catalog, parts.dram, parts.room.allotments, parts.clock)
        )
        self.prefetches = Prefetches(parts)
        self.predictions = Predictions(parts)
        self.reads = Reads(parts, self.limits, self.prefetches)
        self.writes = Writes(parts, self.limits)
        self.commits = Commits(parts, self.writes)
        self.expiries = Expiries(parts, self.writes.removals)
        self.writes.expiry_of = self.expiries.of_put
        self.hints = Hints(parts, self.expiries.of_put)
        self.bumps = Bumps(parts, self.writes.removals)
        gpus = parts.gpus
        self.transfers = Transfers(parts, self.reads, self.writes, self.commits, gpus) if gpus is not None else None
        self.releases = PostedReleases(parts, self.reads)
        self.release_times = ReleaseTimes(parts.clock)
        self.quota_audit = QuotaAudit(parts)
        self.quarantine = Quarantine(parts, self.reads.notes, self.reads.ends, self.release_times)
        parts.sessions.known_before = self.quarantine.knows_group
        self.drains = Drains(parts, self.writes, self.releases, self.held)
        # Set by the transport: tells a session to let go of segments; False where it cannot be told.
        self.tell_retired: Callable[[Session, Sequence[int]], bool] = lambda session, ids: False
        # Set by the transport: closes the way to a client and then ends its session, with the reason for the log.
        self.part_with: Callable[[Session, str, Cause], None] = lambda session, _, cause: self.end_session(
            session, cause
        )
        if self.predictions.on:
            self.reads.on_got, self.commits.on_put = self.predictions.got, self.predictions.put
            self.hints.on_final = self.predictions.ended
        parts.room.on_retired = self._retired
        parts.room.take_posted = self.releases.take_any
        self.reads.take_posted = self.releases.take
        if parts.below is not None:
            parts.below.promoter.on_settled = parts.below.mover.kick
            parts.below.mover.on_deleted = parts.below.promoter.deleted
        self.return_wait_s = RETURN_WAIT_S
        # By segment. No sets: they are told in the order in which they came to hold it.
        self._holders: dict[int, dict[Session, None]] = {}
        self._tasks: set[asyncio.Future[None]] = set()

    # ---- sessions ----

    async def open_session(
        self,
        caller: Caller,
        *,
        staging_bytes: int,
        create_group: bool,
        join_group: bytes,
        page: bool = False,
        client_id: bytes = b"",
    ) -> Session:
        """A session and its staging ring, as big as wished and allowed; 0 bytes where there is no room for one."""
        pool, tenant = self.parts.staging, caller.tenant
        now = self.parts.clock.monotonic()
        self.limits.check_session(caller.tenant)
        session = self.parts.sessions.open(caller, now, create_group=create_group, join_group=join_group)
        session.client_id = client_id
        self.reads.notes.opened(session)
        if page:
            self.releases.open_page(session)
        most = self.limits.staging_max_bytes(tenant, pool.limit_bytes)
        wanted = min(staging_bytes, self.parts.limits.staging_bytes_per_session, most)
        if wanted:
            try:
                staging = await pool.create(wanted, tenant, most)
            except BaseException:  # whatever it was: nobody else knows of this session
                self.end_session(session)
                raise
            self._give_staging(session, staging)
        return session

    def _give_staging(self, session: Session, staging: Staging | None) -> None:
        if staging is not None and session.ended:
            staging.close()
        else:
            session.staging = staging

    def end_session(self, session: Session, cause: Cause = Cause.CLOSED) -> None:
        """Give back all that a session held. The caller has closed the way to the client before."""
        if session.ended:
            return
        releasing = self.release_times.begin(cause)
        self.releases.finish(session)  # its group, and with it the leases, may live on
        leases = self.parts.sessions.close(session)
        self.writes.end_session(session)
        if session.reservations:  # copies that run
            session.on_settled = releasing.part()
        self.prefetches.end_session(session)
        if self.transfers is not None:
            self.transfers.end_session(session)
        self.reads.ends.add(session.group, leases, releasing.part())
        self.reads.notes.closed(session)
        if session.staging is not None:
            session.staging.close(releasing.part())
        self.releases.close_page(session)
        for segment_id in list(session.exposed):
            self._let_go(session, segment_id)
        releasing.ended()
        self.parts.counters["sessions_ended"] += 1
        if self.parts.below is not None:
            self.parts.below.mover.kick()

    # ---- namespaces ----

    async def open_namespace(
        self, session: Session, spec: pb.NamespaceSpec, *, durable: bool = False, lifetime: Lifetime | None = None
    ) -> tuple[int, Space, bytes]:
        """A handle, the space behind it, and the chain seed. Puts by a `durable` handle wait for NVMe.

        `lifetime`: of puts by the handle that do not say.

        Raises InvalidArgument, LimitExceeded, FailedPrecondition where there is no NVMe to be durable on, or
        SessionEnded: of a tenant that is removed no name may be kept.
        """
        session.check_open()
        tenant = session.caller.tenant
        if lifetime is not None:
            lifetime.check()
        if durable:
            self.writes.durability.check()
        encoding = wire.encode(tenant, spec)
        if not spec.model:
            raise InvalidArgument("a namespace needs a model: blocks of unnamed models cannot be told apart")
        if len(encoding) > NAMESPACE_BYTES_MAX:
            raise InvalidArgument(f"the namespace has {len(encoding)} bytes: {NAMESPACE_BYTES_MAX} are allowed")
        digest = wire.digest(tenant, spec)
        known = digest in self.parts.catalog.spaces
        if not known:
            self.limits.check_namespace(tenant)
        space = self.parts.catalog.space(Namespace(tenant, digest, encoding, wire.fields(spec)))
        handle = self.parts.sessions.add_space(session, space, durable=durable, lifetime=lifetime)
        await self.parts.dram.remember_namespaces([space.namespace])
        if self.parts.tenants.is_leaving(tenant) or self.parts.catalog.spaces.get(digest) is not space:
            session.check_open()
        if not known and self.parts.below is not None:
            await self.parts.below.tier.remember_namespace(tenant, digest, encoding, space.namespace.fields)
        return handle, space, wire.chain_seed(tenant, spec)

    # ---- memory handed to clients ----

    def expose(self, session: Session, leases: Iterable[Lease]) -> list[tuple[int, int, int]]:
        """Segments of these leases that the session has no descriptor of: id, bytes, descriptor (the tier's)."""
        self.releases.watch()  # from now on their release may be posted
        dram, fresh = self.parts.dram, []
        for segment_id in {slot >> 20 for lease in leases for slot, _ in lease.runs} - session.exposed:
            fresh.append((segment_id, dram.segment_bytes(segment_id), dram.segment_fd(segment_id)))
            dram.expose(segment_id)
            session.exposed.add(segment_id)
            self._holders.setdefault(segment_id, {})[session] = None
        return fresh

    def _retired(self, segment_id: int) -> None:
        """A segment left service: ask its holders to let go, and remake its memory when the last one has.

        None of them has a block in it, so one that does not answer only delays: its bytes are taken
        from it after a while, and its next segments at once.
        """
        holders = self._holders.get(segment_id)
        if not holders:
            self._dispose(segment_id)
            return
        for session in list(holders):
            self.tell_retired(session, [segment_id])
            if session.silent and not session.ended:  # to tell it may be to learn that it is gone
                self._let_go(session, segment_id)
        if holders:
            asyncio.get_running_loop().call_later(self.return_wait_s, self._overdue, segment_id)

    def _overdue(self, segment_id: int) -> None:
        for session in list(self._holders.get(segment_id, ())):
            session.silent = True
            self.parts.counters["segments_not_returned"] += 1
            self._let_go(session, segment_id)

    def segments_dropped(self, session: Session, segment_ids: Iterable[int]) -> None:
        """A session says that it has unmapped and closed these.

        It is believed of retired ones only: whoever could give up others would be sent their
        descriptors again and again, and need not take them.
        """
        session.silent = False
        for segment_id in session.exposed.intersection(segment_ids):
            if self.parts.dram.is_retired(segment_id):
                self._let_go(session, segment_id)

    def _let_go(self, session: Session, segment_id: int) -> None:
        session.exposed.discard(segment_id)
        holders = self._holders[segment_id]
        holders.pop(session, None)
        if not holders:
            del self._holders[segment_id]
            if self.parts.dram.is_retired(segment_id):
                self._dispose(segment_id)

    def _dispose(self, segment_id: int) -> None:
        task = asyncio.ensure_future(self._remake(segment_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _remake(self, segment_id: int) -> None:
        try:
            if self.parts.gpus is not None:
                await self.parts.gpus.drop_segment(segment_id)
            await self.parts.dram.dispose(segment_id)
        except DeviceError:
            self.parts.counters["segments_lost"] += 1  # the tier's warnings say why
        if self.parts.below is not None:
            self.parts.below.mover.kick()

    # ---- the daemon's own ----

    def held(self) -> dict[str, int]:
        """What sessions hold at present; all zero when every session has ended (DESIGN invariant 5)."""
        sessions = list(self.parts.sessions)
        groups = {id(session.group): session.group for session in sessions}.values()
        return {
            "sessions": len(sessions),
            "leases": sum(len(group.leases) for group in groups),
            "leased_bytes": sum(group.leased_bytes for group in groups),
            "reservations": sum(len(session.reservations) for session in sessions),
            "staging_bytes": self.parts.staging.used_bytes,
            "registrations": self.parts.gpus.registrations if self.parts.gpus is not None else 0,
        }
