"""One client process of the crash test: puts, reads and deletes its own chains, and checks them when told to.

It outlives every crash of the daemon, as an engine does, so it knows exactly what it was promised.
Two tenants use the same hashes with different bytes.
"""

import enum
import random
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from kvstored_client import Client, KVStoredClientError, NamespaceSpec, Outcome, streaming
from kvstored_client.blocks import Blocks
from kvstored_proto.v1 import admin_pb2
from kvstored_proto.v1 import kvstored_pb2 as pb

from bench.cell import chain_hashes
from bench.payload import Payloads
from tests.counts import Counts
from tests.crash.model import Chain, Promise
from tests.crash.verdict import Checker

COUNTS = (
    *("order", "obeyed", "doing", "connected", "client_errors"),
    *("dead_blocks", "dead_bytes"),
    *("puts", "put_bytes", "durable_acks", "gets", "hits", "prefetches", "deletes", "flushes", "held_through"),
    *("checks", "checked_blocks", "checked_bytes", "wrong_bytes", "resurrected"),
    *("durable_checked", "durable_lost", "dram_checked", "dram_lost", "evicted_blocks"),
)
SHAPES = ((16 << 10, 48), (128 << 10, 24), (512 << 10, 8))  # block bytes, blocks in a chain
CHAINS = 60  # of each writer
STAGING_BYTES = 8 << 20
# A daemon that is killed is seen at once; one that is only slow must not look like it.
PATIENT = {"timeout_s": 60.0, "connect_timeout_s": 60.0}
PROMISES = (Outcome.HIT, Outcome.NOT_DURABLE)  # of either the block is readable
TENANTS = ("red", "blue")
ADMIN = "admin"


class Held(NamedTuple):
    """A lease: the payloads that it had when it was taken, which it keeps to its end."""

    chain: Chain
    payloads: list[int]
    deletes: int  # of the chain, by then
    blocks: Blocks


class Order(enum.IntEnum):
    """What the parent wants; carried with a number that grows, so that each order is obeyed once."""

    RUN = 0
    PAUSE = 1
    CHECK = 2
    STOP = 3
    BLACKOUT = 4  # a pause; the memory died, too


class Verb(enum.IntEnum):
    """What a writer is doing: what the parent aims at."""

    NOTHING = 0
    PUT = 1
    GET = 2
    PREFETCH = 3
    DELETE = 4
    FLUSH = 5


class Task(NamedTuple):
    """What one writer needs to know."""

    address: str
    counts_path: str
    writers: int
    index: int
    seed: int
    live_bytes: int  # of its chains
    bytes_per_s: float  # its puts, at most
    all_in_dram: bool  # the tiers have room for everything: what is committed stays in DRAM


def token(tenant):
    """What a client of this tenant shows."""
    return f"crash-{tenant}"


class Writer:
    """Random verbs over chains of its own."""

    def __init__(self, task, client, admin, counts):
        self.task, self.client, self.admin, self.counts = task, client, admin, counts
        self.rng = random.Random(task.seed)
        self.spaces = {size: client.namespace(NamespaceSpec(model="crash", extra=str(size))) for size, _ in SHAPES}
        self.payloads = {size: Payloads(size) for size, _ in SHAPES}
        self.chains = [self._chain(number) for number in range(CHAINS)]
        self.checker = Checker(client, self.spaces, self.payloads, self.count, all_in_dram=task.all_in_dram)
        self.held = []
        self.life = client.boot_id  # of the daemon, as of the last check: what it says is what was promised in it
        self.started_s = time.monotonic()
        verbs = {(Verb.PUT, self.put): 50, (Verb.GET, self.get): 20, (Verb.PREFETCH, self.prefetch): 10}
        verbs |= {(Verb.DELETE, self.delete_some): 2, (Verb.FLUSH, self.flush): 2}
        self.verbs, self.weights = list(verbs), list(verbs.values())

    def _chain(self, number):
        size, blocks = SHAPES[number % len(SHAPES)]
        pair, member = divmod(self.task.index, len(TENANTS))
        hashes = chain_hashes(f"crash {pair} {number}", blocks)
        return Chain((pair * len(TENANTS) + member) * CHAINS + number, size, hashes)

    def count(self, name, count=1):
        self.counts.add(self.task.index, name, count)

    # --- obeying -----------------------------------------------------------------

    def run(self):
        """Do what the parent orders until it orders to stop."""
        done = 0
        while True:
            order = self.counts.get(self.task.index, "order")
            kind = Order(order % len(Order))
            if kind is Order.STOP:
                return
            if order == done and kind is not Order.RUN:
                time.sleep(0.005)
                continue
            if kind is Order.CHECK:
                self.check()
            if kind is Order.BLACKOUT:
                for chain in self.chains:
                    chain.memory_lost()
                self.checker.memory_lost = True
            if kind in (Order.PAUSE, Order.BLACKOUT):
                self.tell_dead()
            done = order
            self.counts.set(self.task.index, "obeyed", order)
            if kind is Order.RUN:
                self.step()

    def step(self):
        """One verb, chosen at random."""
        verb, act = self.rng.choices(self.verbs, self.weights)[0]
        if not self.client.connected:  # puts and deletes would only make it unsure what is there
            time.sleep(0.01)
            verb, act = Verb.GET, self.get
        self.counts.set(self.task.index, "doing", verb)
        act()
        self.counts.set(self.task.index, "doing", Verb.NOTHING)
        while self.held and self.rng.random() < 0.3:
            self.let_go(self.held.pop(0))

    def tell_dead(self):
        """Blocks that may be deleted and held all the same: they fill slots, and no listing has them.

        Connected first, so that the daemon knows which of the leases before the crash are still in use.
        """
        self.checker.connect()
        dead = [held for held in self.held if held.deletes != held.chain.deletes]
        self.counts.set(self.task.index, "dead_blocks", sum(len(held.blocks) for held in dead))
        size_bytes = sum(len(held.blocks) * held.chain.block_bytes for held in dead)
        self.counts.set(self.task.index, "dead_bytes", size_bytes)

    def check(self):
        """Look for every block of every chain, then let go of what was held through the crash."""
        self.checker.connect()
        while self.held:
            held = self.held.pop()
            self.count("held_through", len(held.blocks) * held.blocks.valid())
            self.let_go(held)
        for chain in self.chains:
            self.checker.check(chain)
        self.checker.memory_lost = False  # what is there has been brought up
        self.life = self.client.boot_id
        self.count("checks")

    # --- verbs -------------------------------------------------------------------

    def put(self):
        allowed = self.task.bytes_per_s * (time.monotonic() - self.started_s + 0.5)
        if self.counts.get(self.task.index, "put_bytes") > allowed:
            time.sleep(0.005)
            return
        chain = self.rng.choice(self.chains)
        start = chain.first_unsure()
        if start == len(chain):
            return
        if sum(each.stored_bytes for each in self.chains) > self.task.live_bytes:
            self.delete(self.rng.choice([each for each in self.chains if each.stored_bytes]), 0)
        start = min(start, chain.first_unsure())  # it may have been the one
        stop = self.rng.randint(start + 1, len(chain))
        rows = list(self.payloads[chain.block_bytes].make(chain.begin_put(start, stop)))
        parent = chain.hashes[start - 1] if start else b""
        durability = self.rng.choice(("memory", "memory", "nvme"))
        space, wait_s, asked_s = self.spaces[chain.block_bytes], self.rng.choice((0.0, 1.0)), time.time()
        result = self.client.put(
            space, chain.hashes[start:stop], rows, parent=parent, wait_s=wait_s, durability=durability
        )
        promise = Promise.NVME if durability == "nvme" else Promise.MEMORY
        for index, outcome in enumerate(result.outcomes, start):
            if outcome in PROMISES:
                chain.acknowledged(index, promise if outcome is Outcome.HIT else Promise.MEMORY, asked_s)
        self.count("puts", result.stored)
        self.count("put_bytes", result.stored * chain.block_bytes)
        self.count("durable_acks", result.durable)

    def get(self):
        chain = self.rng.choice(self.chains)
        count = self.rng.randint(1, len(chain))
        wait_s = self.rng.choice((0.0, 0.5))
        blocks = self.client.get(self.spaces[chain.block_bytes], chain.hashes[:count], wait_s=wait_s)
        dead = sum(chain.promises[i] is Promise.GONE for i in range(len(blocks)))
        held = Held(chain, [chain.payload(i) for i in range(len(blocks))], chain.deletes, blocks)
        self.held.append(held)
        self.count("gets")
        self.count("hits", len(blocks))
        self.count("resurrected", dead * blocks.valid())
        self.compare(held)

    def compare(self, held):
        """What is held is right, as far as it was still held after it was read."""
        payloads = self.payloads[held.chain.block_bytes]
        wrong = sum(payloads.wrong_bytes(n, held.blocks[i]) for i, n in enumerate(held.payloads))
        if held.blocks.valid():
            self.count("checked_bytes", len(held.blocks) * held.chain.block_bytes)
            self.count("wrong_bytes", wrong)

    def let_go(self, held):
        """Read a lease once more before it ends: it has the bytes that it had, whatever became of the keys."""
        self.compare(held)
        held.blocks.release()

    def prefetch(self):
        chain = self.rng.choice(self.chains)
        prefetch = self.client.prefetch(self.spaces[chain.block_bytes], chain.hashes)
        if self.rng.random() < 0.5:
            prefetch.wait(1.0)
        self.count("prefetches")

    def delete_some(self):
        chain = self.rng.choice(self.chains)
        self.delete(chain, self.rng.randrange(len(chain)))

    def delete(self, chain, start):
        """Acknowledged where nothing failed open meanwhile: then none of them may be there, however many were."""
        chain.begin_delete(start)
        failed = self.failed()
        self.count("deletes", self.client.delete(self.spaces[chain.block_bytes], chain.hashes[start:]))
        if self.failed() == failed:
            chain.deleted(start)

    def failed(self):
        """Calls that were not answered, or by an error."""
        stats = self.client.stats
        return stats.misses_unavailable + stats.timeouts + stats.refused

    def flush(self):
        """All is on NVMe then: of this life of the daemon. One that has just come back may have lost its memory."""
        request = admin_pb2.FlushRequest(wait_ms=5000)
        try:
            reply = self.admin.call(pb.OPERATION_FLUSH, request, admin_pb2.FlushReply, timeout_s=60.0)
        except KVStoredClientError:
            return
        if not reply.left_blocks and reply.boot_id == self.life:
            self.count("flushes")
            for chain in self.chains:
                chain.flushed()


def run_writer(task):
    """Body of one writer process."""
    counts = Counts(Path(task.counts_path), task.writers, COUNTS)
    mine = TENANTS[task.index % len(TENANTS)]
    if task.index // len(TENANTS) % 2:  # chains are short: stream them all the same
        streaming.STREAM_FROM_BYTES = 0
    try:
        with (
            Client(task.address, name="crash", token=token(mine), staging_bytes=STAGING_BYTES, **PATIENT) as client,
            Client(task.address, name="crash admin", token=token(ADMIN), staging_bytes=0, **PATIENT) as admin,
        ):
            Writer(task, client, admin, counts).run()
    except BaseException:
        counts.add(task.index, "client_errors")
        traceback.print_exc(file=sys.stderr)
        raise
