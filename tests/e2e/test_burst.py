"""More than fits: bursts over DRAM, other block sizes, and random operations against a model."""

import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.testing.daemon_process import DaemonProcess, status
from kvstored.testing.waiting import PATIENCE_S
from tests.e2e.checks import BLOCK_BYTES, Bystander, Level, check_balance, fill, tier
from tests.e2e.raw_client import HIT, MISS, PENDING, THROTTLED, RawClient, blocks_of, eventually, hashes_of, payload

MIB = 1 << 20
DRAM_BYTES = 32 * MIB
STAGING_BYTES = 2 * MIB
KIB = 1 << 10


def daemon_of(tmp_path, *, nvme, dram_bytes=DRAM_BYTES, **more):
    own = {
        "dram.capacity_bytes": str(dram_bytes),
        "dram.segment_bytes": str(4 * MIB),
        "nvme.capacity_bytes": str(512 * MIB),
        "nvme.extent_bytes": str(32 * MIB),
    }
    return DaemonProcess({**own, **more}, nvme=nvme, parent_directory=tmp_path)


def client_of(daemon):
    return RawClient(daemon.session_socket, staging_bytes=STAGING_BYTES)


def put_all(client, namespace, name, total_bytes, size_bytes=BLOCK_BYTES, chain=16):
    """Put chains, trying again what is throttled; returns the chains and every outcome that was seen."""
    chains, seen = [], set()
    for number in range(-(-total_bytes // (size_bytes * chain))):
        left = hashes_of(f"{name} {number}", chain)
        chains.append(left)
        for _ in range(200):
            outcomes = client.put(namespace, left, [payload(h, size_bytes) for h in left], wait_s=2.0)
            seen |= set(outcomes)
            left = [h for h, outcome in zip(left, outcomes, strict=True) if outcome != HIT]
            if not left:
                break
        assert not left, f"still throttled: {seen}"
    return chains, seen


def read_all(client, namespace, chains, size_bytes=BLOCK_BYTES):
    """How many of the blocks come back, all of them with the right bytes."""
    return sum(read_patiently(client, namespace, hashes, size_bytes) for hashes in chains)


def read_patiently(client, namespace, hashes, size_bytes):
    """Read a chain; asks again where the daemon says that it has the rest and no room at the moment."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        reply = client.get(namespace, hashes, wait_s=10.0)
        found = [client.bytes_of(block) for lease in reply.leases for block in blocks_of(lease)]
        client.release([lease.lease_id for lease in reply.leases])
        assert found == [payload(h, size_bytes) for h in hashes[: len(found)]]
        if reply.next not in (THROTTLED, PENDING):
            return len(found)
        assert time.monotonic() < end_s, f"still {len(found)} of {len(hashes)}, and then {reply.next}"


def test_a_burst_of_three_times_dram_loses_nothing_that_was_acknowledged(tmp_path):
    with daemon_of(tmp_path, nvme=True) as daemon:
        with client_of(daemon) as client, Bystander(daemon.session_socket) as bystander:
            level = Level(daemon)
            namespace = client.namespace()
            chains, seen = put_all(client, namespace, "burst", 3 * DRAM_BYTES)
            assert seen <= {HIT, THROTTLED}
            bystander.wait_rounds(1)
            assert sum(map(len, chains)) == 3 * DRAM_BYTES // BLOCK_BYTES
            assert read_all(client, namespace, chains) == sum(map(len, chains))
            counters = status(daemon.session_socket).counters
            assert counters["demoted_blocks"] > 0
            assert counters["promoted_blocks"] > 0
            assert not counters["evicted_lost_blocks"]
            client.close()
            level.check()
        check_balance(daemon.session_socket)
        assert "Traceback" not in daemon.log_tail()


def test_writers_that_never_wait_are_throttled_and_nothing_else(tmp_path):
    with daemon_of(tmp_path, nvme=True) as daemon, client_of(daemon) as client:
        namespace = client.namespace()
        done = fill(client, namespace, "hasty", 3 * DRAM_BYTES, wait_s=0)
        assert {outcome for _, outcomes in done for outcome in outcomes} <= {HIT, THROTTLED}
        stored = [[h for h, o in zip(hashes, outcomes, strict=True) if o == HIT] for hashes, outcomes in done]
        assert all(outcomes == sorted(outcomes) for _, outcomes in done), "a chain is cut, never holed"
        assert read_all(client, namespace, [hashes for hashes in stored if hashes]) == sum(map(len, stored))


def test_two_writers_and_a_reader_at_once_see_only_right_bytes(tmp_path):
    with daemon_of(tmp_path, nvme=True) as daemon, client_of(daemon) as first, client_of(daemon) as second:
        ours, theirs = first.namespace("one"), second.namespace("two")
        mine, yours = [], []
        with Bystander(daemon.session_socket):
            for number in range(12):
                mine += put_all(first, ours, f"one {number}", 4 * MIB)[0]
                yours += put_all(second, theirs, f"two {number}", 4 * MIB)[0]
        assert read_all(second, theirs, yours) == sum(map(len, yours))
        assert read_all(first, ours, mine) == sum(map(len, mine))


def test_without_a_lower_tier_a_burst_evicts_the_oldest(tmp_path):
    with daemon_of(tmp_path, nvme=False) as daemon, client_of(daemon) as client:
        namespace = client.namespace()
        chains, seen = put_all(client, namespace, "burst", 3 * DRAM_BYTES)
        assert seen == {HIT}
        fits = DRAM_BYTES // BLOCK_BYTES // 16
        assert read_all(client, namespace, chains[-fits:]) == fits * 16
        assert [client.lookup(namespace, hashes).prefix_blocks for hashes in chains[:-fits]] == [0] * (
            len(chains) - fits
        )
        check_balance(daemon.session_socket)


def test_leased_blocks_outlast_any_burst(tmp_path):
    with daemon_of(tmp_path, nvme=True) as daemon, client_of(daemon) as client, client_of(daemon) as holder:
        namespace, theirs = client.namespace(), holder.namespace()
        chains, _ = put_all(client, namespace, "held", 8 * MIB)
        replies = [holder.get(theirs, hashes) for hashes in chains]
        assert sum(reply.blocks for reply in replies) == 8 * MIB // BLOCK_BYTES
        put_all(client, namespace, "burst", 2 * DRAM_BYTES)
        for hashes, reply in zip(chains, replies, strict=True):
            found = [holder.bytes_of(block) for block in blocks_of(reply.leases[0])]
            assert found == [payload(h, BLOCK_BYTES) for h in hashes]


# ---- other block sizes ----


@pytest.mark.parametrize("nvme", [False, True], ids=["dram", "dram-nvme"])
def test_a_change_of_block_sizes_takes_memory_over(tmp_path, nvme):
    with daemon_of(tmp_path, nvme=nvme) as daemon, client_of(daemon) as client:
        namespaces = {size: client.namespace(f"size {size}") for size in (64 * KIB, 48 * KIB, 256 * KIB)}
        stored = {}
        for size, namespace in namespaces.items():
            stored[size], seen = put_all(client, namespace, f"size {size}", DRAM_BYTES, size, chain=4)
            assert seen <= {HIT, THROTTLED}
        last = 256 * KIB
        resident = read_all(client, namespaces[last], stored[last][-4:], last)
        assert resident == 16, "the newest are there"
        for size, namespace in namespaces.items():
            found = read_all(client, namespace, stored[size], size)
            if nvme:
                assert found == sum(map(len, stored[size]))
        check_balance(daemon.session_socket)
        if not nvme:
            assert tier(client.status(), "dram").used_bytes > DRAM_BYTES // 2
        assert "Traceback" not in daemon.log_tail()


def test_sizes_that_alternate_do_not_lose_bytes(tmp_path):
    rng = random.Random(5)
    sizes = [4 * KIB, 12 * KIB + 5, 64 * KIB, 100_000, 512 * KIB, MIB]
    with daemon_of(tmp_path, nvme=True) as daemon, client_of(daemon) as client:
        namespaces = {size: client.namespace(f"size {size}") for size in sizes}
        stored = {size: [] for size in sizes}
        for number in range(60):
            size = rng.choice(sizes)
            stored[size] += put_all(client, namespaces[size], f"turn {number}", MIB, size, chain=min(16, MIB // size))[
                0
            ]
        for size in sizes:
            assert read_all(client, namespaces[size], stored[size], size) == sum(map(len, stored[size]))
        check_balance(daemon.session_socket)


# ---- random operations ----

FUZZ_BLOCK_BYTES = 96 * KIB
CHAINS, LENGTH = 6, 8
VERBS = ("put", "put", "put", "read", "read", "get", "release", "delete", "prefetch", "lookup", "flush", "other size")
steps = st.lists(
    st.tuples(st.sampled_from(VERBS), st.integers(0, CHAINS - 1), st.integers(1, LENGTH), st.integers(0, LENGTH - 1)),
    min_size=1,
    max_size=30,
)


class Model:
    """What a client may expect: a block has the bytes of its last put, or is not there; a deleted one is not."""

    def __init__(self, client, number):
        self.client = client
        self.namespace = client.namespace(f"fuzz {number}")
        self.other = client.namespace(f"fuzz {number} other size")
        self.chains = [hashes_of(f"fuzz {number} {i}", LENGTH) for i in range(CHAINS)]
        self.versions = {}  # hash -> version of the bytes that were put; deleted ones are absent
        self.puts = 0
        self.leases = []

    def step(self, verb, chain, length, start):
        hashes = self.chains[chain][:length]
        getattr(self, verb.replace(" ", "_"))(hashes, hashes[start % length :])

    def put(self, hashes, _):
        self.puts = self.puts % 250 + 1
        blocks = [payload(h, FUZZ_BLOCK_BYTES, self.versions.get(h, self.puts)) for h in hashes]
        for hash_, outcome in zip(hashes, self.client.put(self.namespace, hashes, blocks, wait_s=1.0), strict=True):
            assert outcome in (HIT, THROTTLED)
            if outcome == HIT:
                self.versions.setdefault(hash_, self.puts)

    def read(self, hashes, _):
        found = self.client.read(self.namespace, hashes, wait_s=5.0)
        self.check(hashes, found)

    def check(self, hashes, found):
        for hash_, data in zip(hashes, found, strict=False):
            assert hash_ in self.versions, "a block came back that was deleted or never stored"
            assert data == payload(hash_, FUZZ_BLOCK_BYTES, self.versions[hash_])

    def get(self, hashes, _):
        reply = self.client.get(self.namespace, hashes)
        if reply.leases and len(self.leases) < 4:
            self.leases.append((reply.leases[0], [dict(self.versions)[h] for h in hashes[: reply.blocks]], hashes))
        elif reply.leases:
            self.client.release([reply.leases[0].lease_id])

    def release(self, *_):
        if self.leases:
            lease, versions, hashes = self.leases.pop(0)
            for block, version, hash_ in zip(blocks_of(lease), versions, hashes, strict=False):
                assert self.client.bytes_of(block) == payload(hash_, FUZZ_BLOCK_BYTES, version)
            assert self.client.release([lease.lease_id]) == 1

    def delete(self, _, tail):
        self.client.delete(self.namespace, tail)
        for hash_ in tail:
            self.versions.pop(hash_, None)
        assert self.client.contains(self.namespace, tail) == [MISS] * len(tail)

    def prefetch(self, hashes, _):
        reply = self.client.prefetch(self.namespace, hashes)
        if reply.prefetch_id and len(hashes) % 2:
            request = pb.PollPrefetchRequest(prefetch_id=reply.prefetch_id, wait_ms=2000)
            self.client.call(pb.OPERATION_POLL_PREFETCH, request, pb.PollPrefetchReply)
        elif reply.prefetch_id:
            request = pb.CancelPrefetchRequest(prefetch_id=reply.prefetch_id)
            self.client.call(pb.OPERATION_CANCEL_PREFETCH, request, pb.PollPrefetchReply)

    def lookup(self, hashes, _):
        found = self.client.lookup(self.namespace, hashes)
        assert found.ready_blocks <= found.prefix_blocks <= len(hashes)
        assert all(h in self.versions for h in hashes[: found.ready_blocks])

    def flush(self, *_):
        if any(t.name == "nvme" for t in self.client.status().tiers):
            self.client.flush()

    def other_size(self, hashes, _):
        blocks = [payload(h, 200 * KIB) for h in hashes]
        self.client.put(self.other, hashes, blocks, wait_s=1.0)
        found = self.client.read(self.other, hashes, wait_s=5.0)
        assert found == blocks[: len(found)]


@pytest.fixture(scope="module", params=[False, True], ids=["dram", "dram-nvme"])
def small(request, tmp_path_factory):
    """A daemon so small that nearly every step moves or evicts something."""
    more = {"dram.segment_bytes": str(MIB), "nvme.capacity_bytes": str(64 * MIB)}
    with daemon_of(tmp_path_factory.mktemp("fuzz"), nvme=request.param, dram_bytes=4 * MIB, **more) as daemon:
        yield daemon, iter(range(1_000_000))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(steps)
def test_random_operations_never_give_wrong_bytes(small, operations):
    daemon, numbers = small
    with client_of(daemon) as client:
        model = Model(client, next(numbers))
        for operation in operations:
            model.step(*operation)
        while model.leases:
            model.release()
        for hashes in model.chains:
            model.read(hashes, None)
            model.delete(None, hashes)
    eventually(lambda: not status(daemon.session_socket).counters["held_leased_bytes"], "leases are back")
    check_balance(daemon.session_socket)
