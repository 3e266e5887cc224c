"""What a load to a GPU does beside its copies, with a device of the test that copies when it is told to: blocks come up
from below while others are copied, layers are told, loads are given up. Seen by events, not by time."""

import asyncio
import os
from types import SimpleNamespace

import pytest
from kvstored_proto import page

from kvstored.device.worker_messages import TELLS_LAYERS, Segment, Transfer
from kvstored.errors import DeviceError, InvalidArgument
from kvstored.store import gpu_loads
from kvstored.store.gpu_loads import Loads
from kvstored.store.outcomes import HIT, MISS
from kvstored.store.registrations import Rows
from kvstored.store.tasks import Tasks
from kvstored.store.transfer_marks import CANCELLED, ENDED, NO_MORE_LAYERS, Terms, UnderWay
from kvstored.store.transfers import Transfers
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import BLOCK_BYTES, Node, chain
from kvstored.testing.waiting import until
from kvstored.tiers.gpu import Gpus as RealGpus
from kvstored.tiers.gpu import How, Registration

LAYERS = 4


class Gpus:
    """Transfers that end when the test says so."""

    def __init__(self):
        self.begun, self.ends = [], []

    async def transfer(self, registration, ids, runs, how):
        self.begun.append((len(ids) // 4, how))
        self.ends.append(asyncio.get_running_loop().create_future())
        return await self.ends[-1]

    def end(self, number, error=""):
        self.ends[number].set_result(error)


class Rig:
    """A node whose loads go to such a device, in pieces of two blocks."""

    def __init__(self, node, session, space):
        self.node, self.session, self.space = node, session, space
        self.gpus, self.under_way = Gpus(), UnderWay()
        self.loads = Loads(node.parts, node.store.reads, self.gpus, Tasks())
        cuts = list(range(LAYERS + 1))
        fragments = [(0, 0, 1, BLOCK_BYTES // LAYERS)] * LAYERS
        self.made = Registration(1, b"", [], fragments, 64, BLOCK_BYTES, [], [], owner=1, cuts=cuts)
        session.page = SimpleNamespace(memory=memoryview(bytearray(page.PAGE_BYTES)))

    def start(self, hashes, terms=None, wait_s=60.0):
        """A load as a task."""
        terms = terms or Terms()
        mark = self.under_way.begin(self.session, terms)

        async def load():
            try:
                rows = Rows(bytes(4 * len(hashes)), 1)
                loaded = await self.loads.run(self.session, self.space, hashes, self.made, rows, wait_s, mark)
                self.loads.give_back(self.session, loaded.held)
                return loaded
            finally:
                self.under_way.end(self.session, mark)

        return asyncio.ensure_future(load())

    def told(self, terms):
        """What the client sees of its layers."""
        return page.layers(self.session.page.memory, terms.layers_word, terms.transfer_id)

    @property
    def below(self):
        return self.node.lower

    @property
    def held(self):
        """How many blocks are held by anything."""
        return sum(bool(entry.holds) for entry in self.space.entries.values())


@pytest.fixture
async def rig(monkeypatch):
    monkeypatch.setattr(gpu_loads, "PIECE_BYTES", 2 * BLOCK_BYTES)
    async with Node(blocks=16, below=MemoryTier()) as node:
        session = await node.session()
        made = Rig(node, session, await node.space(session))
        yield made
        session.page = None


async def test_blocks_come_up_from_nvme_while_earlier_ones_are_copied(rig):
    hashes = chain("a", 6)
    await rig.node.put_below(rig.session, rig.space, hashes)
    load = rig.start(hashes)
    await until(lambda: rig.gpus.begun)
    assert rig.below.loaded == hashes[:2], "the first piece is copied before anything more is read"
    await until(lambda: len(rig.below.loaded) == 4)
    assert not rig.gpus.ends[0].done(), "the second is read while the first is copied"
    await until(lambda: len(rig.gpus.begun) == 2)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(rig.below.loaded) == 4, "and no more than the pieces that may be under way"
    rig.gpus.end(0)
    await until(lambda: len(rig.gpus.begun) == 3)
    for number in (1, 2):
        rig.gpus.end(number)
    loaded = await load
    assert (loaded.blocks, loaded.next, loaded.error) == (6, HIT, "")
    assert not rig.held


async def test_what_was_copied_before_a_failure_counts_and_nothing_is_held(rig):
    hashes = chain("a", 6)
    await rig.node.put(rig.session, rig.space, hashes)
    load = rig.start(hashes)
    await until(lambda: len(rig.gpus.begun) == 2)
    rig.gpus.end(1, "broken")
    for _ in range(50):
        await asyncio.sleep(0)
    assert not load.done(), "the first piece may still be written to"
    assert rig.held == 2
    rig.gpus.end(0)
    await until(lambda: len(rig.gpus.begun) == 3)
    rig.gpus.end(2)
    loaded = await load
    assert (loaded.blocks, loaded.next, loaded.error) == (2, MISS, "broken")
    assert not rig.held


async def test_the_worker_is_told_of_a_piece_before_the_next_one_is_looked_up(rig, monkeypatch):
    hashes = chain("a", 4)
    await rig.node.put(rig.session, rig.space, hashes)
    real, begun = rig.node.store.reads.get, []

    def get(*arguments):
        begun.append(len(rig.gpus.begun))
        return real(*arguments)

    monkeypatch.setattr(rig.node.store.reads, "get", get)
    load = rig.start(hashes)
    await until(lambda: len(rig.gpus.begun) == 2)
    assert begun == [0, 1]
    for number in (0, 1):
        rig.gpus.end(number)
    assert (await load).blocks == 4


async def test_who_waits_for_a_load_is_told_before_its_last_blocks_are_given_back(rig, monkeypatch):
    hashes, store = chain("a", 4), rig.node.store
    await rig.node.put(rig.session, rig.space, hashes)
    transfers = Transfers(rig.node.parts, store.reads, store.writes, store.commits, rig.gpus)
    monkeypatch.setattr(transfers.registrations, "of", lambda *_: (rig.made, Rows(bytes(16), 1)))
    held = []

    async def ask():
        loaded = await transfers.load(rig.session, rig.space, hashes, 1, b"", 60.0, Terms(transfer_id=7))
        held.append(rig.held)
        return loaded

    for leaves in (False, True):
        rig.gpus.begun.clear()
        rig.gpus.ends.clear()
        asking = asyncio.ensure_future(ask())
        await until(lambda: len(rig.gpus.begun) == 2)
        if leaves:
            asking.cancel()
        rig.gpus.end(0)
        await until(lambda: rig.held == 2)
        rig.gpus.end(1)
        await asyncio.wait([asking])
        assert asking.cancelled() == leaves
        await transfers.drained()
        assert not rig.held
        assert not await transfers.cancel(rig.session, 7), "it is over"
    assert held == [2], "those of the last piece, and not those of the first"


async def test_who_waits_for_a_load_is_told_of_what_broke_it(rig, monkeypatch):
    store = rig.node.store
    transfers = Transfers(rig.node.parts, store.reads, store.writes, store.commits, rig.gpus)
    monkeypatch.setattr(transfers.registrations, "of", lambda *_: (rig.made, Rows(bytes(4), 1)))

    def get(*_):
        raise DeviceError("told to")

    monkeypatch.setattr(store.reads, "get", get)
    with pytest.raises(DeviceError, match="told to"):
        await transfers.load(rig.session, rig.space, chain("a", 1), 1, b"", 60.0, Terms(transfer_id=7))
    assert not await transfers.cancel(rig.session, 7), "it is over"


async def test_layers_of_blocks_in_dram_are_one_transfer(rig):
    hashes, terms = chain("a", 6), Terms(transfer_id=7, layers_word=3)
    await rig.node.put(rig.session, rig.space, hashes)
    load = rig.start(hashes, terms)
    await until(lambda: rig.gpus.begun)
    ((count, how),) = rig.gpus.begun
    assert (count, how.tells, how.cuts) == (6, TELLS_LAYERS, [0, 1, 2, 3, 4])
    assert rig.told(terms) == (0, 0)
    how.copied(1)
    assert rig.told(terms) == (6, 1)
    how.copied(4)
    assert rig.told(terms) == (6, 4)
    rig.gpus.end(0)
    assert (await load).blocks == 6


async def test_a_layer_is_told_when_it_is_in_place_for_what_came_from_nvme_too(rig):
    hashes, terms = chain("a", 6), Terms(transfer_id=7, layers_word=3, first_layer=1)
    await rig.node.put_below(rig.session, rig.space, hashes[2:])
    await rig.node.put(rig.session, rig.space, hashes[:2])
    rig.below.gate.clear()
    load = rig.start(hashes, terms)
    await until(lambda: rig.gpus.begun)
    assert rig.gpus.begun[0][0] == 2, "what is there goes before the rest is read"
    rig.gpus.begun[0][1].copied(3)
    rig.gpus.end(0)
    assert rig.told(terms) == (0, 0), "nobody knows yet how many blocks there will be"
    rig.below.gate.set()
    await until(lambda: len(rig.gpus.begun) == 3)
    copied = [how.copied for _, how in rig.gpus.begun]
    assert [count for count, _ in rig.gpus.begun] == [2, 2, 2]
    assert {tuple(how.cuts) for _, how in rig.gpus.begun} == {(1, 2, 3, 4)}
    copied[1](3)
    assert rig.told(terms) == (0, 0), "the last blocks have no layer yet"
    copied[2](1)
    assert rig.told(terms) == (6, 1)
    copied[2](3)
    assert rig.told(terms) == (6, 3)
    rig.gpus.end(1)
    rig.gpus.end(2)
    assert (await load).blocks == 6


async def test_a_load_that_is_cancelled_waits_for_its_copies_and_not_for_blocks(rig):
    hashes, terms = chain("a", 6), Terms(transfer_id=7)
    await rig.node.put_below(rig.session, rig.space, hashes[2:])
    await rig.node.put(rig.session, rig.space, hashes[:2])
    rig.below.gate.clear()
    load = rig.start(hashes, terms, wait_s=1000.0)
    await until(lambda: rig.gpus.begun and rig.below.calls["load"])
    cancelling = asyncio.ensure_future(rig.under_way.cancel(rig.session, 7))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not cancelling.done(), "a copy runs"
    rig.gpus.end(0)
    assert await cancelling
    loaded = await load
    assert (loaded.blocks, loaded.next, loaded.error) == (2, MISS, CANCELLED)
    assert not await rig.under_way.cancel(rig.session, 7), "it is over"
    rig.below.gate.set()
    await rig.node.settle()
    assert not rig.held


async def test_a_get_that_fails_leaves_nothing_held(rig, monkeypatch):
    hashes, terms = chain("a", 4), Terms(transfer_id=7, layers_word=3)
    await rig.node.put(rig.session, rig.space, hashes)
    real, asked = rig.node.store.reads.get, []

    def get(*arguments):
        asked.append(arguments)
        if len(asked) == 2:
            raise DeviceError("told to")
        return real(*arguments)

    monkeypatch.setattr(rig.node.store.reads, "get", get)
    with pytest.raises(DeviceError):
        await rig.start(hashes, terms)
    assert not rig.gpus.begun
    assert not rig.held


async def test_a_store_waits_for_its_next_layer_until_it_is_given_up(rig, monkeypatch):
    mark = rig.under_way.begin(rig.session, Terms(7, by_layers=True))
    assert not rig.under_way.layers_ready(rig.session, 8, 1), "there is none of this number"
    waiting = asyncio.ensure_future(mark.layers_beyond(0))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert rig.under_way.layers_ready(rig.session, 7, 2)
    assert await waiting == 2
    waiting = asyncio.ensure_future(mark.layers_beyond(2))
    await asyncio.sleep(0)
    rig.under_way.end_session(rig.session)
    assert await waiting == 2
    assert mark.stop.why == ENDED
    rig.under_way.end(rig.session, mark)
    monkeypatch.setattr("kvstored.store.transfer_marks.LAYER_MAX_S", 0.001)
    late = rig.under_way.begin(rig.session, Terms(7, by_layers=True))
    assert await late.layers_beyond(0) == 0
    assert late.stop.why == NO_MORE_LAYERS
    rig.under_way.end(rig.session, late)


async def test_a_segment_that_could_not_be_sent_is_sent_the_next_time(rig, monkeypatch):
    said, node = [], rig.node

    class FakeWorker:
        sent_segments, registered, transfers = set(), {1}, 0

        def send(self, message, fds):
            said.append(type(message))
            os.close(*fds)

        async def ask(self, message, *_):
            said.append(type(message))
            return ""

    async def worker(_):
        return made, ""

    await node.put(rig.session, rig.space, chain("a", 1))
    (entry,) = rig.space.entries.values()
    gpus = RealGpus(node.parts.dram, silence_max_s=1.0, drain_max_s=1.0)
    made, gpus.devices = FakeWorker(), SimpleNamespace(worker=worker)
    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", lambda fd: os.open("/nonexistent", os.O_RDONLY))
        assert "cannot be given" in await gpus.transfer(rig.made, bytes(4), [(entry.slot, 1)], How(to_device=True))
    assert not said
    for _ in range(2):
        assert await gpus.transfer(rig.made, bytes(4), [(entry.slot, 1)], How(to_device=True)) == ""
    assert said == [Segment, Transfer, Transfer]


async def test_terms_that_make_no_sense_are_refused(rig):
    for terms in (
        Terms(by_layers=True),
        Terms(done_word=1),
        Terms(7, done_word=256),
        Terms(7, layers_word=256),
        Terms(7, 5, layers_word=5),
    ):
        with pytest.raises(InvalidArgument):
            rig.under_way.begin(rig.session, terms)
    mark = rig.under_way.begin(rig.session, Terms(7))
    with pytest.raises(InvalidArgument, match="number 7"):
        rig.under_way.begin(rig.session, Terms(7))
    rig.under_way.end(rig.session, mark)
    for first, count in ((4, 0), (-1, 1), (3, 2)):
        with pytest.raises(InvalidArgument, match="layers"):
            rig.made.check_layers(first, count)
