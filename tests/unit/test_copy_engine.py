"""The order of a device worker's work, on a driver of Python that copies at once and notes what it was asked."""

import ctypes
import itertools
import os
import subprocess

import numpy as np
import pytest

from kvstored.device import copy_jobs
from kvstored.device import worker_messages as messages
from kvstored.device.copy_engine import ContextLost, CopyEngine
from kvstored.device.cuda import CudaError
from kvstored.device.doorbell import Inbox
from kvstored.device.memory import Mapping
from kvstored.device.processes import end_noted, noted

BLOCK, BLOCKS = 4096, 16


class Stop(Exception):
    pass


class Commands(Inbox):
    """Ends the engine when there is nothing left to do."""

    def __init__(self, driver):
        super().__init__()
        self.driver = driver

    def wait(self, timeout_s):
        if timeout_s is None:
            raise Stop
        self.driver.go_on()


class Driver:
    def __init__(self):
        self.memory = np.arange(BLOCKS * BLOCK, dtype=np.uint32).astype(np.uint8)
        self.calls = []
        self.at_wait = lambda: None
        self.fail = {}
        self.stuck = set()  # streams that do nothing
        self.happens = {}  # event -> its stream, where it has not happened yet
        self._streams, self._events = itertools.count(11), itertools.count(1000)

    def __getattr__(self, name):
        def call(*arguments, **_):
            self.calls.append(name)
            if name in self.fail:
                raise CudaError(name, self.fail[name], "told to")
            return 1

        return call

    def stream(self):
        return next(self._streams)

    def open(self, handle):
        self.calls.append("open")
        return self.memory.ctypes.data

    def range_of(self, pointer):
        return pointer, self.memory.nbytes

    def read(self, target, pointer, size):
        ctypes.memmove(target, pointer, size)

    def copy(self, to, source, sizes, stream, *, to_device):
        if "copy" in self.fail:
            raise CudaError("copy", self.fail["copy"], "told to")
        self.calls.append(("load" if to_device else "store", len(to)))
        for a, b, n in zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(a, b, n)

    def event(self):
        return next(self._events)

    def record(self, event, stream):
        self.happens[event] = stream

    def happened(self, event):
        if "happened" in self.fail:
            raise CudaError("happened", self.fail["happened"], "told to")
        return event not in self.happens

    def go_on(self):
        """The engine has nothing to do but wait: the oldest piece that can end does."""
        self.calls.append("wait")
        self.at_wait()
        event = next((event for event, stream in self.happens.items() if stream not in self.stuck), None)
        self.happens.pop(event, None)

    @property
    def copies(self):
        return [call[0] for call in self.calls if isinstance(call, tuple)]


class Rig:
    def __init__(self):
        self.driver, self.said = Driver(), []
        self.commands = Commands(self.driver)
        self.engine = CopyEngine(self.driver, 0, self.commands, self.said.append, 1e9)
        self.mapping = Mapping(BLOCKS * BLOCK, name="segment")
        self.segment = self.mapping.fd
        self.commands.put((messages.Segment(7, BLOCKS * BLOCK), (os.dup(self.segment),)))
        self.register()

    def register(self, number=1, blocks=BLOCKS, **changes):
        region = {"handle": bytes(64), "offset": 0, "size_bytes": BLOCKS * BLOCK, "probe": b"", **changes}
        fragments = [(0, 0, BLOCK, BLOCK // 2), (0, BLOCK // 2, BLOCK, BLOCK // 2)]
        self.commands.put(messages.Register(number, [messages.Region(**region)], fragments, blocks))

    def transfer(self, number, count, *, to_device, registration=1, segment=7, first=0, **how):
        ids = np.arange(count, dtype=np.uint32)[::-1].tobytes()
        segments = np.full(count, segment, np.uint64).tobytes()
        offsets = ((first + np.arange(count, dtype=np.uint64)) * np.uint64(BLOCK)).tobytes()
        self.commands.put(messages.Transfer(number, registration, to_device, ids, segments, offsets, **how))

    def run(self):
        with pytest.raises(Stop):
            self.engine.run()
        return [message for message in self.said if not isinstance(message, (messages.Registered, messages.Progress))]


@pytest.fixture
def rig(monkeypatch):
    for name in ("FIRST_PIECE_BYTES", "PIECE_BYTES", "TOLD_PIECE_BYTES", "LANE_BYTES"):
        monkeypatch.setattr(copy_jobs, name, 2 * BLOCK)
    monkeypatch.setattr(copy_jobs, "PATIENCE_S", 3600.0)  # it passes where a test says so
    return Rig()


def test_a_transfer_goes_in_pieces_and_is_answered_once_at_its_end(rig):
    rig.transfer(5, 7, to_device=False)
    assert rig.run() == [messages.Done(5, "")]
    assert rig.driver.calls.count("wait") == 4
    assert rig.driver.copies == ["store"] * 4
    stored = np.frombuffer(os.pread(rig.segment, 7 * BLOCK, 0), np.uint8).reshape(7, BLOCK)
    assert (stored == rig.driver.memory.reshape(BLOCKS, BLOCK)[6::-1]).all()
    assert rig.driver.calls.count("pin") == 1


def test_blocks_of_one_transfer_may_lie_in_several_segments(rig):
    other = Mapping(BLOCKS * BLOCK, name="other")
    rig.commands.put((messages.Segment(8, BLOCKS * BLOCK), (os.dup(other.fd),)))
    segments = np.array([8, 7, 8, 7], np.uint64)
    offsets = np.array([0, 1, 2, 3], np.uint64) * np.uint64(BLOCK)
    ids = np.arange(4, dtype=np.uint32)
    rig.commands.put(messages.Transfer(1, 1, False, ids.tobytes(), segments.tobytes(), offsets.tobytes()))
    offsets[2] = BLOCKS * BLOCK
    rig.commands.put(messages.Transfer(2, 1, False, ids.tobytes(), segments.tobytes(), offsets.tobytes()))
    refused, done = rig.run()
    assert done == messages.Done(1, "")
    assert "ends past its segment" in refused.error
    for number, place in enumerate((other.fd, rig.segment, other.fd, rig.segment)):
        stored = np.frombuffer(os.pread(place, BLOCK, number * BLOCK), np.uint8)
        assert (stored == rig.driver.memory.reshape(BLOCKS, BLOCK)[number]).all()
    assert rig.driver.calls.count("pin") == 2
    other.close()


def test_memory_of_which_the_end_cannot_be_read_is_refused_before_any_copy(rig):
    """As of an allocation that is shorter than the driver says."""

    def read(target, pointer, size):
        if pointer + size > rig.driver.memory.ctypes.data + rig.driver.memory.nbytes:
            raise CudaError("cuMemcpyDtoH", 1, "CUDA_ERROR_INVALID_VALUE")
        ctypes.memmove(target, pointer, size)

    rig.driver.read = read
    rig.driver.range_of = lambda pointer: (pointer, 2 * rig.driver.memory.nbytes)
    rig.register(number=2, size_bytes=2 * BLOCKS * BLOCK, probe=rig.driver.memory[:64].tobytes())
    rig.register(number=3, blocks=BLOCKS // 2, size_bytes=BLOCKS * BLOCK)
    rig.run()
    answers = {said.registration: said.error for said in rig.said if isinstance(said, messages.Registered)}
    assert answers == {1: "", 2: "cuMemcpyDtoH: CUDA_ERROR_INVALID_VALUE (1)", 3: ""}
    assert not rig.driver.copies


def test_a_load_waits_for_a_piece_of_a_store_and_not_for_all_of_it(rig):
    rig.transfer(1, 8, to_device=False)

    def arrive():
        rig.driver.at_wait = lambda: None
        rig.transfer(2, 4, to_device=True, first=8)

    rig.driver.at_wait = arrive
    assert rig.run() == [messages.Done(2, ""), messages.Done(1, "")]
    assert rig.driver.copies == ["store", "load", "load", "store", "store", "store"]


def test_stores_get_a_share_while_loads_never_end(rig, monkeypatch):
    monkeypatch.setattr(copy_jobs, "LOADS_A_STORE", 2)
    rig.transfer(1, 8, to_device=True)
    rig.transfer(2, 4, to_device=False, first=8)
    rig.run()
    assert rig.driver.copies == ["load", "load", "store", "load", "load", "store"]


def test_a_session_whose_copies_do_not_end_holds_up_no_other_one(rig):
    rig.driver.stuck.add(11)  # the first stream that is made
    rig.transfer(1, 8, to_device=True, owner=1)
    rig.transfer(2, 8, to_device=True, owner=2)
    rig.transfer(3, 4, to_device=False, owner=2, first=8)
    rig.transfer(4, 2, to_device=True, owner=1, first=8)

    def look():
        rig.engine._lanes._lanes[1, True].since_s -= copy_jobs.PATIENCE_S  # time passes
        if sum(isinstance(message, messages.Done) for message in rig.said) == 2:
            rig.driver.stuck.clear()
            rig.driver.at_wait = lambda: None

    rig.driver.at_wait = look
    assert [done.transfer for done in rig.run()] == [2, 3, 1, 4]


def test_a_copy_that_does_not_end_in_time_ends_the_process(rig):
    rig.engine._stuck_max_s = 60.0
    rig.driver.stuck.add(11)
    rig.transfer(1, 2, to_device=True, owner=1)

    def look():
        rig.engine._lanes._lanes[1, True].since_s -= 61.0

    rig.driver.at_wait = look
    with pytest.raises(ContextLost, match="has not ended for 60 s"):
        rig.engine.run()
    assert not any(isinstance(message, messages.Done) for message in rig.said)


def test_no_more_than_the_limit_is_under_way_of_a_session(rig, monkeypatch):
    monkeypatch.setattr(copy_jobs, "LANE_BYTES", 4 * BLOCK)
    seen = []
    rig.driver.at_wait = lambda: seen.append({k: v.in_flight_bytes for k, v in rig.engine._lanes._lanes.items()})
    rig.transfer(1, 16, to_device=True, owner=1)
    rig.transfer(2, 16, to_device=True, owner=2)
    assert len(rig.run()) == 2
    assert seen[0] == {(1, True): 4 * BLOCK, (2, True): 4 * BLOCK}
    assert max(max(each.values()) for each in seen) == 4 * BLOCK


def test_a_transfer_that_is_cancelled_ends_with_the_pieces_that_are_under_way(rig):
    rig.transfer(1, 8, to_device=False)

    def cancel():
        rig.driver.at_wait = lambda: None
        rig.commands.put(messages.Cancel(1))
        rig.commands.put(messages.Cancel(77))
        assert messages.Done not in map(type, rig.said), "it is not answered while a piece is under way"

    rig.driver.at_wait = cancel
    assert rig.run() == [messages.Done(1, "cancelled")]
    assert rig.driver.copies == ["store"]
    rig.transfer(1, 2, to_device=False)
    rig.driver.at_wait = cancel
    del rig.said[1:]
    assert rig.run() == [messages.Done(1, "")], "all of it was under way"


def test_what_is_copied_of_a_transfer_is_told_piece_by_piece(rig):
    rig.transfer(1, 5, to_device=False, tells=messages.TELLS_BLOCKS)
    assert rig.run() == [*(messages.Copied(1, n) for n in (2, 4, 5)), messages.Done(1, "")]


def test_only_a_transfer_that_finds_its_lane_idle_begins_with_a_small_piece(rig, monkeypatch):
    monkeypatch.setattr(copy_jobs, "FIRST_PIECE_BYTES", BLOCK)
    monkeypatch.setattr(copy_jobs, "TOLD_PIECE_BYTES", 4 * BLOCK)
    monkeypatch.setattr(copy_jobs, "LANE_BYTES", 16 * BLOCK)
    rig.transfer(1, 5, to_device=False, tells=messages.TELLS_BLOCKS)
    rig.transfer(2, 5, to_device=False, tells=messages.TELLS_BLOCKS, first=8)
    rig.transfer(3, 3, to_device=False, tells=messages.TELLS_BLOCKS, owner=2)
    told = [message for message in rig.run() if isinstance(message, messages.Copied)]
    of = {number: [each.done for each in told if each.transfer == number] for number in (1, 2, 3)}
    assert of == {1: [1, 3, 5], 2: [4, 5], 3: [1, 3]}


def test_a_load_by_layers_brings_all_blocks_of_one_before_the_next(rig):
    rig.transfer(1, 4, to_device=True, cuts=[0, 1, 2], tells=messages.TELLS_LAYERS)
    first = []
    rig.driver.at_wait = lambda: first.append(rig.driver.memory.reshape(BLOCKS, 2, BLOCK // 2)[:4].any(axis=2).tolist())
    rig.driver.memory[:] = 7
    assert rig.run() == [messages.Copied(1, 1), messages.Copied(1, 2), messages.Done(1, "")]
    assert first[0] == [[False, True]] * 4, "one layer was copied, of every block"
    assert first[-1] == [[False, False]] * 4


def test_a_range_of_layers_leaves_the_others_alone(rig):
    rig.driver.memory[:] = 7
    rig.transfer(1, 4, to_device=True, cuts=[1, 2])
    assert rig.run() == [messages.Done(1, "")]
    assert rig.driver.memory.reshape(BLOCKS, 2, BLOCK // 2)[:4].any(axis=2).tolist() == [[True, False]] * 4
    rig.transfer(2, 4, to_device=True, cuts=[1, 3])
    assert "fragments [1, 3]" in rig.run()[-1].error


def test_segments_are_pinned_ahead_one_after_the_other_and_transfers_come_between(rig):
    pinned = []

    def pin(address, size):
        pinned.append(address)
        if len(pinned) == 1:  # while it lasts, two transfers come: of a segment that is not pinned, and of one that is
            rig.transfer(1, 2, to_device=True)
            rig.transfer(2, 2, to_device=True, segment=8)

    rig.driver.pin = pin
    for number in (8, 9):
        rig.commands.put((messages.Segment(number, BLOCKS * BLOCK), (os.dup(rig.segment),)))
    for number in (8, 7, 9):
        rig.commands.put(messages.Pin(number))
    said = rig.run()
    assert [each for each in said if isinstance(each, messages.Pinned)] == [messages.Pinned(n, "") for n in (8, 7, 9)]
    assert said[0] == messages.Pinned(8, "")
    assert {messages.Done(1, ""), messages.Done(2, "")} == set(said[1:3]), "before the others are pinned"
    assert len(set(pinned)) == len(pinned) == 3, "each once"
    told = [each.pinned_bytes for each in rig.said if isinstance(each, messages.Progress)]
    assert told == [BLOCKS * BLOCK * count for count in (1, 2, 3)]
    rig.commands.put(messages.DropSegment(9))
    rig.run()
    assert [each for each in rig.said if isinstance(each, messages.Progress)][-1].pinned_bytes == BLOCKS * BLOCK * 2


def test_nothing_is_pinned_ahead_while_copies_run(rig):
    rig.driver.pin = lambda address, size: rig.driver.calls.append("pin")
    rig.commands.put((messages.Segment(8, BLOCKS * BLOCK), (os.dup(rig.segment),)))
    rig.transfer(1, 8, to_device=False)
    rig.commands.put(messages.Pin(8))
    assert rig.run() == [messages.Done(1, ""), messages.Pinned(8, "")]
    calls = [call for call in rig.driver.calls if call in ("pin", "wait")]
    assert calls == ["pin", *["wait"] * 4, "pin"]


def test_a_segment_that_cannot_be_pinned_ahead_is_told(rig):
    rig.driver.fail["pin"] = 2
    for number in (7, 8):
        rig.commands.put(messages.Pin(number))
    assert rig.run() == [messages.Pinned(7, "pin: told to (2)"), messages.Pinned(8, "segment 8 is not mapped here")]
    rig.driver.fail.clear()
    rig.transfer(1, 2, to_device=True)
    assert rig.run()[-1] == messages.Done(1, ""), "whoever needs it tries again"


def test_memory_is_closed_and_segments_unmapped_when_nothing_uses_them(rig):
    rig.transfer(1, 8, to_device=False)
    rig.transfer(2, 2, to_device=False, first=8)

    def arrive():
        rig.driver.at_wait = lambda: None
        rig.commands.put(messages.DropSegment(7))
        rig.commands.put(messages.Unregister(1))

    rig.driver.at_wait = arrive
    answers = rig.run()
    assert answers[-2:] == [messages.Dropped(7), messages.Unregistered(1)]
    assert {(m.transfer, m.error) for m in answers[:-2]} == {(1, "unregistered"), (2, "unregistered")}
    assert rig.driver.copies == ["store"], "what waited was given up"
    assert rig.driver.calls.index("wait") < rig.driver.calls.index("unpin")
    assert rig.driver.calls.index("wait") < rig.driver.calls.index("close")


def test_one_allocation_of_two_registrations_is_opened_once_and_closed_with_the_last(rig):
    rig.register(2, BLOCKS - 1, offset=BLOCK, size_bytes=(BLOCKS - 1) * BLOCK)
    rig.register(3, BLOCKS, offset=BLOCK, size_bytes=(BLOCKS - 1) * BLOCK)
    rig.commands.put(messages.Unregister(1))
    rig.run()
    assert (rig.driver.calls.count("open"), rig.driver.calls.count("close")) == (1, 0)
    assert [bool(message.error) for message in rig.said[:3]] == [False, False, True], "its last block is not there"
    rig.commands.put(messages.Unregister(2))
    rig.commands.put(messages.Unregister(2))
    assert rig.run()[-2:] == [messages.Unregistered(2)] * 2, "also where there is nothing to close"
    assert rig.driver.calls.count("close") == 1


@pytest.mark.parametrize(
    ("number", "arguments", "why"),
    [
        (5, {"registration": 9}, "not registered"),
        (5, {"segment": 8}, "segment 8 is not mapped"),
        (5, {"first": BLOCKS - 1}, "past its segment"),
    ],
)
def test_a_transfer_that_makes_no_sense_copies_nothing(rig, number, arguments, why):
    rig.transfer(number, 2, to_device=False, **arguments)
    (done,) = rig.run()
    assert (done.transfer, why in done.error) == (number, True), done
    assert not rig.driver.copies


def test_an_error_of_one_submission_ends_that_transfer_only(rig):
    rig.driver.fail["copy"] = 1
    rig.transfer(1, 4, to_device=False)
    (done,) = rig.run()
    assert "told to (1)" in done.error
    assert rig.driver.calls.count("synchronize") == 1, "and its stream was waited for"
    rig.driver.fail.clear()
    rig.transfer(2, 4, to_device=False)
    assert rig.run()[-1] == messages.Done(2, "")


@pytest.mark.parametrize("call", ["happened", "close"])
def test_where_the_driver_does_not_say_that_it_is_over_the_process_must_end(rig, call):
    rig.driver.fail[call] = 700
    if call == "happened":
        rig.transfer(1, 4, to_device=False)
    else:
        rig.commands.put(messages.Unregister(1))
    with pytest.raises(ContextLost, match="told to"):
        rig.engine.run()
    assert not any(isinstance(message, (messages.Done, messages.Unregistered)) for message in rig.said)


def test_an_error_and_streams_that_do_not_answer_end_it_too(rig):
    rig.driver.fail |= {"copy": 1, "synchronize": 700}
    rig.transfer(1, 4, to_device=False)
    with pytest.raises(ContextLost):
        rig.engine.run()


def test_what_an_earlier_daemon_noted_is_ended_and_who_took_its_number_is_not(monkeypatch):
    monkeypatch.setattr("kvstored.device.processes.END_WAIT_S", 60.0)
    ours = subprocess.Popen(["sleep", "600"])
    other = subprocess.Popen(["sleep", "600"])
    text = noted([ours.pid])
    wrong = b"%d %d\n" % (other.pid, 1)
    assert end_noted(text + wrong + b"nonsense\n\n12\n0 0\n")
    assert ours.wait(60) == -9
    assert other.poll() is None
    other.kill()
    other.wait()
    assert end_noted(text), "again: it is gone"
