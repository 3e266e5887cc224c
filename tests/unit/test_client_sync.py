import contextlib
import gc
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fake_daemon import PATIENT, SLOT_BYTES, SPEC, FakeDaemon, answer_within, due
from kvstored_client import Client, HintResult, NamespaceSpec, Outcome, Refused, Unavailable
from kvstored_client import buffers as memory
from kvstored_client.verbs import milliseconds
from kvstored_proto.v1 import kvstored_pb2 as pb

from tests.descriptors import descriptors

HASHES = [bytes([i]) * 32 for i in range(1, 9)]
BLOCKS = [bytes([i]) * 1000 for i in range(1, 9)]


def eventually(condition):
    """One-way messages have no reply to wait for."""
    deadline_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.001)


# ---- reading and writing ----


def test_what_was_put_is_found_and_read_back(client, namespace, daemon):
    result = client.put(namespace, HASHES[:3], BLOCKS[:3])
    assert (result.stored, result.existing, result.refused) == (3, 0, 0)
    assert result.outcomes == [Outcome.HIT] * 3
    found = client.lookup(namespace, HASHES[:5])
    assert (found.prefix_blocks, found.outcome) == (3, Outcome.MISS)
    buffers = [bytearray(1000) for _ in range(5)]
    assert client.get_into(namespace, HASHES[:5], buffers) == 3
    assert [bytes(b) for b in buffers] == [*BLOCKS[:3], bytes(1000), bytes(1000)]
    eventually(lambda: not daemon.leases)


def test_blocks_are_read_in_place_and_only_inside_the_with_block(client, namespace, daemon):
    client.put(namespace, HASHES[:2], BLOCKS[:2])
    with client.get(namespace, HASHES[:3]) as blocks:
        assert len(blocks) == 2
        assert blocks.outcome == Outcome.MISS
        view = blocks[1]
        assert bytes(view) == BLOCKS[1]
        assert view.readonly
        assert [bytes(b) for b in blocks] == BLOCKS[:2]
        assert blocks.valid()
        assert daemon.leases == {blocks.lease_id}
        assert blocks.content_hashes == [h[:16] for h in HASHES[:2]]
    with pytest.raises(ValueError, match="released"):
        bytes(view)
    assert not blocks.valid()
    eventually(lambda: not daemon.leases)


def test_numpy_and_torch_see_the_memory_itself(client, namespace, daemon):
    pytest.importorskip("torch")
    client.put(namespace, HASHES[:1], [np.arange(8, dtype=np.float32)])
    with client.get(namespace, HASHES[:1]) as blocks:
        array = blocks.numpy(0, np.float32, (2, 4))
        tensor = blocks.torch(0, "float32", (2, 4))
        assert not array.flags.writeable
        daemon.memory[0:4] = np.float32(7).tobytes()
        assert (array[0, 0], float(tensor[0, 0])) == (7.0, 7.0)


def test_copy_into_takes_more_buffers_than_blocks(client, namespace):
    client.put(namespace, HASHES[:2], BLOCKS[:2])
    buffers = [bytearray(1000) for _ in range(3)]
    with client.get(namespace, HASHES[:3]) as blocks:
        assert blocks.copy_into(buffers) == 2
        with pytest.raises(ValueError, match="1 buffers for 2 blocks"):
            blocks.copy_into(buffers[:1])
    assert [bytes(b) for b in buffers] == [*BLOCKS[:2], bytes(1000)]


def test_a_contiguous_buffer_of_full_slots_is_filled_in_order(client, namespace):
    data = np.random.default_rng(1).integers(0, 255, 8 * SLOT_BYTES, np.uint8)
    assert client.put(namespace, HASHES, data).stored == 8
    copy = np.zeros_like(data)
    assert client.get_into(namespace, HASHES, copy) == 8
    assert (copy == data).all()


def test_blocks_of_different_sizes_keep_their_sizes(client, namespace, daemon):
    blocks = [b"a" * 10, b"b" * 4096, b"c" * 77]
    assert client.put(namespace, HASHES[:3], blocks).stored == 3
    assert list(daemon.asked_for(pb.OPERATION_RESERVE)[0].sizes_bytes) == [10, 4096, 77]
    with client.get(namespace, HASHES[:3]) as held:
        assert [bytes(b) for b in held] == blocks
    buffers = [bytearray(len(block)) for block in blocks]
    assert client.get_into(namespace, HASHES[:3], buffers) == 3
    assert [bytes(b) for b in buffers] == blocks


def test_several_namespaces_give_one_shard_each(client, namespace):
    client.put(namespace, HASHES[:2], BLOCKS[:2])
    with client.get([namespace, namespace], HASHES[:2]) as blocks:
        assert [len(shard) for shard in blocks.shards] == [2, 2]
        with pytest.raises(IndexError, match="shards"):
            blocks[0]
    targets = [[bytearray(1000), bytearray(1000)] for _ in range(2)]
    assert client.get_into([namespace, namespace], HASHES[:2], targets) == 2
    assert bytes(targets[1][1]) == BLOCKS[1]


def test_more_blocks_than_one_call_carries_go_in_several(client, namespace, daemon):
    hashes = [i.to_bytes(16, "little") for i in range(150)]  # the limit is 64
    assert client.put(namespace, hashes, [b"x"] * 150, parent=b"p" * 16).stored == 150
    parents = [request.parent for request in daemon.asked_for(pb.OPERATION_RESERVE)]
    assert parents == [b"p" * 16, hashes[63], hashes[127]]
    assert client.contains(namespace, [*hashes, b"?" * 16]) == [Outcome.HIT] * 150 + [Outcome.MISS]
    assert client.touch(namespace, hashes) == 150
    assert client.lookup(namespace, hashes).prefix_blocks == 64, "the leading ones: a lower bound"
    assert client.delete(namespace, hashes) == 150


def test_a_lookup_asks_for_an_estimate_where_it_or_its_namespace_has_a_rate(client, namespace, daemon):
    client.put(namespace, HASHES[:4], BLOCKS[:4])
    plain = client.lookup(namespace, HASHES[:4])
    assert (plain.load_s, plain.recompute_s, plain.paying_blocks, plain.pays) == (0.0, 0.0, 4, True)
    rated = client.namespace(SPEC, prefill_tokens_per_s=8.0)
    for found in (
        client.lookup(rated, HASHES[:4]),
        client.lookup(namespace, HASHES[:4], prefill_tokens_per_s=8.0),
    ):
        assert (found.load_s, found.recompute_s, found.paying_blocks, found.pays) == (1.0, 2.0, 2, False)
    assert client.lookup(rated, HASHES[:4], prefill_tokens_per_s=0.0).paying_blocks == 4
    assert [r.prefill_tokens_per_s for r in daemon.asked_for(pb.OPERATION_LOOKUP)] == [0.0, 8.0, 8.0, 0.0]
    assert not client.lookup(namespace, HASHES[6:]).pays, "nothing was found"


def test_a_lookup_prefetches_where_it_or_its_namespace_says_so(client, namespace, daemon):
    client.put(namespace, HASHES[:4], BLOCKS[:4])
    ahead = client.namespace(SPEC, prefetch=True)
    assert client.lookup(ahead, HASHES).queued_blocks == 4
    assert client.lookup(ahead, HASHES, prefetch=False).prefetch_id == 0
    found = client.lookup(namespace, HASHES, prefetch=True, prefetch_deadline_s=0.25)
    asked = [(r.prefetch, r.prefetch_deadline_ms) for r in daemon.asked_for(pb.OPERATION_LOOKUP)]
    assert asked == [(True, 0), (False, 0), (True, 250)]
    assert client.cancel_prefetch(found.prefetch_id).ready_blocks == 3
    assert [r.prefetch_id for r in daemon.asked_for(pb.OPERATION_CANCEL_PREFETCH)] == [found.prefetch_id]
    assert client.cancel_prefetch(0).done, "nothing was started: nobody is asked"
    assert len(daemon.asked_for(pb.OPERATION_CANCEL_PREFETCH)) == 1
    with pytest.raises(ValueError, match="prefetch_deadline_s"):
        client.lookup(namespace, HASHES, prefetch=True, prefetch_deadline_s=-1.0)


def test_a_lookups_prefetch_that_is_done_is_cancelled_without_a_word(client, namespace, daemon):
    daemon.refuse[pb.OPERATION_CANCEL_PREFETCH] = (5, "prefetch 7 is not open")
    client.lookup(namespace, HASHES)
    assert client.cancel_prefetch(7).done
    assert client.stats.refused == 0


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_a_prefill_rate_that_is_none_is_the_callers_error(client, namespace, rate):
    with pytest.raises(ValueError, match="prefill_tokens_per_s"):
        client.lookup(namespace, HASHES, prefill_tokens_per_s=rate)
    with pytest.raises(ValueError, match="prefill_tokens_per_s"):
        client.namespace(SPEC, prefill_tokens_per_s=rate)
    with pytest.raises(ValueError, match="block_tokens"):
        client.namespace(NamespaceSpec(model="m"), prefill_tokens_per_s=1.0)


def test_a_put_larger_than_the_staging_ring_goes_through_it_in_turns(client, namespace, daemon):
    hashes = [i.to_bytes(16, "little") for i in range(48)]
    blocks = [bytes([i]) * SLOT_BYTES for i in range(48)]
    with Client(daemon.address, staging_bytes=8 * SLOT_BYTES, **PATIENT) as small:
        assert small.put(small.namespace(SPEC), hashes, blocks).stored == 48
    with client.get(namespace, hashes) as held:
        assert [bytes(b) for b in held] == blocks


def test_a_client_without_staging_is_refused_its_puts_and_reads_on(client, namespace, daemon):
    client.put(namespace, HASHES[:1], BLOCKS[:1])
    with Client(daemon.address, staging_bytes=0, **PATIENT) as reader:
        assert reader.put(reader.namespace(SPEC), HASHES[:2], BLOCKS[:2]).refused == 1
        assert reader.lookup(reader.namespace(SPEC), HASHES[:1]).prefix_blocks == 1
        eventually(lambda: not daemon.reservations)


# ---- staging ----


def test_staged_blocks_are_readable_after_their_commit(client, namespace):
    client.put(namespace, HASHES[:1], BLOCKS[:1])
    with client.stage(namespace, HASHES[:3], 1000) as staged:
        assert [view is None for view in staged.views] == [True, False, False]
        assert staged.outcomes == [Outcome.HIT, Outcome.RESERVED, Outcome.RESERVED]
        for view, block in zip(staged.views[1:], BLOCKS[1:3], strict=True):
            view[:] = block
        result = staged.commit()
    assert (result.stored, result.existing) == (2, 1)
    with client.get(namespace, HASHES[:3]) as blocks:
        assert [bytes(b) for b in blocks] == BLOCKS[:3]


def test_staged_blocks_without_a_commit_are_undone(client, namespace, daemon):
    with client.stage(namespace, HASHES[:3], 1000) as staged:
        view = staged.views[0]
        assert len(daemon.reservations) == 1
    eventually(lambda: not daemon.reservations)
    with pytest.raises(ValueError, match="released"):
        view[0] = 1
    assert staged.commit().stored == 0, "too late"
    ring = client._core.connection.staging
    assert ring.free_bytes == ring.size_bytes


def test_staging_more_than_the_ring_holds_reserves_the_leading_blocks(client, namespace, daemon):
    with Client(daemon.address, staging_bytes=8 * SLOT_BYTES, **PATIENT) as small:
        with small.stage(small.namespace(SPEC), [*HASHES, b"n" * 32, b"m" * 32], SLOT_BYTES) as staged:
            assert staged.outcomes == [Outcome.RESERVED] * 8 + [Outcome.NO_ROOM] * 2
            assert staged.commit().stored == 8
        eventually(lambda: not daemon.reservations)


# ---- the daemon is absent, late or full ----


def test_a_hint_goes_to_a_daemon_that_knows_hints(client, namespace, daemon):
    client.put(namespace, HASHES, BLOCKS)
    assert client.hint(namespace, HASHES, final=True) == HintResult()
    assert not daemon.asked_for(pb.OPERATION_HINT), "it would be an unknown operation"
    daemon.stop()
    daemon.features.append("hints")
    daemon.start()
    eventually(lambda: client.contains(namespace, HASHES) == [Outcome.HIT] * 8)
    said = client.hint(namespace, HASHES, priority=-2, soft_pin_s=1.5, continues=True)
    assert said == HintResult(8, 8, 7)
    (request,) = daemon.asked_for(pb.OPERATION_HINT)
    assert (request.priority, request.soft_pin_ms, request.continues, request.final) == (-2, 1500, True, False)
    client.hint(namespace, HASHES, unpin=True)
    assert not daemon.asked_for(pb.OPERATION_HINT)[-1].HasField("priority")


def test_what_a_put_says_of_its_blocks_goes_with_its_reservation(client, namespace, daemon):
    client.put(namespace, HASHES[:4], BLOCKS[:4], hint={"priority": -1, "soft_pin_s": 2.5})
    with client.stage(namespace, HASHES[4:], 10, parent=HASHES[3], hint={"final": True}):
        pass
    client.put(namespace, [b"p" * 32], BLOCKS[:1])
    first, second, third = daemon.asked_for(pb.OPERATION_RESERVE)
    assert first.hints == pb.PutHints(priority=-1, soft_pin_ms=2500)
    assert second.hints == pb.PutHints(final=True)
    assert not second.hints.HasField("priority")
    assert not third.HasField("hints")
    with pytest.raises(ValueError, match="'ttl_s': there are priority"):
        client.put(namespace, HASHES, BLOCKS, hint={"ttl_s": 5.0})


@pytest.mark.parametrize("forever", [float("inf"), 1e12])
def test_a_wait_without_end_is_the_longest_that_can_be_asked_for(client, namespace, daemon, forever):
    assert client.put(namespace, HASHES[:1], BLOCKS[:1], wait_s=forever).stored == 1
    with client.get(namespace, HASHES[:1], wait_s=forever) as held:
        assert len(held) == 1
    for operation in (pb.OPERATION_RESERVE, pb.OPERATION_GET):
        assert [request.wait_ms for request in daemon.asked_for(operation)] == [2**32 - 1]


@pytest.mark.parametrize("ttl_s", [-1.0, 0.0001, 3.2e9, float("nan"), float("inf")])
def test_a_ttl_that_makes_no_sense_is_a_value_error(client, namespace, ttl_s):
    with pytest.raises(ValueError, match="ttl_s is"):
        client.put(namespace, HASHES, BLOCKS, ttl_s=ttl_s)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_times_that_are_none_are_errors_of_the_caller(client, namespace, seconds):
    calls = [
        lambda: client.hint(namespace, HASHES, soft_pin_s=seconds),
        lambda: client.put(namespace, HASHES, BLOCKS, hint={"hard_pin_s": seconds}),
        lambda: client.put(namespace, HASHES, BLOCKS, ttl_s=seconds),
        lambda: client.prefetch(namespace, HASHES, deadline_s=seconds),
        lambda: client.lookup(namespace, HASHES, prefetch=True, prefetch_deadline_s=seconds),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="_s is"):
            call()
    with pytest.raises(ValueError, match="'forever'"):
        client.hint(namespace, HASHES, forever=True)


def test_a_deadline_that_is_very_near_is_one():
    assert [milliseconds(seconds) for seconds in (0.0, -1.0, 1e-9, 0.0014, 2.0)] == [0, 0, 1, 1, 2000]
    assert milliseconds(1e30) < 1 << 32


def test_without_a_daemon_everything_is_a_miss_and_nothing_raises(tmp_path):
    client = Client(f"unix:{tmp_path}/nobody")
    namespace = client.namespace(SPEC)
    assert not client.connected
    assert namespace.chain_seed == namespace.digest == b""
    assert len(namespace.chain(range(8))) == 2
    assert client.lookup(namespace, HASHES).outcome == Outcome.MISS
    assert client.contains(namespace, HASHES) == [Outcome.MISS] * 8
    with client.get(namespace, HASHES) as blocks:
        assert len(blocks) == 0
        assert list(blocks) == []
        assert blocks.copy_into([]) == 0
    assert client.get_into(namespace, HASHES, bytearray(80)) == 0
    assert client.put(namespace, HASHES, BLOCKS).refused == 8
    with client.stage(namespace, HASHES, 10) as staged:
        assert staged.views == [None] * 8
        assert staged.commit().refused == 8
    prefetch = client.prefetch(namespace, HASHES)
    assert (prefetch.outcome, prefetch.poll().done) == (Outcome.MISS, True)
    assert (client.touch(namespace, HASHES), client.delete(namespace, HASHES), client.status()) == (0, 0, None)
    assert client.stats.misses_unavailable >= 9
    with pytest.raises(Unavailable):
        client.call(pb.OPERATION_STATUS, pb.StatusRequest(), pb.StatusReply)
    client.close()


def test_while_the_breaker_is_open_nobody_knocks(daemon, client, namespace):
    daemon.stop()
    assert client.lookup(namespace, HASHES).prefix_blocks == 0
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind(daemon.path)
    client._core.breaker._retry_at_s = time.monotonic() + 60.0
    for _ in range(100):
        assert client.lookup(namespace, HASHES).prefix_blocks == 0
    listener.listen(1)
    with pytest.raises(BlockingIOError):
        listener.accept()
    listener.close()
    os.unlink(daemon.path)


def test_a_daemon_that_comes_late_is_found(tmp_path):
    client = Client(f"unix:{tmp_path}/s", **PATIENT)
    namespace = client.namespace(SPEC)
    daemon = FakeDaemon(tmp_path)
    due(client)
    assert client.put(namespace, HASHES[:1], BLOCKS[:1]).stored == 1
    assert len(namespace.chain_seed) == 16
    client.close()
    daemon.close()


def test_after_a_restart_the_next_call_opens_session_and_namespaces_again(client, namespace, daemon):
    client.put(namespace, HASHES[:1], BLOCKS[:1])
    assert client.boot_id == 1
    daemon.stop()
    daemon.start()
    assert client.lookup(namespace, HASHES[:1]).prefix_blocks == 1
    assert client.boot_id == 2
    assert client.stats.reconnects == 1
    assert daemon.counts[pb.OPERATION_OPEN_NAMESPACE] == 2


def test_a_session_that_ends_during_the_copy_delivers_nothing(client, namespace, daemon, monkeypatch):
    client.put(namespace, HASHES[:2], BLOCKS[:2])
    copy = memory.copy_runs

    def copy_and_die(runs):
        copy(runs)
        daemon.hang_up()

    monkeypatch.setattr(memory, "copy_runs", copy_and_die)
    assert client.get_into(namespace, HASHES[:2], bytearray(2000)) == 0
    assert client.stats.deliveries_lost == 1


def test_held_blocks_know_that_their_session_has_ended(client, namespace, daemon):
    client.put(namespace, HASHES[:2], BLOCKS[:2])
    with client.get(namespace, HASHES[:2]) as blocks:
        daemon.hang_up()
        assert not blocks.valid()
        assert blocks.copy_into(bytearray(2000)) == 0


def test_a_daemon_that_does_not_answer_costs_one_timeout_and_then_nothing(daemon):
    client = Client(daemon.address, **PATIENT)
    namespace = client.namespace(SPEC)
    assert client.lookup(namespace, HASHES).outcome == Outcome.MISS
    daemon.silent = {pb.OPERATION_LOOKUP}
    client._core.breaker._clock = lambda: 0.0  # its period never ends
    answer_within(client, 0.05)
    for _ in range(20):
        assert client.lookup(namespace, HASHES).prefix_blocks == 0
    answer_within(client, 60.0)
    assert client.stats.timeouts == 1
    eventually(lambda: daemon.held)
    assert daemon.counts[pb.OPERATION_LOOKUP] == 2
    daemon.silent = set()
    daemon.answer_held()
    eventually(lambda: client.lookup(namespace, HASHES).outcome == Outcome.MISS and client._core.breaker.closed)
    assert client.stats.late_replies == 1
    client.close()


def test_a_session_with_several_timeouts_in_a_row_is_given_up(daemon):
    client = Client(daemon.address, **PATIENT)
    namespace = client.namespace(SPEC)
    client.lookup(namespace, HASHES)
    daemon.silent = {pb.OPERATION_LOOKUP}
    answer_within(client, 0.02)
    for _ in range(3):
        client.lookup(namespace, HASHES)
        due(client)
    answer_within(client, 60.0)
    assert not client.connected
    daemon.silent = set()
    assert client.touch(namespace, HASHES) == 0
    assert client.stats.reconnects == 1
    client.close()


def test_what_a_late_reply_gives_is_given_back(daemon):
    client = Client(daemon.address, **PATIENT)
    namespace = client.namespace(SPEC)
    client.put(namespace, HASHES[:2], BLOCKS[:2])
    daemon.silent = {pb.OPERATION_GET, pb.OPERATION_RESERVE, pb.OPERATION_PREFETCH}
    answer_within(client, 0.05)
    assert len(client.get(namespace, HASHES[:2])) == 0
    client._core.breaker.success()
    assert client.put(namespace, HASHES[2:4], BLOCKS[2:4]).refused == 2
    client._core.breaker.success()
    assert client.prefetch(namespace, HASHES).outcome == Outcome.MISS
    answer_within(client, 60.0)
    eventually(lambda: len(daemon.held) == 3)
    daemon.silent = set()
    daemon.answer_held()
    client._core.breaker.success()
    eventually(lambda: client.status() and daemon.counts[pb.OPERATION_CANCEL_PREFETCH])
    eventually(lambda: not daemon.leases and not daemon.reservations)
    client.close()


def test_staging_of_an_unanswered_commit_is_not_used_again_before_the_answer(daemon):
    client = Client(daemon.address, staging_bytes=8 * SLOT_BYTES, **PATIENT)
    namespace = client.namespace(SPEC)
    daemon.silent = {pb.OPERATION_COMMIT}
    daemon.before_reply = {pb.OPERATION_RESERVE: lambda peer: answer_within(client, 0.05)}
    assert client.put(namespace, HASHES[:1], BLOCKS[:1]).refused == 1
    daemon.before_reply = {}
    answer_within(client, 60.0)
    eventually(lambda: daemon.held)
    ring = client._core.connection.staging
    assert ring.free_bytes == ring.size_bytes - SLOT_BYTES
    daemon.silent = set()
    client._core.breaker.success()
    assert client.put(namespace, HASHES[1:2], BLOCKS[1:2]).stored == 1
    assert ring.free_bytes == ring.size_bytes - SLOT_BYTES
    daemon.answer_held()
    eventually(lambda: client.status() and ring.free_bytes == ring.size_bytes)
    with client.get(namespace, HASHES[:2]) as blocks:
        assert [bytes(b) for b in blocks] == BLOCKS[:2]
    client.close()


def test_a_throttled_put_is_tried_again_while_its_caller_waits(client, namespace, daemon):
    daemon.throttle_reserves = 2
    assert client.put(namespace, HASHES[:2], BLOCKS[:2], wait_s=60.0).stored == 2
    assert client.stats.throttled == 2


def test_a_throttled_put_whose_caller_does_not_wait_is_refused_at_once(client, namespace, daemon):
    daemon.throttle_reserves = 5
    result = client.put(namespace, HASHES[:2], BLOCKS[:2])
    assert (result.refused, result.outcomes) == (2, [Outcome.THROTTLED] * 2)
    assert daemon.counts[pb.OPERATION_RESERVE] == 1


def test_a_refusal_is_a_miss_for_data_and_an_error_for_tools(client, namespace, daemon):
    daemon.refuse = {pb.OPERATION_LOOKUP: (8, "too many"), pb.OPERATION_STATUS: (7, "not allowed")}
    assert client.lookup(namespace, HASHES).outcome == Outcome.MISS
    assert client.stats.refused == 1
    with pytest.raises(Refused, match="not allowed") as refusal:
        client.call(pb.OPERATION_STATUS, pb.StatusRequest(), pb.StatusReply)
    assert refusal.value.code == 7


def test_a_put_whose_daemon_dies_halfway_counts_what_was_stored(client, namespace, daemon):
    hashes = [i.to_bytes(16, "little") for i in range(100)]  # two calls

    def die(peer):
        daemon.before_reply.clear()
        peer.sock.shutdown(socket.SHUT_RDWR)

    client.put(namespace, hashes[:1], [b"x"])
    daemon.before_reply = {pb.OPERATION_COMMIT: die}
    result = client.put(namespace, hashes, [b"x"] * 100)
    assert (result.stored, result.existing) == (0, 1)
    assert result.refused == 99


def test_a_daemon_of_another_protocol_is_not_used(tmp_path, daemon):
    daemon.protocol = 99
    client = Client(daemon.address, **PATIENT)
    assert not client.connected
    client.close()


def test_what_a_newer_daemon_adds_is_ignored(client, namespace, daemon):
    daemon.features = ["telepathy"]
    daemon.hang_up()
    assert client.lookup(namespace, HASHES).outcome == Outcome.MISS
    fd = os.memfd_create("unknown")
    daemon.peers[-1].send(250, 0, pb.StatusReply(), 0, (fd,))
    os.close(fd)
    assert client.put(namespace, HASHES[:1], BLOCKS[:1]).stored == 1
    assert client.stats.connects == 2
    assert not any("unknown" in name for name in open_files())


def open_files():
    """What the descriptors of this process are of; threads of the fake open and close theirs meanwhile."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return names


def test_garbage_from_the_daemon_ends_the_session_not_the_engine(client, namespace, daemon):
    daemon.peers[-1].sock.sendall(b"\xff" * 64)
    assert client.lookup(namespace, HASHES).outcome == Outcome.MISS
    assert client.lookup(namespace, HASHES).outcome == Outcome.MISS
    assert client.connected


def test_more_or_fewer_blocks_than_were_asked_for_are_a_miss(client, namespace, daemon, monkeypatch):
    assert client.put(namespace, HASHES[:3], BLOCKS[:3]).stored == 3
    monkeypatch.setattr(daemon, "run", lambda _: HASHES[:3])
    assert client.get_into(namespace, HASHES[:2], [bytearray(1000) for _ in range(2)]) == 0
    with client.get(namespace, HASHES[:2]) as blocks:
        assert len(blocks) == 0
    eventually(lambda: not daemon.leases)
    monkeypatch.setattr(daemon, "contains", lambda peer, request: pb.ContainsReply(outcomes=b"\1"))
    assert client.contains(namespace, HASHES[:3]) == [Outcome.MISS] * 3


def test_descriptors_that_do_not_match_their_segments_end_the_session_and_are_closed(client, namespace, daemon):
    fds = [os.memfd_create("unmatched") for _ in range(2)]
    daemon.peers[-1].send(pb.OPERATION_SEGMENTS, 0, pb.Segments(segments=[pb.Segment(id=9, size_bytes=1)]), 0, fds)
    for fd in fds:
        os.close(fd)
    assert client.put(namespace, HASHES[:1], BLOCKS[:1]).refused == 1
    assert not any("unmatched" in name for name in open_files())


# ---- the caller's own mistakes ----


@pytest.mark.parametrize("absent", [False, True])
def test_wrong_arguments_raise_with_and_without_a_daemon(client, daemon, absent):
    if absent:
        daemon.stop()
    namespace = client.namespace(SPEC)
    with pytest.raises(ValueError, match="1 buffers for 2 blocks"):
        client.put(namespace, HASHES[:2], BLOCKS[:1])
    with pytest.raises(TypeError, match="read-only"):
        client.get_into(namespace, HASHES[:1], [b"fixed"])
    with pytest.raises(TypeError, match="not a namespace"):
        client.lookup("m", HASHES)
    with pytest.raises(ValueError, match="same size"):
        client.lookup(namespace, [b"a" * 8, b"b" * 9])
    with pytest.raises(ValueError, match="block_bytes"):
        client.stage(namespace, HASHES, 0)


def test_a_buffer_of_another_size_than_its_block_raises_and_releases(client, namespace, daemon):
    client.put(namespace, HASHES[:2], BLOCKS[:2])
    with pytest.raises(ValueError, match="block 1 has 1000 bytes, its buffer 999"):
        client.get_into(namespace, HASHES[:2], [bytearray(1000), bytearray(999)])
    eventually(lambda: not daemon.leases)


def test_no_hashes_ask_nothing(client, namespace, daemon):
    assert client.lookup(namespace, []).outcome == Outcome.HIT
    assert client.get_into(namespace, [], []) == 0
    assert client.put(namespace, [], []).outcomes == []
    assert daemon.counts[pb.OPERATION_LOOKUP] == 0


def test_addresses_of_other_kinds_are_refused():
    with pytest.raises(ValueError, match="unix:PATH"):
        Client("tcp:localhost:1")


# ---- giving back ----


def test_blocks_are_released_when_their_user_raises(client, namespace, daemon):
    client.put(namespace, HASHES[:1], BLOCKS[:1])
    with pytest.raises(KeyError), client.get(namespace, HASHES[:1]):
        raise KeyError
    eventually(lambda: not daemon.leases)


def test_blocks_and_staged_puts_that_nobody_closes_are_given_back_by_the_collector(client, namespace, daemon):
    client.put(namespace, HASHES[:1], BLOCKS[:1])
    blocks, staged = client.get(namespace, HASHES[:1]), client.stage(namespace, HASHES[1:2], 1000)
    assert len(daemon.leases) == len(daemon.reservations) == 1
    del blocks, staged
    gc.collect()
    eventually(lambda: not daemon.leases and not daemon.reservations)


def test_a_lease_that_was_handed_over_is_not_released_here(client, namespace, daemon):
    client.put(namespace, HASHES[:1], BLOCKS[:1])
    with client.get(namespace, HASHES[:1]) as blocks:
        lease_ids = blocks.hand_over()
    client.status()
    assert daemon.leases == set(lease_ids)


def test_a_retired_segment_is_dropped_when_the_last_view_of_it_goes(client, namespace, daemon):
    client.put(namespace, HASHES[:1], BLOCKS[:1])
    with client.get(namespace, HASHES[:1]) as blocks:
        daemon.peers[-1].send(pb.OPERATION_SEGMENTS_RETIRED, 0, pb.SegmentIds(ids=[daemon.segment_id]), 0)
        client.status()
        assert bytes(blocks[0]) == BLOCKS[0]
        assert daemon.counts[pb.OPERATION_SEGMENTS_DROPPED] == 0
    eventually(lambda: daemon.counts[pb.OPERATION_SEGMENTS_DROPPED] == 1)
    assert list(daemon.asked_for(pb.OPERATION_SEGMENTS_DROPPED)[0].ids) == [daemon.segment_id]


def test_closing_ends_the_session_and_is_safe_to_repeat(client, namespace, daemon):
    client.put(namespace, HASHES[:1], BLOCKS[:1])
    client.get_into(namespace, HASHES[:1], bytearray(1000))
    peer = daemon.peers[-1]
    client.close()
    client.close()
    peer.thread.join(60.0)
    assert not peer.thread.is_alive()
    assert not client.connected
    with pytest.raises(RuntimeError, match="closed"):
        client.lookup(namespace, HASHES)


def test_a_closed_client_leaves_no_descriptor_and_no_memory_behind(daemon):
    before = descriptors()
    client = Client(daemon.address, **PATIENT)
    namespace = client.namespace(SPEC)
    client.put(namespace, HASHES[:1], BLOCKS[:1])
    client.get_into(namespace, HASHES[:1], bytearray(1000))
    client.close()
    daemon.hang_up()
    assert descriptors() == before


# ---- threads and forks ----


def test_threads_share_one_session_and_each_gets_its_own_answer(client, namespace, daemon):
    client.put(namespace, HASHES, BLOCKS)

    def work(index):
        for _ in range(40):
            buffer = bytearray(1000)
            assert client.get_into(namespace, [HASHES[index]], [buffer]) == 1
            assert bytes(buffer) == BLOCKS[index]
            assert client.lookup(namespace, HASHES[: index + 1]).prefix_blocks == index + 1

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert client.stats.connects == 1
    eventually(lambda: not daemon.leases)


def test_a_quick_call_is_answered_while_another_thread_waits_for_a_slow_one(client, namespace, daemon):
    client.lookup(namespace, HASHES)
    daemon.silent = {pb.OPERATION_TOUCH}
    results = []
    slow = threading.Thread(target=lambda: results.append(client.touch(namespace, HASHES)))
    slow.start()
    eventually(lambda: daemon.held)
    assert client.put(namespace, HASHES[:1], BLOCKS[:1]).stored == 1
    assert client.lookup(namespace, HASHES).prefix_blocks == 1
    daemon.answer_held()
    slow.join(60.0)
    assert results == [1]
    assert client.stats.timeouts == 0


def test_the_lead_passes_on_when_the_leader_has_its_answer(client, namespace, daemon):
    client.lookup(namespace, HASHES)
    daemon.silent = {pb.OPERATION_TOUCH, pb.OPERATION_DELETE}
    results = []
    leader = threading.Thread(target=lambda: results.append(client.touch(namespace, HASHES)))
    leader.start()
    eventually(lambda: len(daemon.held) == 1)
    follower = threading.Thread(target=lambda: results.append(client.delete(namespace, HASHES)))
    follower.start()
    eventually(lambda: len(daemon.held) == 2 and client._core.connection._followers)
    first, second = daemon.held
    daemon.held = [second]
    daemon.answer(*first)
    leader.join(60.0)
    daemon.answer_held()
    follower.join(60.0)
    assert results == [0, 0]
    assert client.stats.timeouts == 0


def _in_child(action):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = action()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_is_told_and_cannot_disturb_its_parent(client, namespace, daemon):
    client.put(namespace, HASHES[:1], BLOCKS[:1])
    blocks = client.get(namespace, HASHES[:1])

    def child():
        try:
            client.lookup(namespace, HASHES)
            return 2
        except RuntimeError as error:
            if "fork" not in str(error):
                return 3
        blocks.release()
        client.close()
        return 0

    assert _in_child(child) == 0
    assert blocks.valid()
    assert client.lookup(namespace, HASHES[:1]).prefix_blocks == 1
    assert len(daemon.leases) == 1
    assert client.stats.connects == 1
    blocks.release()


def test_a_forked_child_does_not_keep_the_session_alive(client, namespace, daemon):
    client.lookup(namespace, HASHES)
    peer = daemon.peers[-1]
    read_end, write_end = os.pipe()

    pid = os.fork()
    if pid == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    os.close(read_end)
    client._core.connection._sock.close()  # as the parent's death would
    peer.thread.join(60.0)
    ended = not peer.thread.is_alive()
    os.close(write_end)
    os.waitpid(pid, 0)
    assert ended


class TakenAway(dict):
    """Pending requests, one of which a thread takes away while another goes through them."""

    def __iter__(self):
        numbers = list(super().__iter__())
        self.pop(numbers[0])
        return iter(numbers)


def test_a_connection_that_fails_while_a_request_is_withdrawn_ends_the_others(client, namespace):
    client.lookup(namespace, HASHES)
    connection = client._core.connection
    connection._pending = TakenAway()
    tickets = [connection.start(pb.OPERATION_STATUS, pb.StatusRequest()) for _ in range(2)]
    connection.fail(Unavailable("for this test"))
    assert tickets[1].done
    with pytest.raises(Unavailable):
        tickets[1].result()


def test_a_daemon_that_does_not_know_durable_puts_gets_none(client, namespace, daemon):
    result = client.put(namespace, HASHES[:2], BLOCKS[:2], durability="nvme")
    assert (result.stored, result.refused, result.durable) == (0, 2, 0), "it would take them for plain ones"
    assert client.put(client.namespace(SPEC, durability="nvme"), HASHES[:2], BLOCKS[:2]).refused == 2
    assert client.put(namespace, HASHES[:2], BLOCKS[:2]).stored == 2
