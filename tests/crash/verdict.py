"""Every block of a chain looked for after a crash: delivered right, rightly not there, or lost."""

import time
from datetime import datetime

from kvstored_client import KVStoredClientError, Refused
from kvstored_proto.v1 import admin_pb2
from kvstored_proto.v1 import kvstored_pb2 as pb

from bench.common import progress
from tests.crash.model import Promise

CONNECT_S = 180.0
CHAIN_S = 180.0
WAIT_S = 5.0
# A record of an eviction older than the promise explains nothing. It has whole seconds, and is written a moment
# before the block goes, in which it is still there to be promised.
RECORD_S = 5.0


class Checker:
    """Compares what a daemon delivers with what was promised; counts by `count(name, n)`."""

    def __init__(self, client, spaces, payloads, count, *, all_in_dram):
        self.client, self.spaces, self.payloads, self.count = client, spaces, payloads, count
        self.all_in_dram = all_in_dram
        self.memory_lost = False  # since the last check

    def connect(self):
        """Wait until the daemon answers."""
        deadline = time.monotonic() + CONNECT_S
        while self.client.status() is None:
            assert time.monotonic() < deadline, f"no answer from the daemon: {self.client.connect_error}"
            time.sleep(0.02)

    def check(self, chain):
        """Every block that was ever put. What is not there must not come back: the chain is told."""
        deadline = time.monotonic() + CHAIN_S
        if self.all_in_dram and not self.memory_lost:
            self.look_in_dram(chain)
        index = 0
        while index < len(chain):
            if not chain.versions[index]:
                index += 1
                continue
            delivered = self.deliver(chain, index)
            index += delivered
            if not delivered and not self.there(chain, index, deadline):
                index += 1

    def deliver(self, chain, start):
        """Get what there is from `start` on, and judge it; returns how many blocks."""
        space, hashes, asked_s = self.spaces[chain.block_bytes], chain.hashes[start:], time.time()
        with self.client.get(space, hashes, wait_s=WAIT_S) as blocks:
            wrong = [
                self.payloads[chain.block_bytes].wrong_bytes(chain.payload(start + i), blocks[i])
                for i in range(len(blocks))
            ]
            if not blocks.valid():
                return 0
        for index in range(start, start + len(wrong)):
            promise = chain.promises[index]
            self.count("resurrected", promise is Promise.GONE)
            self.count("durable_checked", promise is Promise.NVME)
            self.count("dram_checked", promise >= Promise.MEMORY)
            chain.found(index, asked_s)
        self.count("checked_blocks", len(wrong))
        self.count("checked_bytes", len(wrong) * chain.block_bytes)
        self.count("wrong_bytes", sum(wrong))
        return len(wrong)

    def look_in_dram(self, chain):
        """Before anything is brought up: what was promised must be in DRAM, whatever NVMe has of it."""
        space = self.spaces[chain.block_bytes]
        for index in range(len(chain)):
            if chain.promises[index] >= Promise.MEMORY and self.client.lookup(space, [chain.hashes[index]]).nvme_blocks:
                progress(f"lost: block {index} of chain {chain.number}, {chain.promises[index].name}, is on NVMe only")
                self.count("dram_lost")

    def there(self, chain, index, deadline):
        """Whether a block that was not delivered may yet be; if not, it is judged."""
        verdict, detail = self.why(chain, index)
        if verdict in ("hit", "pending", "") and time.monotonic() < deadline:
            time.sleep(0.05)
            return True
        if chain.promises[index] >= Promise.MEMORY:
            self.missing(chain, index, verdict, detail)
        chain.missed(index)
        return False

    def missing(self, chain, index, verdict, detail):
        """An acknowledged block is not there."""
        promise = chain.promises[index]
        if verdict == "evicted" and evicted_s(detail) + RECORD_S >= chain.promised_s[index]:
            self.count("evicted_blocks")
            return
        age_s = time.time() - chain.promised_s[index]
        what = f"{promise.name}, {chain.block_bytes} bytes, version {chain.versions[index]}, promised {age_s:.1f} s ago"
        around = "".join(str(int(each)) for each in chain.promises)
        progress(f"lost: block {index} of chain {chain.number}: {what}; chain {around}; {verdict}: {detail}")
        name = "durable" if promise is Promise.NVME else "dram"
        self.count(f"{name}_checked")
        self.count(f"{name}_lost")

    def why(self, chain, index):
        """The daemon's own verdict on a block, with one sentence; empty where it did not answer."""
        digest = self.spaces[chain.block_bytes].digest
        request = admin_pb2.ExplainRequest(hash=chain.hashes[index], namespace_digest=digest)
        try:
            answer = self.client.call(pb.OPERATION_EXPLAIN, request, admin_pb2.ExplainReply)
        except Refused as refused:
            return "never_stored", str(refused)  # nothing is known of the whole namespace
        except KVStoredClientError:
            return "", ""
        return answer.verdict, answer.detail


def evicted_s(detail):
    """When a block was evicted, by the sentence that says so (wall clock, whole seconds)."""
    return datetime.fromisoformat(detail.split(" at ")[1].split(": ")[0]).timestamp()
