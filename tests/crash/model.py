"""What the owner of a chain knows of each of its blocks: what it was promised, and what may be there.

A key that was deleted is put again with other bytes (a new version), so that a block that comes
back from the dead shows as wrong bytes.
"""

import enum

BLOCKS_MAX = 1000
VERSIONS_MAX = 100_000


class Promise(enum.IntEnum):
    """How sure it is that a block is there; each is more than the one before."""

    GONE = 0  # it must not be there: never put, deleted, or found missing
    MAYBE = 1  # a put or a delete was begun and not answered: there, whole, or not there
    MEMORY = 2  # acknowledged: it survives the daemon
    NVME = 3  # acknowledged as durable: it survives the memory, too


class Chain:
    """The blocks of one chain; one process owns it and is the only one that puts or deletes."""

    def __init__(self, number, block_bytes, hashes):
        self.number = number
        self.block_bytes = block_bytes
        self.hashes = hashes
        self.promises = [Promise.GONE] * len(hashes)
        self.versions = [0] * len(hashes)
        self.promised_s = [0.0] * len(hashes)  # when it was asked for what was promised then, by the wall clock
        self.deletes = 0  # begun so far

    def __len__(self):
        return len(self.hashes)

    @property
    def stored_bytes(self):
        """Bytes of the blocks that may be there."""
        return self.block_bytes * sum(promise is not Promise.GONE for promise in self.promises)

    def payload(self, index):
        """The number that says which bytes block `index` has; never the same for two versions of two blocks."""
        return (self.number * BLOCKS_MAX + index) * VERSIONS_MAX + self.versions[index]

    def first_unsure(self):
        """The first block that is not acknowledged; the length where all are."""
        unsure = (i for i, promise in enumerate(self.promises) if promise < Promise.MEMORY)
        return next(unsure, len(self))

    # --- what its owner does ---

    def begin_put(self, start, stop):
        """Blocks are about to be put; returns the numbers of their payloads."""
        for i in range(start, stop):
            if self.promises[i] is Promise.GONE:
                self.versions[i] += 1
                self.promises[i] = Promise.MAYBE
        return [self.payload(i) for i in range(start, stop)]

    def acknowledged(self, index, promise, asked_s):
        """The daemon said that the block is there: at some time since it was asked."""
        self.promises[index] = max(self.promises[index], promise)
        self.promised_s[index] = asked_s

    def flushed(self):
        """The daemon said that everything that was in memory is on NVMe, too."""
        self.promises = [Promise.NVME if promise is Promise.MEMORY else promise for promise in self.promises]

    def memory_lost(self):
        """The memory died with the daemon: only what is durable must be there."""
        self.promises = [Promise.MAYBE if promise is Promise.MEMORY else promise for promise in self.promises]

    def begin_delete(self, start):
        """Blocks from `start` on are about to be deleted."""
        self.deletes += 1
        self.promises[start:] = [min(promise, Promise.MAYBE) for promise in self.promises[start:]]

    def deleted(self, start):
        """The daemon said that they are gone."""
        self.promises[start:] = [Promise.GONE] * (len(self) - start)

    # --- what it finds after a crash ---

    def found(self, index, asked_s):
        """The block was delivered, so it is committed, or was at some time since it was asked for."""
        if self.promises[index] is Promise.MAYBE:
            self.promises[index] = Promise.MEMORY
            self.promised_s[index] = asked_s

    def missed(self, index):
        """The daemon, idle, said that the block is not there: from now on it must not be."""
        self.promises[index] = Promise.GONE
