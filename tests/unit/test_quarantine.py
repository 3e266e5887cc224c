"""Leases over a restart: their slots stay as they are until nobody can be reading them."""

import asyncio
import os
import subprocess
import sys

import pytest

from kvstored.catalog.leases import BOOT_SHIFT, Caller
from kvstored.device.processes import start_ticks
from kvstored.errors import NotFound
from kvstored.store.outcomes import NO_ROOM, RESERVED
from kvstored.store.quarantine import UNSEEN_S
from kvstored.testing.keeping import MemoryKeeper
from kvstored.testing.node import BLOCK_BYTES, Node, chain, payload


@pytest.fixture
def keeper():
    made = MemoryKeeper()
    yield made
    made.close()


def node_on(keeper, **settings):
    return Node(16, segment_blocks=8, keeper=keeper, **settings)


@pytest.fixture
def process():
    made = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield made
    made.kill()
    made.wait()
    made.stdin.close()


async def session_of(node, pid=0, uid=5, tenant="alice", client_id=b"me", **group):
    caller = Caller(tenant, "tenant", "session", "client", pid, uid)
    return await node.store.open_session(
        caller,
        staging_bytes=1 << 20,
        create_group=group.get("create_group", False),
        join_group=group.get("join_group", b""),
        client_id=client_id,
    )


async def leased(node, pid=0, count=8, **group):
    """A session that leases a chain of its own."""
    session = await session_of(node, pid, **group)
    space = await node.space(session)
    await node.put(session, space, chain("a", count))
    held = await node.get(session, space, chain("a", count))
    return session, held.leases[0]


def bytes_of(node, slots):
    return [bytes(node.parts.dram.view(slot, BLOCK_BYTES)) for slot in slots]


async def fill(node, session):
    """Puts more than the tier holds; how many blocks found room."""
    space = await node.space(session)
    outcomes = [
        outcome for number in range(20) for outcome in await node.put(session, space, chain(f"fill-{number}", 1))
    ]
    assert set(outcomes) <= {RESERVED, NO_ROOM}
    return outcomes.count(RESERVED)


async def test_leased_slots_keep_their_bytes_while_new_puts_fill_the_tier(keeper, process):
    async with node_on(keeper) as node:
        _, lease = await leased(node, process.pid)
        left = keeper.snapshot()
    async with node_on(left) as node:
        await node.parts.revival.run()
        assert node.store.quarantine.leases == 1
        await node.store.quarantine.look()
        assert await fill(node, await session_of(node)) == 20
        assert bytes_of(node, lease.slots) == [payload(hash_) for hash_ in chain("a", 8)]
        assert len({entry.slot for s in node.parts.catalog.spaces.values() for entry in s.entries.values()}) == 16
        process.kill()
        process.wait()
        await node.store.quarantine.look()
        assert node.store.quarantine.leases == 0
        assert await fill(node, await session_of(node)) > 0
    left.close()


async def test_a_client_that_comes_back_holds_what_it_names_and_the_rest_ends(keeper):
    async with node_on(keeper) as node:
        session, first = await leased(node, os.getpid())
        space = next(iter(session.spaces.values()))
        second = (await node.get(session, space, chain("a", 2))).leases[0]
        third = (await node.get(session, space, chain("a", 3))).leases[0]
        node.store.reads.release(session, [third.lease_id])
        left = keeper.snapshot()
    async with node_on(left) as node:
        await node.parts.revival.run()
        assert node.store.quarantine.leases == 2
        mine = await session_of(node, os.getpid())
        asked = [second.lease_id, third.lease_id, 12345]
        assert node.store.quarantine.resume(mine, asked) == [second.lease_id]
        assert node.store.quarantine.leases == 0
        assert list(mine.group.leases) == [second.lease_id]
        space = await node.space(mine)
        held = await node.get(mine, space, chain("a", 1))
        assert held.leases[0].lease_id > max(first.lease_id, second.lease_id)
        assert held.leases[0].lease_id >> BOOT_SHIFT == 2
        attached = node.store.reads.attach(mine, second.lease_id)
        assert attached.leases[0].slots == second.slots
        again = left.snapshot()
        assert node.store.reads.release(mine, [second.lease_id, held.leases[0].lease_id]) == 2
    async with node_on(again) as node:  # killed once more: they are the new session's there
        await node.parts.revival.run()
        third_session = await session_of(node, os.getpid())
        assert node.store.quarantine.resume(third_session, [second.lease_id]) == [second.lease_id]
    for each in (left, again):
        each.close()


async def test_a_client_that_never_heard_of_its_last_session_gets_its_leases_all_the_same(keeper):
    async with node_on(keeper) as node:
        _, lease = await leased(node, os.getpid())
        left = keeper.snapshot()
    async with node_on(left) as node:
        unheard = await session_of(node, os.getpid())
        assert node.store.quarantine.resume(unheard, [lease.lease_id]) == [lease.lease_id]
        again = left.snapshot()  # killed before the reply went out
    async with node_on(again) as node:
        await node.parts.revival.run()
        mine = await session_of(node, os.getpid())
        assert node.store.quarantine.resume(mine, [lease.lease_id]) == [lease.lease_id]
        assert node.store.quarantine.leases == 0
    for each in (left, again):
        each.close()


async def test_nobody_else_can_take_a_lease_over(keeper):
    async with node_on(keeper) as node:
        _, lease = await leased(node)
        left = keeper.snapshot()
    async with node_on(left) as node:
        for stranger in (await session_of(node, uid=6), await session_of(node, tenant="bob")):
            assert node.store.quarantine.resume(stranger, [lease.lease_id]) == []
        for client_id in (b"guessed", b""):
            other = await session_of(node, client_id=client_id)
            assert node.store.quarantine.resume(other, [lease.lease_id]) == []
        mine = await session_of(node)
        assert node.store.quarantine.resume(mine, [lease.lease_id]) == [lease.lease_id]
        assert node.store.quarantine.resume(mine, [lease.lease_id]) == []
    left.close()


async def test_what_a_group_leased_is_held_until_all_of_its_members_came_back_or_are_gone(keeper):
    async with node_on(keeper) as node:
        scheduler, lease = await leased(node, create_group=True)
        await session_of(node, client_id=b"worker", join_group=scheduler.group.group_id)
        left = keeper.snapshot()
    async with node_on(left) as node:
        await node.parts.revival.run()
        first = await session_of(node, join_group=scheduler.group.group_id)
        assert first.group.group_id == scheduler.group.group_id
        assert node.store.quarantine.resume(first, []) == []
        assert node.store.quarantine.leases == 1
        second = await session_of(node, client_id=b"worker", join_group=scheduler.group.group_id)
        assert second.group is first.group
        assert node.store.quarantine.resume(second, [lease.lease_id]) == [lease.lease_id]
        assert node.store.quarantine.leases == 0
        assert node.store.reads.release(first, [lease.lease_id]) == 1
        with pytest.raises(NotFound):
            await session_of(node, join_group=b"x" * 16)
        with pytest.raises(NotFound):
            await session_of(node, tenant="bob", join_group=scheduler.group.group_id + b"x")
    left.close()


async def test_a_group_is_known_to_its_own_tenant_only(keeper):
    async with node_on(keeper) as node:
        scheduler, _ = await leased(node, create_group=True)
        left = keeper.snapshot()
    async with node_on(left) as node:
        with pytest.raises(NotFound):
            await session_of(node, tenant="bob", join_group=scheduler.group.group_id)
    left.close()


async def test_a_block_deleted_under_a_lease_stays_deleted_and_its_slot_held(keeper):
    async with node_on(keeper) as node:
        session, lease = await leased(node)
        space = next(iter(session.spaces.values()))
        await node.store.writes.delete(session, space, chain("a", 8)[6:])
        left = keeper.snapshot()
    async with node_on(left) as node:
        await node.parts.revival.run()
        mine = await session_of(node)
        space = await node.space(mine)
        assert (await node.get(mine, space, chain("a", 8))).blocks == 6
        await fill(node, mine)
        assert bytes_of(node, lease.slots) == [payload(hash_) for hash_ in chain("a", 8)]
        assert node.store.quarantine.dead_blocks() == 2
        assert node.store.quarantine.resume(mine, [lease.lease_id]) == [lease.lease_id]
    left.close()


async def test_a_block_that_is_corrupt_after_the_restart_is_gone_and_its_slot_is_held(keeper):
    async with node_on(keeper) as node:
        _, lease = await leased(node)
        left = keeper.snapshot()
    victim = payload(chain("a", 8)[0])
    for name, fd in left.held.items():
        at = os.pread(fd, 1 << 20, 0).find(victim) if name.startswith("seg") else -1
        if at >= 0:
            os.pwrite(fd, b"!", at + 9)
    async with node_on(left) as node:
        await node.parts.revival.run()
        assert node.counters["corrupt_blocks"] == 1
        session = await session_of(node)
        await fill(node, session)
        assert bytes_of(node, lease.slots)[1:] == [payload(hash_) for hash_ in chain("a", 8)[1:]]
        assert bytes_of(node, lease.slots)[0][9:10] == b"!"
    left.close()


async def test_a_process_that_cannot_be_seen_has_its_time_to_come_back(keeper):
    async with node_on(keeper) as node:
        await leased(node)
        left = keeper.snapshot()
    async with node_on(left) as node:
        await node.store.quarantine.look()
        assert node.store.quarantine.leases == 1
        node.clock.now += UNSEEN_S
        await node.store.quarantine.look()
        assert node.store.quarantine.leases == 0
    left.close()


async def test_the_time_to_come_back_begins_when_the_daemon_serves(keeper, monkeypatch):
    async with node_on(keeper) as node:
        await leased(node)
        left = keeper.snapshot()
    async with node_on(left) as node:
        quarantine, look, looked = node.store.quarantine, node.store.quarantine.look, asyncio.Event()

        async def observed():
            await look()
            looked.set()

        monkeypatch.setattr(quarantine, "look", observed)
        node.clock.now += UNSEEN_S  # so long took the lower tier to open
        running = asyncio.create_task(quarantine.run())
        await looked.wait()
        assert quarantine.leases == 1
        running.cancel()
    left.close()


async def test_a_session_that_ended_and_a_grpc_one_leave_nothing_behind(keeper):
    async with node_on(keeper) as node:
        session, _ = await leased(node, os.getpid())
        node.store.end_session(session)
        remote = await node.store.open_session(
            Caller("alice", "tenant", "grpc"), staging_bytes=0, create_group=False, join_group=b""
        )
        space = await node.space(remote)
        assert (await node.get(remote, space, chain("a", 2))).blocks == 2
        left = keeper.snapshot()
    async with node_on(left) as node:
        assert node.store.quarantine.leases == 0
        await node.parts.revival.run()
        node.audit()
    left.close()


async def test_leases_stay_noted_over_an_orderly_stop(keeper):
    async with node_on(keeper) as node:
        _, lease = await leased(node, os.getpid())
        node.store.reads.notes.freeze()
    async with node_on(keeper) as node:
        assert node.store.quarantine.leases == 1
        mine = await session_of(node, os.getpid())
        assert node.store.quarantine.resume(mine, [lease.lease_id]) == [lease.lease_id]


async def test_a_lease_that_cannot_be_noted_is_not_given(keeper, monkeypatch):
    async with node_on(keeper) as node:
        session, _ = await leased(node)
        space = next(iter(session.spaces.values()))
        monkeypatch.setattr(node.parts.dram.ledger, "note_lease", lambda *_: 0)
        before = node.store.held()
        assert (await node.get(session, space, chain("a", 2))).blocks == 0
        assert node.counters["throttled_gets"] == 1
        assert node.store.held() == before


async def test_where_nobody_keeps_the_memory_nothing_is_noted():
    async with node_on(None) as node:
        session, lease = await leased(node, os.getpid())
        assert (session.place, lease.place) == (0, 0)
        assert lease.lease_id < 1 << BOOT_SHIFT


def test_a_process_is_known_by_its_start_and_a_dead_one_by_none(process):
    assert start_ticks(os.getpid()) > 0
    assert start_ticks(process.pid) >= start_ticks(os.getpid())
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(process.pid) == 0  # a zombie
    process.wait()
    assert start_ticks(process.pid) == 0
    assert start_ticks(0) == 0
