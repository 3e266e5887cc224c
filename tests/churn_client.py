"""One client process of the churn: does everything a client can do, until it is killed.

Blocks belong to chains of fixed sizes; what a block holds follows from its number, so every
delivered byte can be checked by whoever gets it. What the process did is counted in a mapped
file, so that a `kill -9` loses nothing.
"""

import random
import sys
import time
import traceback
from pathlib import Path

from kvstored_client import Client, NamespaceSpec, streaming

from bench.cell import chain_hashes
from bench.payload import Payloads
from tests.counts import Counts

COUNTS = ("puts", "gets", "hits", "prefetches", "deletes", "checked_bytes", "wrong_bytes", "client_errors", "stop")
SHAPES = ((16 << 10, 64), (64 << 10, 32), (256 << 10, 16), (512 << 10, 12))  # block bytes, blocks in a chain
CHAINS = 240
STAGING_BYTES = 8 << 20


class ChurnClient:
    """Random verbs over a shared universe of chains."""

    def __init__(self, client, counts, index, seed):
        self.client, self.counts, self.index = client, counts, index
        self.rng = random.Random(seed)
        self.spaces = {size: client.namespace(NamespaceSpec(model="churn", extra=str(size))) for size, _ in SHAPES}
        self.payloads = {size: Payloads(size) for size, _ in SHAPES}
        self.held = []
        verbs = {self.put: 30, self.get: 30, self.get_into: 12, self.prefetch: 10, self.stage: 8}
        verbs |= {self.ask: 5, self.touch: 3, self.delete: 2}
        self.verbs, self.weights = list(verbs), list(verbs.values())

    def step(self):
        self.rng.choices(self.verbs, self.weights)[0]()
        while self.held and self.rng.random() < 0.5:
            self.held.pop(0).__exit__(None, None, None)

    def pick(self):
        """A leading part of a chain, popular chains more often: space, block size, numbers, hashes."""
        chain = int(CHAINS * self.rng.random() ** 2)
        size, blocks = SHAPES[chain % len(SHAPES)]
        count = self.rng.randint(1, blocks)
        hashes = chain_hashes(f"churn {chain}", count)
        return self.spaces[size], size, [chain * 1000 + i for i in range(count)], hashes

    def put(self):
        space, size, numbers, hashes = self.pick()
        start = min(self.client.lookup(space, hashes).prefix_blocks, len(hashes) - 1)
        rows = list(self.payloads[size].make(numbers[start:]))
        parent = hashes[start - 1] if start else b""
        result = self.client.put(space, hashes[start:], rows, parent=parent, wait_s=self.rng.choice((0.0, 0.5)))
        self.counts.add(self.index, "puts", result.stored)

    def get(self):
        space, size, numbers, hashes = self.pick()
        lease = self.client.get(space, hashes, wait_s=self.rng.choice((0.0, 0.2, 1.0)))
        blocks = lease.__enter__()
        self.held.append(lease)
        self.check(size, numbers, [blocks[i] for i in range(len(blocks))])
        if self.rng.random() < 0.2:
            time.sleep(self.rng.uniform(0, 0.05))  # a lease that outlives other work, or its process

    def get_into(self):
        space, size, numbers, hashes = self.pick()
        buffers = [bytearray(size) for _ in hashes]
        delivered = self.client.get_into(space, hashes, buffers, wait_s=self.rng.choice((0.0, 0.5)))
        self.check(size, numbers, buffers[:delivered])

    def prefetch(self):
        space, _, _, hashes = self.pick()
        prefetch = self.client.prefetch(space, hashes, priority=self.rng.randint(0, 3))
        what = self.rng.random()
        if what < 0.4:
            prefetch.wait(1.0)
        elif what < 0.7:
            prefetch.cancel()
        self.counts.add(self.index, "prefetches")

    def stage(self):
        space, size, numbers, hashes = self.pick()
        limit = max(1, STAGING_BYTES // size)
        with self.client.stage(space, hashes[:limit], size) as staged:
            rows = self.payloads[size].make(numbers[:limit])
            for view, row in zip(staged.views, rows, strict=True):
                if view is not None:
                    view[:] = row.data.cast("B")
            if self.rng.random() < 0.7:  # else: abandoned, and aborted by leaving
                self.counts.add(self.index, "puts", staged.commit().stored)

    def ask(self):
        space, _, _, hashes = self.pick()
        found = self.client.lookup(space, hashes)
        assert found.ready_blocks <= found.prefix_blocks <= len(hashes)
        assert len(self.client.contains(space, hashes)) == len(hashes)

    def touch(self):
        space, _, _, hashes = self.pick()
        self.client.touch(space, hashes)

    def delete(self):
        space, _, _, hashes = self.pick()
        tail = hashes[self.rng.randrange(len(hashes)) :]
        self.counts.add(self.index, "deletes", self.client.delete(space, tail))

    def check(self, size, numbers, blocks):
        wrong = sum(
            self.payloads[size].wrong_bytes(n, block) for n, block in zip(numbers[: len(blocks)], blocks, strict=True)
        )
        self.counts.add(self.index, "gets")
        self.counts.add(self.index, "hits", len(blocks))
        self.counts.add(self.index, "checked_bytes", len(blocks) * size)
        self.counts.add(self.index, "wrong_bytes", wrong)


def run_client(address, counts_path, clients, index, seed):
    """Body of one client process: ends when told to stop, or by SIGKILL."""
    counts = Counts(Path(counts_path), clients, COUNTS)
    try:
        limits = {"timeout_s": 60.0, "connect_timeout_s": 60.0}  # a daemon that is only slow is no daemon that is gone
        if index % 2:  # chains are short: stream them all the same
            streaming.STREAM_FROM_BYTES = 0
        with Client(address, name=f"churn-{index}", staging_bytes=STAGING_BYTES, **limits) as client:
            churn = ChurnClient(client, counts, index, seed)
            while not counts.get(index, "stop"):
                churn.step()
            for lease in churn.held:
                lease.__exit__(None, None, None)
    except BaseException:
        counts.add(index, "client_errors")
        traceback.print_exc(file=sys.stderr)
        raise
