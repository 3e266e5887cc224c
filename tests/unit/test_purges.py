"""Purges: what is selected goes from everywhere, who holds it has until the deadline, and there is a receipt."""

import asyncio
import ctypes
import threading
from pathlib import Path

import pytest

from kvstored.catalog.history import Reason
from kvstored.daemon.purge_file import DAMAGED_NAME, FILE_NAME, resume
from kvstored.device import memory
from kvstored.device.state_directory import StateDirectory
from kvstored.errors import DeviceError, KVStoredError, LimitExceeded
from kvstored.purge import purge as purge_module
from kvstored.purge.holders import DEVICE_WAIT_S, STAGING_LEFT, Holders
from kvstored.purge.purges import Purges
from kvstored.purge.receipts import COMPLETE, INCOMPLETE, RECEIPTS_MAX, Receipt, Receipts, Selection
from kvstored.store.departures import Departures
from kvstored.store.outcomes import HIT, MISS, RESERVED, THROTTLED
from kvstored.testing.keeping import MemoryKeeper
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import BLOCK_BYTES, Node, chain, payload
from kvstored.testing.waiting import PATIENCE_S, turns, until


async def purge(node, selection, deadline_s=0.5, purges=None, beyond_s=1.0):
    """Start it and wait for its end, while time passes until so long after the deadline, and not for threads."""
    purges = purges or Purges(node.store)
    last_s = node.clock.now + deadline_s + beyond_s
    receipt = await purges.start(selection, "root", deadline_s)
    while receipt.unfinished and receipt.state != INCOMPLETE:
        node.clock.now = min(node.clock.now + 0.02, last_s)
        await asyncio.sleep(0.001)
    await purges.ended(receipt.purge_id)
    return receipt


async def keys_taken(*spaces):
    """Wait until a purge is at work and has to wait for others."""
    await until(lambda: not any(space.entries for space in spaces))
    await turns()


def in_memory(node, hashes):
    """Which of the blocks have bytes in any segment or staging ring."""
    segments = [bytes(memory.view(s.address, s.size_bytes)) for s in node.parts.dram._segments.values()]
    rings = [s.staging for s in node.parts.sessions if s.staging is not None]
    segments += [ctypes.string_at(ring.address_of(0, 1), ring.size_bytes) for ring in rings]
    return {hash_ for hash_ in hashes if any(payload(hash_) in data for data in segments)}


async def two_tenants(node):
    """Blocks of two tenants: sessions, spaces, hashes."""
    alice, bob = await node.session("alice"), await node.session("bob")
    spaces = await node.space(alice), await node.space(bob)
    hashes = chain("alice", 3), chain("bob", 3)
    for session, space, own in zip((alice, bob), spaces, hashes, strict=True):
        assert await node.put(session, space, own) == bytes([RESERVED] * 3)
    return (alice, bob), spaces, hashes


# ---- what goes ----


async def test_a_tenant_is_purged_and_nobody_else():
    async with Node(16, segment_blocks=4) as node:
        (alice, bob), (space, other), (hashes, others) = await two_tenants(node)
        assert in_memory(node, hashes + others) == {*hashes, *others}
        receipt = await purge(node, Selection(tenant="alice"))
        assert (receipt.state, receipt.remains) == (COMPLETE, [])
        assert (receipt.dram_blocks, receipt.dram_bytes) == (3, 3 * BLOCK_BYTES)
        assert receipt.staging_zeroed_bytes == alice.staging_bytes
        assert in_memory(node, hashes) == set()
        assert (await node.get(alice, space, hashes)).next == MISS
        assert (await node.get(bob, other, others)).blocks == 3
        assert node.parts.history.why(space, hashes[0]).reason is Reason.PURGED


async def test_what_was_deleted_or_evicted_before_is_wiped_too():
    async with Node(16, segment_blocks=4) as node:
        (alice, _), (space, _), (hashes, _) = await two_tenants(node)
        await node.store.writes.delete(alice, space, hashes)
        assert in_memory(node, hashes) == set(hashes)
        receipt = await purge(node, Selection(tenant="alice"))
        assert receipt.state == COMPLETE
        assert receipt.dram_blocks == 0
        assert receipt.dram_zeroed_bytes >= 3 * BLOCK_BYTES
        assert in_memory(node, hashes) == set()


@pytest.mark.parametrize(
    ("fields", "gone"),
    [
        ({"model": "m"}, {"v1", "v2"}),
        ({"model": "m", "model_version": "2"}, {"v2"}),
        ({"model": "other"}, {"x"}),
        ({"tenant": "alice", "model": "m", "model_version": "1"}, {"v1"}),
        ({"tenant": "bob"}, set()),
        ({"model": "none"}, set()),
    ],
)
async def test_what_fits_all_that_is_named_goes(fields, gone):
    async with Node(16, segment_blocks=4) as node:
        session = await node.session()
        spaces = {
            "v1": await node.space(session, "m", model_version="1"),
            "v2": await node.space(session, "m", model_version="2"),
            "x": await node.space(session, "other"),
        }
        for name, space in spaces.items():
            await node.put(session, space, chain(name, 2))
        assert (await purge(node, Selection(**fields))).state == COMPLETE
        left = {name for name, space in spaces.items() if (await node.get(session, space, chain(name, 2))).blocks}
        assert left == set(spaces) - gone
        staged = await node.session("carol")  # nothing of it is in anybody's ring either
        assert in_memory(node, [h for name in gone for h in chain(name, 2)]) == set()
        assert staged.staging is not None


async def test_a_namespace_goes_by_its_digest():
    async with Node(16, segment_blocks=4) as node:
        session = await node.session()
        one, two = await node.space(session, "one"), await node.space(session, "two")
        for space in (one, two):
            await node.put(session, space, chain("a", 2))
        receipt = await purge(node, Selection(digest=one.digest))
        assert (receipt.state, receipt.dram_blocks) == (COMPLETE, 2)
        assert (len(one.entries), len(two.entries)) == (0, 2)


async def test_what_was_stored_longer_ago_goes_by_its_age():
    keeper, lower = MemoryKeeper(), MemoryTier()
    async with Node(16, segment_blocks=4, keeper=keeper, below=lower) as node:
        alice = await node.session()
        space = await node.space(alice)
        await node.put(alice, space, chain("old", 2))
        node.clock.now += 100.0
        await node.put(alice, space, chain("new", 2))
        node.clock.now += 50.0
        counted = await Purges(node.store).dry_run(Selection(older_than_s=120.0), "root")
        assert (counted.dram_blocks, counted.nvme_blocks) == (2, 0)
        receipt = await purge(node, Selection(older_than_s=120.0))
        assert (receipt.state, receipt.dram_blocks) == (COMPLETE, 2)
        assert (await node.get(alice, space, chain("new", 2))).blocks == 2
        assert in_memory(node, chain("old", 2) + chain("new", 2)) == set(chain("new", 2))
    async with Node(16, segment_blocks=4, keeper=keeper.snapshot()) as node:
        await node.parts.revival.run()
        (space,) = node.parts.catalog.spaces.values()
        assert (await purge(node, Selection(older_than_s=30.0))).dram_blocks == 0  # it began less than that ago
        node.clock.now += 31.0
        assert (await purge(node, Selection(older_than_s=30.0))).dram_blocks == 2
        assert not space.entries


async def test_what_is_below_goes_and_what_comes_up_meanwhile():
    lower = MemoryTier()
    async with Node(16, segment_blocks=4, below=lower) as node:
        (alice, bob), (space, other), (hashes, others) = await two_tenants(node)
        await node.parts.below.mover.flush(1.0)
        node.parts.room.evict(list(space.entries.values()), Reason.EVICTED, "a test")
        assert len(lower.blocks) == 6
        lower.gate.clear()
        getting = asyncio.ensure_future(node.store.reads.get(alice, [space], hashes, 60.0))
        while not node.parts.below.promoter.inflight_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0)
        purging = asyncio.ensure_future(purge(node, Selection(tenant="alice"), 100.0))
        await keys_taken(space)
        lower.gate.set()
        receipt = await purging
        assert (receipt.state, receipt.nvme_blocks) == (COMPLETE, 3)
        assert (await getting).blocks == 0
        assert {key[0] for key in lower.blocks} == {other.digest}
        assert in_memory(node, hashes) == set()
        assert (await node.get(bob, other, others)).blocks == 3


@pytest.mark.parametrize("taken_back", [False, True])
@pytest.mark.parametrize("selection", [Selection(tenant="alice"), Selection(model="m")])
async def test_what_is_below_of_past_epochs_goes_whatever_of_its_room_was_taken_back(selection, taken_back):
    lower = MemoryTier()
    async with Node(16, segment_blocks=4, below=lower) as node:
        session = await node.session("alice")
        space = await node.space(session)
        await node.put(session, space, chain("a", 3))
        await node.parts.below.mover.flush(1.0)
        node.parts.room.evict(list(space.entries.values()), Reason.EVICTED, "a test")
        await node.store.bumps.bump("alice", "m")
        node.parts.catalog.retired.clear()  # as after a restart, and while the room below is taken back
        if taken_back:
            left = dict(lower.blocks)
            await node.store.bumps.take_back()
            lower.blocks.update(left)  # it came there late, or with an index that was made anew
        counted = await Purges(node.store).dry_run(selection, "root")
        receipt = await purge(node, selection)
        assert (receipt.state, receipt.nvme_blocks, counted.nvme_blocks) == (COMPLETE, 3, 3)
        assert not lower.blocks


async def test_what_is_below_goes_though_its_epoch_was_lost():
    lower = MemoryTier()
    async with Node(16, segment_blocks=4, below=lower) as node:
        session = await node.session("alice")
        space = await node.space(session)
        await node.put(session, space, chain("a", 3))
        await node.parts.below.mover.flush(1.0)
        node.parts.room.evict(list(space.entries.values()), Reason.EVICTED, "a test")
        node.parts.epochs.found(node.parts.epochs.after_loss(1.0))
        node.parts.catalog.retired.clear()
        receipt = await purge(node, Selection(model="m"))
        assert (receipt.state, receipt.nvme_blocks, len(lower.blocks)) == (COMPLETE, 3, 0)


async def test_what_is_on_its_way_down_does_not_come_back():
    lower = MemoryTier()
    async with Node(16, segment_blocks=4, below=lower) as node:
        (_, _), (space, _), (hashes, _) = await two_tenants(node)
        lower.gate.clear()
        flushing = asyncio.ensure_future(node.parts.below.mover.flush(10.0))
        while not node.parts.below.mover.moving_blocks:  # noqa: ASYNC110
            await asyncio.sleep(0)
        purging = asyncio.ensure_future(purge(node, Selection(tenant="alice"), 100.0))
        await keys_taken(space)
        lower.gate.set()
        assert (await purging).state == COMPLETE
        await flushing
        assert not [key for key in lower.blocks if key[0] == space.digest]
        assert in_memory(node, hashes) == set()


@pytest.mark.parametrize("end", ["commit", "abort", "neither"])
async def test_a_slot_with_old_bytes_that_was_given_to_a_new_block_is_waited_for(monkeypatch, end):
    async with Node(4, segment_blocks=4) as node:
        session = await node.session("alice")
        space = await node.space(session)
        old, new = chain("old", 4), chain("new", 4)
        await node.put(session, space, old)
        await node.store.writes.delete(session, space, old)
        reserved = []

        wipe_free = node.parts.dram.wipe_free

        async def meanwhile(*args):
            reserved.append(await node.reserve(session, space, new))
            return await wipe_free(*args)

        monkeypatch.setattr(node.parts.dram, "wipe_free", meanwhile)
        purging = asyncio.ensure_future(purge(node, Selection(tenant="alice"), 0.5 if end == "neither" else 1000.0))
        while not reserved:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert in_memory(node, old) == set(old)
        if end == "commit":
            await node.commit(session, reserved[0], new)
        elif end == "abort":
            node.store.writes.abort(session, reserved[0].reservation_id, [])
        assert (await purging).state == COMPLETE
        assert in_memory(node, old) == set()
        assert session.ended == (end == "neither")
        assert not any(entry.holds for entry in space.entries.values())


async def test_nothing_is_wiped_below_before_what_was_on_its_way_there_is_deleted(monkeypatch):
    lower = MemoryTier()
    async with Node(16, segment_blocks=4, below=lower) as node:
        _, (space, _), _ = await two_tenants(node)
        delete, asked, may = lower.delete, asyncio.Event(), asyncio.Event()

        async def slow(tenant, digest, hashes):
            if hashes:
                asked.set()
                await may.wait()
            return await delete(tenant, digest, hashes)

        monkeypatch.setattr(lower, "delete", slow)
        lower.gate.clear()
        flushing = asyncio.ensure_future(node.parts.below.mover.flush(10.0))
        while not lower.calls["store"]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        purging = asyncio.ensure_future(purge(node, Selection(tenant="alice"), 100.0))
        await keys_taken(space)
        lower.gate.set()
        await asked.wait()
        await asyncio.sleep(0.1)
        assert not lower.calls["wipe"], "its bytes are alive below until then, and no wipe would touch them"
        may.set()
        assert (await purging).state == COMPLETE
        await flushing


async def test_a_put_under_way_answers_a_miss_and_leaves_nothing():
    async with Node(16, segment_blocks=4) as node:
        alice = await node.session()
        space, hashes = await node.space(alice), chain("a", 2)
        reserved = await node.reserve(alice, space, hashes)
        purging = asyncio.ensure_future(purge(node, Selection(tenant="alice"), 100.0))
        await keys_taken(space)
        assert await node.commit(alice, reserved, hashes) == bytes([MISS, MISS])
        assert (await purging).state == COMPLETE
        assert in_memory(node, hashes) == set()
        assert not alice.ended


async def test_what_an_earlier_process_left_is_purged_before_it_is_verified():
    keeper = MemoryKeeper()
    async with Node(16, segment_blocks=4, keeper=keeper) as node:
        _, _, (hashes, others) = await two_tenants(node)
    async with Node(16, segment_blocks=4, keeper=keeper.snapshot()) as node:
        assert in_memory(node, hashes) == set(hashes)
        reviving = asyncio.ensure_future(node.parts.revival.run())
        receipt = await purge(node, Selection(tenant="alice"))
        assert (receipt.state, receipt.dram_blocks) == (COMPLETE, 3)
        await reviving
        assert in_memory(node, hashes + others) == set(others)


# ---- who holds it ----


async def test_a_slot_that_another_block_got_while_keys_were_taken_is_that_ones(monkeypatch):
    monkeypatch.setattr(purge_module, "PIECE_BLOCKS", 2)
    async with Node(16, segment_blocks=16) as node:
        alice = await node.session("alice")
        space = await node.space(alice)
        old, new = chain("old", 6), chain("new", 4)
        await node.put(alice, space, old)
        purging = asyncio.ensure_future(purge(node, Selection(tenant="alice")))
        await until(lambda: len(space.entries) == 4)
        node.parts.room.evict(list(space.entries.values()), "for a test")
        assert await node.put(alice, space, new) == bytes([RESERVED] * 4)
        held = await node.get(alice, space, new)
        await turns()
        assert in_memory(node, new) == set(new), "they are leased"
        node.store.reads.release(alice, [lease.lease_id for lease in held.leases])
        receipt = await purging
        assert (receipt.state, receipt.remains) == (COMPLETE, [])
        assert in_memory(node, old) == set()


async def test_leases_have_until_the_deadline_and_no_new_ones_are_given():
    async with Node(16, segment_blocks=4) as node:
        (alice, bob), (space, other), (hashes, others) = await two_tenants(node)
        held = await node.get(alice, space, hashes)
        kept = await node.get(bob, other, others)
        purging = asyncio.ensure_future(purge(node, Selection(tenant="alice"), 1e6))
        await keys_taken(space)
        assert (await node.get(alice, space, hashes)).next == MISS
        assert in_memory(node, hashes) == set(hashes)  # its reader still reads it
        node.store.reads.release(alice, [held.leases[0].lease_id])
        receipt = await purging
        assert (receipt.state, receipt.leases, receipt.leases_ended, receipt.sessions_ended) == (COMPLETE, 1, 0, [])
        assert in_memory(node, hashes) == set()
        node.store.reads.release(bob, [kept.leases[0].lease_id])


async def test_past_the_deadline_all_sessions_of_a_group_are_ended_and_listed():
    async with Node(16, segment_blocks=4) as node:
        first = await node.session(create_group=True)
        second = await node.session(join_group=first.group.group_id)
        bystander = await node.session()
        space, hashes = await node.space(first), chain("a", 3)
        await node.put(first, space, hashes)
        await node.get(first, space, hashes)
        ended = []

        def part_with(session, reason, cause):
            assert in_memory(node, hashes) == set(hashes)  # the way to the client is closed before
            ended.append(cause)
            node.store.end_session(session, cause)

        node.store.part_with = part_with
        receipt = await purge(node, Selection(tenant="alice"), 0.1)
        assert (receipt.state, receipt.leases_ended, receipt.sessions_ended_count) == (COMPLETE, 1, 2)
        assert sorted(line[:8] for line in receipt.sessions_ended) == sorted([first.name, second.name])
        assert ended == ["purge", "purge"]
        assert not bystander.ended
        assert in_memory(node, hashes) == set()


async def test_who_puts_on_and_on_past_the_deadline_is_ended_for_its_staging():
    async with Node(16, segment_blocks=4) as node:
        alice = await node.session()
        space = await node.space(alice)
        purges = Purges(node.store)
        await node.put(alice, space, chain("a", 2))
        await node.reserve(alice, await node.space(alice, "another"), chain("b", 1))
        receipt = await purge(node, Selection(model="m"), 0.1, purges)
        assert receipt.state == COMPLETE
        assert receipt.sessions_ended_count == 1
        assert alice.ended


async def test_staging_is_wiped_between_two_puts_and_never_under_one():
    async with Node(16, segment_blocks=4) as node:
        alice = await node.session()
        space = await node.space(alice)
        await node.put(alice, space, chain("a", 2))
        seen = []
        zero = alice.staging.zero

        def zeroing():
            seen.append((alice.wiping, dict(alice.reservations)))
            zero()

        alice.staging.zero = zeroing
        await purge(node, Selection(tenant="alice"))
        assert seen == [(True, {})]
        alice.wiping = True
        assert set(await node.put(alice, space, chain("b", 1))) == {THROTTLED}
        alice.wiping = False
        assert await node.put(alice, space, chain("b", 1)) != bytes([THROTTLED])
        assert (await node.get(alice, space, chain("b", 1))).next == HIT


async def test_staging_of_a_session_that_has_ended_is_waited_for_while_a_copy_runs_from_it():
    async with Node(16, segment_blocks=4) as node:
        (alice, _), _, _ = await two_tenants(node)
        staging = alice.staging
        staging.hold()
        node.store.end_session(alice)
        purges = Purges(node.store)
        receipt = await purges.start(Selection(tenant="alice"), "root", 0.0)
        await until(lambda: receipt.phase == STAGING_LEFT or not receipt.unfinished)
        assert receipt.unfinished
        staging.unhold()
        await purges.ended(receipt.purge_id)
        assert (receipt.state, receipt.remains) == (COMPLETE, [])
        assert node.parts.staging.used_bytes_of["alice"] == 0


async def test_staging_of_tenants_whose_clients_come_and_go_is_gone_when_each_had_none_left(monkeypatch):
    looks = dict.fromkeys(("alice", "bob"), 0)

    def leaving_bytes(_, tenant):
        looks[tenant] += 1
        return (looks[tenant] + (tenant == "bob")) % 2  # never none of both at once

    monkeypatch.setattr(Holders, "_leaving_bytes", leaving_bytes)
    async with Node(16, segment_blocks=4) as node:
        receipt = Receipt("id", Selection(), "root", 0.0, 0.0)
        gone = asyncio.create_task(Holders(node.store, receipt).staging_gone(["alice", "bob"]))
        await until(lambda: gone.done() or sum(looks.values()) > 8)
        node.clock.now += DEVICE_WAIT_S
        await gone
        assert receipt.remains == []


async def test_leases_of_clients_that_did_not_come_back_are_ended_too():
    keeper = MemoryKeeper()
    node = Node(16, segment_blocks=4, keeper=keeper)
    await node.__aenter__()
    alice = await node.session()
    space, hashes = await node.space(alice), chain("a", 2)
    await node.put(alice, space, hashes)
    held = await node.get(alice, space, hashes)
    node.store.reads.notes.freeze()
    kept = keeper.snapshot()
    await node.__aexit__()
    async with Node(16, segment_blocks=4, keeper=kept) as node:
        assert node.store.quarantine.leases == 1
        causes = []
        node.store.release_times.observe = lambda cause, seconds: causes.append(cause)
        await node.parts.revival.run()
        receipt = await purge(node, Selection(tenant="alice"), 0.1)
        assert (receipt.state, receipt.leases_ended, node.store.quarantine.leases) == (COMPLETE, 1, 0)
        assert causes == ["restart"]
        assert in_memory(node, hashes) == set()
    assert held.blocks == 2


async def test_a_device_that_does_not_come_back_leaves_the_purge_incomplete():
    lower = MemoryTier()
    async with Node(16, segment_blocks=4, below=lower) as node:
        (alice, _), (space, _), (hashes, _) = await two_tenants(node)
        await node.parts.below.mover.flush(1.0)
        node.parts.room.evict(list(space.entries.values()), Reason.EVICTED, "a test")
        lower.gate.clear()
        node.parts.below.promoter._deadline_s = 0.05
        await node.store.reads.get(alice, [space], hashes, 0.01)
        wipe = lower.wipe
        lower.wipe = None  # the tier would hang there too

        async def wiping(tenants, told, **_):
            lower.gate.set()
            return await wipe(tenants, told)

        lower.wipe = wiping
        receipt = await purge(node, Selection(tenant="alice"), 0.1, beyond_s=DEVICE_WAIT_S + 1.0)
        assert receipt.state == INCOMPLETE
        assert "3 blocks in DRAM" in receipt.remains[0]
        await node.settle()
        again = await purge(node, Selection(tenant="alice"), 0.1)
        assert again.state == COMPLETE
        assert in_memory(node, hashes) == set()


# ---- receipts ----


async def test_a_dry_run_counts_and_changes_nothing():
    lower = MemoryTier()
    async with Node(16, segment_blocks=4, below=lower) as node:
        (alice, bob), (space, other), (hashes, others) = await two_tenants(node)
        await node.parts.below.mover.flush(1.0)
        held = await node.get(alice, space, hashes)
        receipt = await Purges(node.store).dry_run(Selection(tenant="alice"), "root")
        assert (receipt.dram_blocks, receipt.nvme_blocks, receipt.leases) == (3, 3, 1)
        assert (receipt.dram_bytes, receipt.nvme_bytes) == (3 * BLOCK_BYTES, 3 * BLOCK_BYTES)
        node.store.reads.release(alice, [held.leases[0].lease_id])
        assert (await node.get(alice, space, hashes)).blocks == 3
        assert (await node.get(bob, other, others)).blocks == 3


async def test_a_dry_run_holds_nothing_and_moves_nothing_whenever_it_is_given_up(monkeypatch):
    monkeypatch.setattr(purge_module, "PIECE_BLOCKS", 2)
    async with Node(16, segment_blocks=4) as node:
        _, (space, _), (hashes, _) = await two_tenants(node)
        order = node.parts.catalog.order("alice", BLOCK_BYTES)
        before = list(order)
        for wait in range(6):
            counting = asyncio.ensure_future(Purges(node.store).dry_run(Selection(tenant="alice"), "root"))
            await turns(wait)
            assert not any(space.entries[hash_].holds for hash_ in hashes)
            counting.cancel()
            await asyncio.wait([counting])
            assert list(order) == before


async def test_a_failing_tier_is_on_the_receipt(monkeypatch):
    lower = MemoryTier()
    async with Node(16, segment_blocks=4, below=lower) as node:
        (_, _), (space, _), _ = await two_tenants(node)

        async def failing(*_):
            raise DeviceError("drive 0 is off")

        monkeypatch.setattr(lower, "delete", failing)
        receipt = await purge(node, Selection(tenant="alice"))
        assert receipt.state == INCOMPLETE
        assert receipt.remains == [f"namespace {space.digest.hex()} on NVMe: drive 0 is off"]


async def test_purges_of_one_tenant_run_one_after_the_other_and_a_few_may_wait():
    async with Node(16, segment_blocks=4) as node:
        (alice, _), (space, _), (hashes, _) = await two_tenants(node)
        held = await node.get(alice, space, hashes)
        purges = Purges(node.store)
        receipts = [await purges.start(Selection(tenant="alice"), "root", 1e6) for _ in range(16)]
        with pytest.raises(LimitExceeded, match="16 purges"):
            await purges.start(Selection(tenant="alice"), "root", 1e6)
        await keys_taken(space)
        assert [receipt.state for receipt in receipts] == ["running"] + ["waiting"] * 15
        node.store.reads.release(alice, [held.leases[0].lease_id])
        for receipt in receipts:
            await purges.ended(receipt.purge_id)
        assert {receipt.state for receipt in receipts} == {COMPLETE}


async def test_nobody_waits_for_the_purge_of_another_tenant():
    async with Node(16, segment_blocks=4) as node:
        (alice, _), (space, _), (hashes, _) = await two_tenants(node)
        await node.get(alice, space, hashes)
        purges = Purges(node.store)
        endless = [await purges.start(Selection(tenant="alice"), "alice", 1e6) for _ in range(16)]
        receipt = await asyncio.wait_for(purge(node, Selection(tenant="bob"), purges=purges), 60)
        assert (receipt.state, endless[0].state) == (COMPLETE, "running")
        await purges.stop()


async def test_a_purge_that_waits_for_another_of_its_tenant_is_done_by_its_own_deadline():
    async with Node(16, segment_blocks=4) as node:
        (alice, _), (space, _), (hashes, _) = await two_tenants(node)
        await node.get(alice, space, hashes)
        purges = Purges(node.store)
        endless = await purges.start(Selection(tenant="alice"), "alice", 1e6)
        receipt = await asyncio.wait_for(purge(node, Selection(model="m"), 0.5, purges), 60)
        assert (endless.state, receipt.state, endless.sessions_ended_count) == (COMPLETE, COMPLETE, 1)


async def test_what_a_stop_cut_short_is_begun_again_by_the_next_daemon():
    on_file = []
    async with Node(16, segment_blocks=4) as node:
        (alice, _), (space, _), (hashes, _) = await two_tenants(node)
        await node.get(alice, space, hashes)
        purges = Purges(node.store)
        purges.receipts.save = on_file.append
        receipt = await purges.start(Selection(tenant="alice"), "root", 1e6)
        assert len(on_file) == 1  # before it is acknowledged
        await keys_taken(space)
        await purges.stop()
        assert receipt.unfinished
        assert not any(entry.holds > 1 for entry in space.entries.values())
    async with Node(16, segment_blocks=4) as node:
        later = Purges(node.store)
        later.receipts.restore(on_file[-1])
        ((again,), _) = later.resume()
        await later.ended(again.purge_id)
        assert (again.purge_id, again.state) == (receipt.purge_id, COMPLETE)
        assert "begun again" in again.notes[0]
        assert later.resume() == ([], [])


async def test_what_is_asked_for_while_the_daemon_stops_is_left_to_the_next_one():
    """It would run on while memory is unmapped."""
    async with Node(16, segment_blocks=4) as node:
        _, (space, _), _ = await two_tenants(node)
        purges, saving = Purges(node.store), threading.Event()
        purges.receipts.save = lambda data: saving.wait(PATIENCE_S)
        starting = asyncio.ensure_future(purges.start(Selection(tenant="alice"), "root", 0.5))
        await turns()
        await purges.stop()
        saving.set()
        receipt = await starting
        departures = Departures(node.parts, purges, node.store.hints.hinting, left=None)
        await departures.stop()
        departures.begin("alice")
        await turns()
        assert receipt.unfinished
        assert not purges.receipts.all()[0].notes
        assert (len(purges.receipts.all()), len(space.entries)) == (1, 3)


async def test_a_purge_is_complete_when_its_receipt_is_on_file():
    go, on_file = threading.Event(), []

    def save(packed):
        if on_file:
            go.wait()
        on_file.append(packed)

    async with Node(16, segment_blocks=4) as node:
        purges = Purges(node.store)
        purges.receipts.save = save
        receipt = await purges.start(Selection(tenant="alice"), "root", 1.0)
        for _ in range(50):
            await asyncio.sleep(0.001)
            assert purges.state_of(receipt) == "running"
        go.set()
        await purges.ended(receipt.purge_id)
        await asyncio.sleep(0)
        assert purges.state_of(receipt) == receipt.state == COMPLETE
        assert b'"state":"complete"' in on_file[-1]


async def test_what_cannot_be_put_on_file_is_noted(tmp_path: Path):
    def full(_):
        raise DeviceError("no space left")

    async with Node(16, segment_blocks=4) as node:
        purges = Purges(node.store)
        purges.receipts.save = full
        receipt = await purge(node, Selection(tenant="alice"), purges=purges)
        assert len(receipt.notes) == 1
        assert "no space left" in receipt.notes[0]


def test_receipts_are_bounded_and_none_is_lost_that_is_unfinished():
    receipts = Receipts()
    for number in range(RECEIPTS_MAX + 10):
        state = "running" if number == 3 else COMPLETE
        receipts.add(Receipt(str(number), Selection(tenant="t"), "root", 0.0, 0.0, state=state))
    kept = receipts.all()
    assert len(kept) == RECEIPTS_MAX
    assert kept[0].purge_id == str(RECEIPTS_MAX + 9)
    assert receipts.get("3") is not None
    assert receipts.get("4") is None


def test_receipts_that_say_incomplete_are_bounded_and_push_out_none_of_another_tenants():
    receipts = Receipts()
    receipts.add(Receipt("b", Selection(tenant="b"), "b", 0.0, 0.0, state=COMPLETE))
    for number in range(RECEIPTS_MAX + 10):
        receipts.add(Receipt(str(number), Selection(tenant="a"), "a", 0.0, 0.0, state=INCOMPLETE))
    assert len(receipts.all()) == RECEIPTS_MAX
    assert receipts.get("b") is not None
    assert receipts.get("10") is None


async def test_a_purge_that_is_begun_again_wipes_what_nobody_can_name_any_more():
    keeper, on_file = MemoryKeeper(), []
    async with Node(16, segment_blocks=4, keeper=keeper) as node:
        (alice, _), spaces, (hashes, _) = await two_tenants(node)
        await node.get(alice, spaces[0], hashes)
        purges = Purges(node.store)
        purges.receipts.save = on_file.append
        await purges.start(Selection(model="m"), "root", 5.0)
        await keys_taken(*spaces)
        kept = keeper.snapshot()  # keys are gone, bytes are not
        await purges.stop()
    async with Node(16, segment_blocks=4, keeper=kept) as node:
        assert in_memory(node, hashes) == set(hashes)
        later = Purges(node.store)
        later.receipts.restore(on_file[0])
        ((again,), _) = later.resume()
        last_s = node.clock.now + 10.0  # beyond its deadline
        while again.state != COMPLETE:
            node.clock.now = min(node.clock.now + 1.0, last_s)
            await asyncio.sleep(0.001)
        assert in_memory(node, hashes) == set()


@pytest.mark.parametrize("data", [b"", b"{", b'{"version": 2, "receipts": []}', b'{"version": 1, "receipts": 1}'])
def test_receipts_that_make_no_sense_are_refused(data):
    with pytest.raises(KVStoredError, match="receipts of purges"):
        Receipts().restore(data)


async def test_a_damaged_file_of_purges_never_stops_the_start_though_it_cannot_be_put_aside(tmp_path: Path):
    state, warnings = StateDirectory(tmp_path), list[str]()
    (tmp_path / FILE_NAME).write_bytes(b"no receipts")
    (tmp_path / DAMAGED_NAME).mkdir()
    async with Node(16, segment_blocks=4) as node:
        await resume(Purges(node.store), state, warnings)
        assert "damaged" in warnings[0]
