"""Load or recompute: what transfers are learnt to take, and which prefix pays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstored.policy.cost import SharedTime, TransferTime, estimate

MIB = 1 << 20


def test_before_anything_is_measured_it_is_what_is_assumed():
    time = TransferTime(2e9, 0.001)
    assert (time.samples, time.bytes_per_s, time.latency_s) == (0, pytest.approx(2e9), 0.001)
    assert time.seconds(2_000_000) == pytest.approx(0.002)


def test_latency_and_bandwidth_come_from_transfers_of_different_sizes():
    time = TransferTime(1.0)
    for size in (1 * MIB, 7 * MIB, 30 * MIB, 2 * MIB):
        time.note(size, 0.003 + size / 5e9)
    assert time.latency_s == pytest.approx(0.003)
    assert time.bytes_per_s == pytest.approx(5e9)


def test_transfers_of_one_size_are_foretold_though_nothing_is_known_of_their_latency():
    time = TransferTime(1.0)
    for _ in range(5):
        time.note(MIB, 0.002)
    assert time.latency_s == 0
    assert time.seconds(MIB) == pytest.approx(0.002)


def test_noise_makes_neither_latency_nor_bandwidth_negative():
    time = TransferTime(1.0)
    time.note(MIB, 0.009)
    time.note(9 * MIB, 0.002)
    assert time.latency_s == 0
    assert time.bytes_per_s == pytest.approx(10 * MIB / 0.011, rel=0.1)


def test_a_device_that_has_become_slow_is_believed_after_a_while():
    time = TransferTime(1.0)
    for _ in range(100):
        time.note(MIB, MIB / 4e9)
    for _ in range(100):
        time.note(MIB, MIB / 1e9)
    assert time.bytes_per_s == pytest.approx(1e9, rel=0.05)


@pytest.mark.parametrize(("size", "seconds"), [(0, 1.0), (-1, 1.0), (MIB, 0.0), (MIB, -1.0)])
def test_a_transfer_without_bytes_or_time_says_nothing(size, seconds):
    time = TransferTime(3e9)
    time.note(size, seconds)
    assert (time.samples, time.bytes_per_s) == (0, pytest.approx(3e9))


def test_reads_at_the_same_time_share_the_device():
    reads = SharedTime(1e9, 0.001)
    for number in range(4):
        reads.began(number * 0.001)
    for number in range(4):
        reads.ended(MIB, 0.004 + number * 0.001)
    assert reads.samples == 1
    assert reads.seconds(4 * MIB) == pytest.approx(0.007), "the whole of it, not the sum of what each waited"


def test_time_without_reads_is_not_counted():
    reads = SharedTime(1e9, 0.001)
    for start in (10.0, 500.0):
        reads.began(start)
        reads.ended(MIB, start + 0.001)
    assert reads.bytes_per_s == pytest.approx(MIB / 0.001)


def test_a_failed_read_tells_nothing_of_the_time_in_which_it_failed():
    reads = SharedTime(1e9, 0.001)
    reads.began(0.0)
    reads.began(0.0)
    reads.ended(MIB, 9.0, failed=True)
    reads.ended(MIB, 9.5)
    assert reads.samples == 0
    reads.began(20.0)
    reads.ended(MIB, 20.001)
    assert reads.samples == 1


def test_a_device_that_is_never_idle_is_measured_too():
    reads, now = SharedTime(1e9, 0.001), 0.0
    reads.began(now)
    for _ in range(1024):
        reads.began(now)
        now += MIB / 2e9
        reads.ended(MIB, now)
    assert reads.samples == 4
    assert reads.bytes_per_s == pytest.approx(2e9)


# ---- estimate ----

COPIES, READS = TransferTime(10e9), TransferTime(1e9, 0.01)


def test_what_is_in_dram_costs_a_copy():
    found = estimate([MIB] * 8, [0] * 8, 5 * MIB, COPIES, READS, 0.001)
    assert found.load_s == pytest.approx(8 * MIB / 10e9), "the queue of NVMe is nobody's business then"
    assert (found.recompute_s, found.paying_blocks) == (0.008, 8)


def test_what_is_on_nvme_waits_for_the_device_its_queue_and_its_latency():
    found = estimate([MIB] * 4, [0, 0, MIB, MIB], 5 * MIB, COPIES, READS, 1.0)
    assert found.load_s == pytest.approx(4 * MIB / 10e9 + 0.01 + 7 * MIB / 1e9)


def test_a_long_prefix_pays_where_a_short_one_does_not():
    """10 ms of latency and 1 ms a block, against 2 ms to compute one."""
    sizes = [10**6] * 30
    assert estimate(sizes[:9], sizes[:9], 0, COPIES, READS, 0.002).paying_blocks == 0
    assert estimate(sizes, sizes, 0, COPIES, READS, 0.002).paying_blocks == 30


def test_the_longest_prefix_that_pays_ends_where_the_slow_blocks_begin():
    sizes = [10**6] * 20
    below = [0] * 12 + [10**6] * 8
    found = estimate(sizes, below, 0, COPIES, READS, 0.0005)
    assert found.paying_blocks == 12
    assert found.load_s > found.recompute_s


def test_nothing_found_costs_nothing_and_pays_nothing():
    assert estimate([], [], 0, COPIES, READS, 1.0).paying_blocks == 0


@given(
    blocks=st.lists(st.tuples(st.integers(1, MIB), st.booleans()), min_size=1, max_size=40),
    ahead=st.integers(0, 100 * MIB),
    block_s=st.floats(1e-6, 1.0),
)
def test_loading_more_never_takes_less_and_what_pays_is_a_prefix_that_does(blocks, ahead, block_s):
    sizes = [size for size, _ in blocks]
    below = [size if deep else 0 for size, deep in blocks]
    found = [estimate(sizes[:n], below[:n], ahead, COPIES, READS, block_s) for n in range(1, len(sizes) + 1)]
    loads = [each.load_s for each in found]
    assert loads == sorted(loads)
    paying = found[-1].paying_blocks
    assert not paying or found[paying - 1].load_s <= found[paying - 1].recompute_s
    assert all(each.load_s > each.recompute_s for each in found[paying:])
