"""Wear: the allowance, the account over days and kills, and what a tier counts."""

import asyncio
import shutil
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstored.device.accounting import thread_written_bytes
from kvstored.device.file import FileDevice
from kvstored.rpc import status
from kvstored.testing.contract_lower_tier import Blocks
from kvstored.testing.daemon_in_loop import serving
from kvstored.tiers.allowance import DAY_S, Allowance
from kvstored.tiers.nvme import NvmeConfig, NvmeTier
from kvstored.tiers.wear import DAYS_KEPT, PROMISE_BYTES_MAX, Kept, WearMeter, unpack
from tests.unit.test_nvme import QUIET

DAY = int(DAY_S)
MIB = 1 << 20
EXTENT_BYTES = 128 << 10
NOON = datetime(2026, 3, 30, 12, tzinfo=UTC).timestamp()


class Clock:
    """Both clocks at will."""

    def __init__(self, wall_s=NOON):
        self.wall_s = wall_s
        self.monotonic_s = 100.0

    def wall(self):
        return self.wall_s

    def monotonic(self):
        return self.monotonic_s

    def pass_(self, seconds):
        self.wall_s += seconds
        self.monotonic_s += seconds


# --- the allowance ---


def test_a_day_refills_a_day_and_no_more_than_a_day_is_kept():
    allowance = Allowance(DAY * 10, 0.0)
    assert allowance.left_bytes(0.0) == DAY * 10
    allowance.spend(DAY * 10, 0.0)
    assert allowance.left_bytes(0.0) == 0
    assert allowance.left_bytes(DAY / 2) == DAY * 5
    assert allowance.left_bytes(DAY * 9) == DAY * 10


def test_what_is_overdrawn_has_to_refill_first_but_no_debt_is_over_a_day():
    allowance = Allowance(1000, 0.0)
    allowance.spend(1500, 0.0)
    assert allowance.left_bytes(0.0) == -500
    assert allowance.left_bytes(DAY) == 500
    allowance.spend(10**9, float(DAY))
    assert allowance.left_bytes(DAY) == -1000


@given(st.lists(st.tuples(st.floats(-1e5, 2e5), st.integers(0, 3000)), max_size=40))
def test_over_any_time_no_more_is_spent_than_a_day_and_what_the_time_refills(steps):
    allowance, now, first, spent = Allowance(1000, 0.0), 0.0, 0.0, 0
    for elapsed, wanted in steps:
        now = now + elapsed
        first = max(first, now)
        granted = min(wanted, max(0, allowance.left_bytes(now)))
        allowance.spend(granted, now)
        spent += granted
        assert spent <= 1000 + first * 1000 / DAY + 1
        assert -1000 <= allowance.left_bytes(now) <= 1000


# --- the meter ---


def kill(meter):
    """What the file says after a promise was saved, and nothing after it."""
    data, up_to = meter.pack(0)
    meter.saved(up_to)
    return data


def reopened(data, clock, **settings):
    return WearMeter(clock, unpack(data, "wear"), **settings)


def test_days_months_and_the_total_are_told_apart():
    clock = Clock()
    meter = WearMeter(clock, endurance_bytes=10**6)
    meter.wrote(100)
    clock.pass_(DAY)  # the 31st
    meter.wrote(20)
    report = meter.report(0, "p")
    assert (report.today_bytes, report.month_bytes, report.total_bytes) == (20, 120, 120)
    clock.pass_(DAY)  # the 1st of April
    meter.wrote(3)
    report = meter.report(0, "p")
    assert (report.today_bytes, report.month_bytes, report.total_bytes) == (3, 3, 123)
    assert (report.recent_bytes, report.recent_s) == (123, 2 * DAY)
    clock.pass_(29 * DAY)  # the 30th: the 1st is the oldest of 30 days
    assert meter.report(0, "p").recent_bytes == 3
    assert meter.report(0, "p").recent_s == 30 * DAY


def test_an_orderly_close_is_exact_and_a_kill_is_never_too_low():
    clock = Clock()
    meter = WearMeter(clock)
    assert meter.overdue(1)
    data = kill(meter)
    assert not meter.overdue(PROMISE_BYTES_MAX)
    assert meter.overdue(PROMISE_BYTES_MAX + 1)
    meter.wrote(5000)
    after = reopened(data, clock).report(0, "p").total_bytes
    assert 5000 <= after <= 5000 + PROMISE_BYTES_MAX
    exact, _ = meter.pack()
    assert reopened(exact, clock).report(0, "p").total_bytes == 5000


@given(st.lists(st.tuples(st.integers(1, 200 * MIB), st.booleans()), max_size=30))
def test_however_often_it_is_killed_it_counts_all_and_one_promise_a_kill_at_most(writes):
    clock, data, true_bytes, kills = Clock(), None, 0, 0
    meter = WearMeter(clock)
    for size, killed in writes:
        if meter.overdue(size):
            data, up_to = meter.pack(size)
            meter.saved(up_to)
        meter.wrote(size)
        true_bytes += size
        if killed:
            meter, kills = reopened(data, clock), kills + 1
        counted = meter.report(0, "p").total_bytes
        assert true_bytes <= counted <= true_bytes + kills * (PROMISE_BYTES_MAX + 200 * MIB)


def test_a_budget_outlasts_a_restart_and_refills_while_nobody_runs():
    clock = Clock()
    meter = WearMeter(clock, budget_bytes=DAY * 100)
    assert meter.left() == (DAY * 100, DAY * 100)
    meter.wrote(DAY * 100)
    data, _ = meter.pack()
    assert reopened(data, clock, budget_bytes=DAY * 100).left() == (0, DAY * 100)
    clock.pass_(DAY / 4)
    assert reopened(data, clock, budget_bytes=DAY * 100).left()[0] == DAY * 25
    assert reopened(data, clock, budget_bytes=0).left() is None


def test_a_clock_that_is_set_back_refills_nothing():
    clock = Clock()
    meter = WearMeter(clock, budget_bytes=DAY * 100)
    meter.wrote(DAY * 100)
    clock.wall_s -= 40 * DAY
    assert meter.left()[0] == 0
    clock.wall_s += 80 * DAY  # nor forward, while it runs
    assert meter.left()[0] == 0
    data, _ = meter.pack()
    clock.wall_s -= 40 * DAY
    again = reopened(data, clock, budget_bytes=DAY * 100)
    assert again.left()[0] == 0
    again.wrote(7)
    assert again.report(0, "p").total_bytes == DAY * 100 + 7


def test_only_so_many_days_are_kept():
    clock = Clock()
    meter = WearMeter(clock)
    for _ in range(DAYS_KEPT + 20):
        meter.wrote(1)
        clock.pass_(DAY)
    data, _ = meter.pack()
    assert len(unpack(data, "wear").days) == DAYS_KEPT
    assert unpack(data, "wear").total_bytes == DAYS_KEPT + 20


@pytest.mark.parametrize("data", [b"x", b"{}\n00000000\n", b'{"total_bytes": "x"}\n', b"\n\n\n"])
def test_a_damaged_file_is_not_believed(data):
    assert unpack(data, "wear") is None


@given(st.integers(0, 200), st.integers(1, 255))
def test_a_flipped_byte_is_found(place, flip):
    data = bytearray(WearMeter(Clock(), Kept(total_bytes=123_456_789)).pack()[0])
    data[place % len(data)] ^= flip
    found = unpack(bytes(data), "wear")
    assert found is None or found.total_bytes == 123_456_789  # a closing newline, or the case of a digit


# --- the tier ---


async def tier_at(path, clock, **settings):
    config = NvmeConfig(
        paths=[path],
        capacity_bytes=4 * EXTENT_BYTES,
        extent_bytes=EXTENT_BYTES,
        share_blocks=1,
        **QUIET,
        **settings,
    )
    tier = NvmeTier(config, FileDevice(), clock)
    await tier.open()
    return tier


async def fill(tier, blocks, names):
    blocks.reset()
    return await tier.store("t", [blocks.store(name, 16384) for name in names])


async def test_blocks_footers_and_the_index_are_counted_and_outlast_restarts(tmp_path):
    blocks, clock = Blocks(), Clock()
    tier = await tier_at(tmp_path / "d", clock, endurance_bytes=[10**9])
    assert tier.write_budget() is None
    for i in range(20):  # extents are recycled
        assert await fill(tier, blocks, [f"{i}-{j}" for j in range(4)]) == [True] * 4
    counters = tier.counters()
    assert counters["wear_blocks_bytes"] == 80 * 16384 == counters["written_bytes"]
    assert counters["wear_footers_bytes"] >= counters["sealed_extents"] * 8192 > 0
    assert counters["wear_index_bytes"] > 20 * 4096  # a page a commit, at least
    (report,) = tier.wear()
    parts = [count for name, count in counters.items() if name.startswith("wear_")]
    assert report.total_bytes == report.today_bytes == sum(parts)
    assert report.endurance_bytes == 10**9
    shutil.copytree(tmp_path / "d", tmp_path / "killed")
    await tier.close()
    exact = (await closed_total(tmp_path / "d", clock))[0]
    assert report.total_bytes <= exact <= report.total_bytes + MIB
    killed = (await closed_total(tmp_path / "killed", clock))[0]
    assert report.total_bytes <= killed <= report.total_bytes + PROMISE_BYTES_MAX + MIB
    blocks.close()


async def closed_total(path, clock):
    tier = await tier_at(path, clock)
    (report,) = tier.wear()
    await tier.close()
    return report.total_bytes, report


async def test_what_is_left_of_the_budget_goes_with_what_is_written(tmp_path):
    blocks, clock = Blocks(), Clock()
    tier = await tier_at(tmp_path / "d", clock, write_budget_bytes_per_day=64 * MIB)
    assert tier.write_budget() == (64 * MIB, 64 * MIB)
    await fill(tier, blocks, ["a", "b"])
    await fill(tier, blocks, ["c"])
    left, day = tier.write_budget()
    assert day == 64 * MIB
    assert left == day - tier.wear()[0].total_bytes
    clock.pass_(DAY)
    assert tier.write_budget() == (day, day)
    await tier.close()
    blocks.close()


async def test_a_file_that_cannot_be_written_stops_no_store(tmp_path):
    blocks, clock = Blocks(), Clock()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "wear.new").mkdir()  # in the way of its replacement
    tier = await tier_at(tmp_path / "d", clock)
    assert await fill(tier, blocks, ["a"]) == [True]
    await tier.close()
    blocks.close()


async def test_what_a_thread_writes_is_counted_by_the_kernel(tmp_path):
    def write():
        before = thread_written_bytes()
        (tmp_path / "f").write_bytes(bytes(5000))
        return thread_written_bytes() - before

    assert await asyncio.to_thread(write) in (0, 5000)


async def test_a_drive_that_was_written_more_than_it_takes_is_a_warning_for_admins(tmp_path, monkeypatch):
    async with serving(tmp_path, nvme=True) as daemon:
        assert not [text for text in status.report(daemon.context).warnings if "endurance" in text]
        tier = daemon.context.store.parts.below.tier
        worn = [
            msgspec.structs.replace(path, total_bytes=3 * 10**12, endurance_bytes=2 * 10**12) for path in tier.wear()
        ]
        monkeypatch.setattr(tier, "wear", lambda: worn)
        assert f"nvme: {worn[0].path} was written 150% of its endurance_tbw" in status.report(daemon.context).warnings
