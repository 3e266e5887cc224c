"""One phase: a daemon and its writers, crash after crash, and what is found after each."""

import multiprocessing
import random
import time
from collections import Counter

from kvstored_client import Client
from kvstored_proto.v1 import admin_pb2
from kvstored_proto.v1 import kvstored_pb2 as pb

from bench.common import progress
from kvstored.testing.daemon_process import DaemonProcess
from tests.counts import Counts
from tests.crash import accounting
from tests.crash.phases import WRITERS
from tests.crash.writer import ADMIN, COUNTS, PATIENT, TENANTS, Order, Task, Verb, run_writer, token

AIM_S = 1.0  # how long to wait for a writer to do what is aimed at
HIT_S = 0.03  # after that, the kill comes within so long
RECOVERY_S = 0.6  # about as long as a start takes
OBEY_S = 600.0
BEGUN_BLOCKS = 16  # put by each writer, and durably by all of them, before the first crash
BLACKOUTS = 0.25  # share of the rounds in which the memory dies, too: only then NVMe alone answers for what is durable


class Crashing:
    """The parent of one phase. The figures add up over the phases in `totals`."""

    def __init__(self, phase, daemon, seed, totals):
        self.phase, self.daemon, self.totals = phase, daemon, totals
        self.rng = random.Random(seed)
        self.counts_path = daemon.directory / "counts"
        self.counts = Counts(self.counts_path, WRITERS, COUNTS)
        self.orders = 0
        self.dram_lost = self.wrong = 0
        self.admin = Client(daemon.address, name="crash audit", token=token(ADMIN), staging_bytes=0, **PATIENT)
        context = multiprocessing.get_context("spawn")
        self.order(Order.RUN)
        self.writers = [
            context.Process(target=run_writer, args=(self.task(index),), daemon=True) for index in range(WRITERS)
        ]

    def task(self, index):
        return Task(
            address=self.daemon.address,
            counts_path=str(self.counts_path),
            writers=WRITERS,
            index=index,
            seed=self.rng.getrandbits(32),
            live_bytes=self.phase.live_bytes // WRITERS,
            bytes_per_s=self.phase.bytes_per_s / WRITERS,
            all_in_dram=self.phase.all_in_dram,
        )

    # --- the whole phase ---------------------------------------------------------

    def run(self, seconds):
        for writer in self.writers:
            writer.start()
        end = time.monotonic() + seconds
        try:
            self.await_puts()
            self.round()
            while time.monotonic() < end:
                self.round()
            self.verify()
            self.order(Order.STOP)
            for writer in self.writers:
                writer.join(120)
        finally:
            for writer in self.writers:
                writer.kill()
                writer.join()
            self.admin.close()

    def round(self):
        """Work, crash (or crash several times), restart, check."""
        time.sleep(self.rng.uniform(0.2, 1.0))
        self.aim(self.rng.choice((Verb.NOTHING, *self.phase.aims)))
        dropped = self.dropped()
        blackout = self.rng.random() < BLACKOUTS
        self.crash(memory_too=blackout)
        pause = Order.BLACKOUT if blackout else Order.PAUSE
        early = self.rng.random() < 0.5
        if early:  # else the writers go on as soon as they can, until it serves again
            self.order(pause)
        while self.rng.random() < 0.3:
            time.sleep(self.rng.uniform(0, RECOVERY_S))
            self.crash()
        started = time.monotonic()
        self.daemon.wait_serving()
        self.totals["restarts_s"].append(time.monotonic() - started)
        if not early:
            time.sleep(self.rng.uniform(0, 0.1))
            self.order(pause)
        self.obeyed()
        self.account(self.dead())  # before anything else is asked of it: they are right from the first second
        self.order(Order.CHECK)
        self.obeyed()
        self.account(Counter())  # nothing is leased any more
        self.judge_losses(dropped)
        self.totals["rounds"] += 1
        self.order(Order.RUN)

    def await_puts(self):
        """Until every writer has put something: their start is not what is tested, and a crash is to find something."""
        deadline = time.monotonic() + OBEY_S
        while min(*self.counts.all("puts"), self.counts.total("durable_acks")) < BEGUN_BLOCKS:
            self.check_writers(deadline)
            time.sleep(0.01)

    # --- crashing ----------------------------------------------------------------

    def aim(self, verb):
        """Wait until a writer is doing this, and then an instant; NOTHING is any time."""
        deadline = time.monotonic() + AIM_S
        while verb is not Verb.NOTHING and verb not in self.counts.all("doing") and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(self.rng.uniform(0, HIT_S))

    def crash(self, *, memory_too=False):
        self.daemon.crash(memory_too=memory_too)
        self.totals["kills"] += 1
        self.totals["blackouts"] += memory_too

    # --- checking ----------------------------------------------------------------

    def dead(self):
        """By tenant and sum: blocks that may be deleted and leased all the same."""
        dead = Counter()
        for index in range(WRITERS):
            for name in ("blocks", "bytes"):
                dead[TENANTS[index % len(TENANTS)], f"dram_{name}"] += self.counts.get(index, f"dead_{name}")
        return dead

    def account(self, dead):
        """Whether its figures are exact."""
        found = accounting.errors(self.admin, lambda fields: int(fields["extra"]), dead)
        found += accounting.disk_errors(self.daemon.nvme_path, self.phase.nvme_bytes, 32 << 20)
        self.totals["accounting_errors"] += accounting.report(found)
        self.totals["accounts"] += 1

    def dropped(self):
        """Blocks that this daemon evicted from DRAM although NVMe took none at that moment: its own record of it."""
        status = self.admin.status()
        return status.counters["evicted_lost_blocks"] if status is not None else 0

    def judge_losses(self, dropped):
        """Blocks that were only in memory may be missing where the daemon counted as many dropped before it died."""
        lost = self.counts.total("dram_lost") - self.dram_lost
        self.dram_lost += lost
        excused = min(lost, dropped)
        self.totals["dropped_blocks"] += excused
        wrong = self.counts.total("durable_lost") + self.counts.total("wrong_bytes")
        if lost > excused or wrong > self.wrong:
            progress(f"round {self.totals['rounds'] + 1}, the end of the daemon's log:\n{self.daemon.log_tail()}")
        self.wrong = wrong

    def verify(self):
        """At the end of the phase every byte in both tiers against its content hash."""
        self.order(Order.PAUSE)
        self.obeyed()
        reply = self.admin.call(pb.OPERATION_VERIFY, admin_pb2.VerifyRequest(), admin_pb2.VerifyReply, timeout_s=600.0)
        self.totals["corrupt_blocks"] += reply.corrupt
        status = self.admin.call(pb.OPERATION_STATUS, pb.StatusRequest(), pb.StatusReply)
        for name in ("promoted_blocks", "demoted_blocks", "nvme_recycled_extents"):
            self.totals[name] += status.counters[name]
        progress(f"{self.phase.name}: {self.totals['kills']} kills so far")

    # --- the writers -------------------------------------------------------------

    def order(self, kind):
        self.orders += 1
        self.counts.set_all("order", self.orders * len(Order) + kind)

    def obeyed(self):
        """Wait until every writer has done what was ordered."""
        wanted = [self.counts.get(0, "order")] * WRITERS
        deadline = time.monotonic() + OBEY_S
        while self.counts.all("obeyed") != wanted:
            self.check_writers(deadline)
            time.sleep(0.002)

    def check_writers(self, deadline):
        assert time.monotonic() < deadline, f"{self.phase.name}: the writers do not do as told"
        assert all(writer.is_alive() for writer in self.writers), f"{self.phase.name}: a writer ended"


def crash_phase(phase, seconds, seed, directory, totals):
    """Run one phase; returns what its writers counted."""
    with DaemonProcess(phase.settings(), nvme=True, supervised=True, parent_directory=directory) as daemon:
        crashing = Crashing(phase, daemon, seed, totals)
        crashing.run(seconds)
        return {name: crashing.counts.total(name) for name in COUNTS}
