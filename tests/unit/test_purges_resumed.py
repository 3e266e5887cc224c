"""Purges that one daemon leaves unfinished: what the next one takes away, what not, and how often it tries."""

import asyncio
from types import SimpleNamespace

import pytest

from kvstored.daemon import purge_file
from kvstored.device.state_directory import StateDirectory
from kvstored.errors import DeviceError
from kvstored.purge.keys import destroy_keys
from kvstored.purge.purges import GIVEN_UP, Purges
from kvstored.purge.receipts import COMPLETE, INCOMPLETE, RESUMES_MAX, Receipt, Selection
from kvstored.tenancy.merge import Changes
from kvstored.testing.keeping import MemoryKeeper
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import Node, chain
from kvstored.testing.waiting import turns, until

OFF = "drive 0 is off"


async def to_the_end(node, purges, receipt):
    """Let time pass until a purge has ended: beyond its deadline, and not beyond what threads are given."""
    last_s = node.clock.now + 5.0
    while receipt.purge_id in purges._tasks:
        node.clock.now = min(node.clock.now + 0.5, last_s)
        await asyncio.sleep(0.001)
    return receipt


class Failing:
    """A tier whose deletes fail: what is below stays, and the purge is incomplete."""

    def __init__(self, monkeypatch, lower):
        async def fail(*_):
            raise DeviceError(OFF)

        self._patch = monkeypatch.context()
        self._patch.__enter__().setattr(lower, "delete", fail)

    def end(self):
        self._patch.__exit__(None, None, None)


def held_in(node, space):
    """Hashes of a space in DRAM and below."""
    return set(space.entries), {hash_ for digest, hash_ in node.lower.blocks if digest == space.digest}


async def begun(node, lower, purges, selection, monkeypatch):
    """A purge that could not delete below; with the space, which had `old` in both tiers."""
    session = await node.session("alice")
    space = await node.space(session)
    await node.put(session, space, chain("old", 3))
    await node.parts.below.mover.flush(1.0)
    node.clock.now += 1.0
    failing = Failing(monkeypatch, lower)
    receipt = await to_the_end(node, purges, await purges.start(selection, "root", 1.0))
    failing.end()
    assert (receipt.state, receipt.remains) == (INCOMPLETE, [f"namespace {space.digest.hex()} on NVMe: {OFF}"])
    return session, space, receipt


@pytest.mark.parametrize("selection", [Selection(tenant="alice"), Selection(model="m")])
async def test_what_was_put_since_stays_when_a_purge_is_begun_again(selection, monkeypatch):
    keeper, lower, on_file = MemoryKeeper(), MemoryTier(), []
    async with Node(16, segment_blocks=4, keeper=keeper, below=lower) as node:
        purges = Purges(node.store)
        purges.receipts.save = on_file.append
        session, space, _ = await begun(node, lower, purges, selection, monkeypatch)
        node.clock.now += 60.0
        await node.put(session, space, chain("since", 4))
        await node.parts.below.mover.flush(1.0)
        node.clock.now += 1.0
        await node.put(session, space, chain("dram", 2))
        assert held_in(node, space)[1] == {*chain("old", 3), *chain("since", 4)}
        kept, now = keeper.snapshot(), node.clock.now
    node = Node(16, segment_blocks=4, keeper=kept, below=lower)
    node.clock.now = now + 5.0
    node.parts.dram.keep_time(node.clock.wall)
    async with node:
        await node.parts.revival.run()
        (space,) = node.parts.catalog.spaces.values()
        later = Purges(node.store)
        later.receipts.restore(on_file[-1])
        ((receipt,), given_up) = later.resume()
        await to_the_end(node, later, receipt)
        assert (receipt.state, given_up) == (COMPLETE, [])
        assert held_in(node, space) == ({*chain("since", 4), *chain("dram", 2)}, set(chain("since", 4)))


async def test_before_all_keys_were_taken_whatever_the_earlier_daemon_left_goes():
    keeper, lower, on_file = MemoryKeeper(), MemoryTier(), []
    async with Node(16, segment_blocks=4, keeper=keeper, below=lower) as node:
        session = await node.session("alice")
        space = await node.space(session)
        await node.put(session, space, chain("old", 3))
        purges = Purges(node.store)
        purges.receipts.save = on_file.append
        lower.gate.clear()
        flushing = asyncio.ensure_future(node.parts.below.mover.flush(10.0))
        while not node.parts.below.mover.moving_blocks:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await purges.start(Selection(tenant="alice"), "root", 1e6)
        kept = keeper.snapshot()  # it has taken no key yet
        node.clock.now += 60.0  # for so long the drive keeps them: what it writes then is older than it looks
        await until(lambda: not space.entries)
        await turns()
        now = node.clock.now
        delete, lower.delete = lower.delete, None  # killed when they are written and not yet deleted again
        lower.gate.set()
        await purges.stop()
        with pytest.raises(TypeError):
            await flushing
        lower.delete = delete
        assert {hash_ for _, hash_ in lower.blocks} == set(chain("old", 3))
        assert len(on_file) == 2
    node = Node(16, segment_blocks=4, keeper=kept, below=lower)
    node.clock.now = now + 5.0
    node.parts.dram.keep_time(node.clock.wall)
    async with node:
        later = Purges(node.store)
        later.receipts.restore(on_file[0])
        ((receipt,), _) = later.resume()
        reviving = asyncio.ensure_future(node.parts.revival.run())
        await to_the_end(node, later, receipt)
        await reviving
        assert receipt.state == COMPLETE
        assert not lower.blocks
        assert not [entry for space in node.parts.catalog.spaces.values() for entry in space.entries]


@pytest.mark.parametrize("settled", [False, True])
async def test_what_an_earlier_daemon_left_in_dram_is_as_old_as_the_receipt_says(settled):
    keeper, on_file = MemoryKeeper(), []
    async with Node(16, segment_blocks=4, keeper=keeper) as node:
        session = await node.session("alice")
        await node.put(session, await node.space(session), chain("a", 3))
        purges = Purges(node.store)
        purges.receipts.save = on_file.append
        await purges.start(Selection(tenant="alice"), "root", 1e6)
        kept = keeper.snapshot()
        await purges.stop()
    async with Node(16, segment_blocks=4, keeper=kept) as node:
        await node.parts.revival.run()
        (space,) = node.parts.catalog.spaces.values()
        later = Purges(node.store)
        later.receipts.restore(on_file[0])
        later.receipts.all()[0].settled_s = 1.0 if settled else 0.0
        ((receipt,), _) = later.resume()
        await to_the_end(node, later, receipt)
        assert receipt.state == COMPLETE
        assert len(space.entries) == (3 if settled else 0)


async def test_of_a_tenant_that_was_removed_everything_goes_however_often_it_takes(monkeypatch):
    lower, on_file = MemoryTier(), []
    async with Node(16, segment_blocks=4, below=lower) as node:
        purges = Purges(node.store)
        purges.receipts.save = on_file.append
        session, space, _ = await begun(node, lower, purges, Selection(tenant="alice"), monkeypatch)
        node.clock.now += 60.0
        await node.put(session, space, chain("since", 4))
        node.parts.tenants.changes = Changes({}, {}, ["alice"])
        later = Purges(node.store)
        later.receipts.restore(on_file[-1])
        (kept,) = later.receipts.all()
        kept.resumed = RESUMES_MAX + 1
        ((receipt,), given_up) = later.resume()
        assert not given_up
        await to_the_end(node, later, receipt)
        assert receipt.state == COMPLETE
        assert held_in(node, space) == (set(), set())


async def test_a_purge_that_is_never_complete_is_begun_again_so_often_and_then_says_so(tmp_path, monkeypatch):
    lower, state, warnings = MemoryTier(), StateDirectory(tmp_path), []
    async with Node(16, segment_blocks=4, below=lower) as node:
        purges = Purges(node.store)
        purges.receipts.save = lambda packed: state.replace(purge_file.FILE_NAME, packed)
        _, space, receipt = await begun(node, lower, purges, Selection(tenant="alice"), monkeypatch)
        failing = Failing(monkeypatch, lower)
        for number in range(1, RESUMES_MAX + 3):
            later = Purges(node.store)
            await purge_file.resume(later, state, warnings)
            (again,) = later.receipts.all()
            await to_the_end(node, later, again)
            assert (again.purge_id, again.state) == (receipt.purge_id, INCOMPLETE)
            assert again.resumed == min(number, RESUMES_MAX)
            assert len(again.notes) == (1 if number <= RESUMES_MAX else 2), "one line, however often"
            assert again.remains == [f"namespace {space.digest.hex()} on NVMe: {OFF}"]
        failing.end()
        assert again.notes[0] == f"begun again after a restart, {RESUMES_MAX} times"
        assert again.notes[1] == GIVEN_UP
        hint = "is incomplete and is not begun again: `kvstorectl purge status` says what remains"
        assert warnings == 2 * [f"purge {receipt.purge_id} {hint}"]
        anew = await to_the_end(node, later, await later.start(Selection(tenant="alice"), "root", 1.0))
        assert anew.state == COMPLETE
        assert not lower.blocks


@pytest.mark.parametrize(
    ("resumed", "destroyed", "locked", "goes"),
    [
        (False, False, False, True),
        (True, False, False, False),
        (True, False, True, True),
        (True, True, True, False),
        (False, True, False, True),
    ],
)
async def test_data_keys_are_destroyed_once_and_not_from_under_what_was_put_since(resumed, destroyed, locked, goes):
    gone = []

    async def destroy(tenant):
        gone.append(tenant)
        return 2

    keys = SimpleNamespace(has=lambda _: True, locked=lambda: {"alice": "?"} if locked else {}, destroy=destroy)
    receipt = Receipt("1", Selection(tenant="alice"), "root", 0.0, 0.0, keys_destroyed=destroyed)
    erased = await destroy_keys(SimpleNamespace(below=SimpleNamespace(keys=keys)), receipt, resumed=resumed)
    assert (erased, gone) == (({"alice"}, ["alice"]) if goes else (set(), []))
    assert receipt.keys_destroyed == (destroyed or goes)
