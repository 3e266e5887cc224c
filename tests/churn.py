"""Clients that put, get, prefetch and die by `kill -9` at random, against one small daemon.

    python -m tests.churn --seconds 120 --seed 1 --json -

Nothing delivered may be wrong, and when the last client is gone nothing may be held.
"""

import multiprocessing
import random
import time
from pathlib import Path

from bench.common import MIB, Figure, emit, parser, progress, run
from kvstored.testing.daemon_process import DaemonProcess, status
from tests.churn_audit import audit, descriptors_at_rest
from tests.churn_client import COUNTS, run_client
from tests.counts import Counts

CLIENTS = 4
MEAN_LIFE_S = 3.0  # of one client process, its start included
PATIENCE_S = 120.0  # for what a busy machine has not done in the time
SEGMENTS = 16
SETTINGS = {
    "dram.capacity_bytes": str(128 * MIB),
    "dram.segment_bytes": str(128 * MIB // SEGMENTS),
    "nvme.capacity_bytes": str(512 * MIB),
    "nvme.extent_bytes": str(32 * MIB),
}
LEAKS = (
    Figure("leaked_sessions", "client sessions that outlived their processes", "== 0"),
    Figure("leaked_leases", "leases", "== 0"),
    Figure("leaked_reservations", "reservations", "== 0"),
    Figure("leaked_staging_bytes", "bytes of staging", "== 0"),
    Figure("leaked_holds", "holds on blocks", "== 0"),
    Figure("leaked_unfinished_blocks", "blocks still being written or promoted", "== 0"),
    Figure("leaked_slot_bytes", "bytes of DRAM slots that belong to no block", "== 0"),
    Figure("leaked_descriptors", "descriptors beyond those before the first client", "== 0"),
)
FIGURES = (
    Figure("wrong_bytes", "delivered bytes that differ from what was put", "== 0"),
    Figure("leaked", "all leaks together", "== 0"),
    *LEAKS,
    Figure("client_errors", "client processes that ended by an exception", "== 0"),
    Figure("kills", "client processes killed"),
    Figure("puts", "blocks stored"),
    Figure("gets", "gets"),
    Figure("hits", "blocks delivered and checked"),
    Figure("checked_bytes", "bytes delivered and checked"),
    Figure("prefetches", "prefetches started"),
    Figure("deletes", "blocks deleted"),
    Figure("promoted_blocks", "blocks read from NVMe"),
    Figure("demoted_blocks", "blocks written to NVMe"),
    Figure("seconds", "how long it ran"),
    Figure("seed", "what the randomness came from"),
)


class Churn:
    """The parent: spawns clients, kills them at random, replaces them."""

    def __init__(self, daemon, seed):
        self.daemon = daemon
        self.rng = random.Random(seed)
        self.context = multiprocessing.get_context("spawn")
        self.counts_path = daemon.directory / "counts"
        self.counts = Counts(self.counts_path, CLIENTS, COUNTS)
        self.kills = 0
        self.clients = []

    def run(self, seconds, enough):
        """Kill for so long; where that was not `enough` to show anything, the clients live on until it is."""
        self.clients = [self.spawn(index) for index in range(CLIENTS)]
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                time.sleep(min(self.rng.expovariate(CLIENTS / MEAN_LIFE_S), max(0.0, end - time.monotonic())))
                self.replace(self.rng.randrange(CLIENTS))
            while not enough(self.figures()) and time.monotonic() < end + PATIENCE_S:
                time.sleep(0.5)
            self.counts.set_all("stop", 1)
            self.kill(0)  # one more dies at the very end; the others leave in order
            for client in self.clients:
                client.join(60)
        finally:
            for client in self.clients:
                client.kill()
                client.join()

    def figures(self):
        """What clients and daemon have done by now."""
        names = ("wrong_bytes", "client_errors", "puts", "gets", "hits", "checked_bytes", "prefetches", "deletes")
        counted = {name: self.counts.total(name) for name in names}
        return {**counted, **moved(self.daemon), "kills": self.kills}

    def spawn(self, index):
        arguments = (self.daemon.address, str(self.counts_path), CLIENTS, index, self.rng.getrandbits(32))
        client = self.context.Process(target=run_client, args=arguments, daemon=True)
        client.start()
        return client

    def replace(self, index):
        self.kill(index)
        self.clients[index] = self.spawn(index)

    def kill(self, index):
        self.clients[index].kill()
        self.clients[index].join()
        self.kills += 1


def churn(seconds, seed, directory=None, enough=lambda figures: True):
    """Run it; returns all figures. A slow machine may take longer to do `enough`."""
    with DaemonProcess(SETTINGS, nvme=True, parent_directory=directory) as daemon:
        before = descriptors_at_rest(daemon)
        clients = Churn(daemon, seed)
        started = time.monotonic()
        clients.run(seconds, enough)
        leaks, extra = audit(daemon, before, SEGMENTS)
        if extra:
            progress(f"descriptors left: {dict(extra)}")
        figures = clients.figures()
    return {
        **figures,
        **leaks,
        "leaked": sum(leaks.values()),
        "seconds": time.monotonic() - started,
        "seed": seed,
    }


def moved(daemon):
    """How many blocks went down and up."""
    counters = status(daemon.session_socket).counters
    return {name: counters[name] for name in ("promoted_blocks", "demoted_blocks")}


def main():
    built = parser("tests.churn", "Clients that die at random: nothing wrong, nothing held.", FIGURES)
    built.add_argument("--seconds", type=float, default=120.0)
    built.add_argument("--seed", type=int, default=1)
    built.add_argument("--directory", type=Path, help="where the daemon's files go")
    arguments = built.parse_args()
    progress(f"{CLIENTS} clients for {arguments.seconds:g} s, seed {arguments.seed}")
    values = churn(arguments.seconds, arguments.seed, arguments.directory)
    emit(values, FIGURES, arguments.json)
    return int(any(values[name] for name in ("wrong_bytes", "leaked", "client_errors")))


if __name__ == "__main__":
    run(main)
