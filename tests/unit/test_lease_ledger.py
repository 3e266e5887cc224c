import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstored.device.memory import Mapping
from kvstored.errors import CorruptData
from kvstored.tiers.lease_ledger import LeaseLedger, NotedSession
from tests.watched import Watched

SIZE = 64 << 10
KEY, DIGEST = b"k" * 16, b"d" * 16
SESSION = NotedSession(b"s" * 16, b"c" * 16, KEY, b"", "acme", 17, 4711, 1000)


@pytest.fixture
def ledger():
    made = LeaseLedger(SIZE)
    yield made
    made.close()


def reopened(data):
    copy = Mapping(len(data), name="copy")
    os.pwrite(copy.fd, data, 0)
    fd = os.dup(copy.fd)
    copy.close()
    return LeaseLedger.adopt(fd)


def noted(data):
    found = reopened(data)
    sessions, leases = found.noted()
    found.close()
    return [session for _, session in sessions], {lease.lease_id: lease.slots() for lease in leases}


def test_the_next_process_reads_who_leased_what(ledger):
    ledger.note_session(SESSION)
    place = ledger.note_lease(5, KEY, DIGEST, [(100, 3), (7, 1)])
    found = reopened(bytes(ledger._table))
    sessions, (lease,) = found.noted()
    assert [session for _, session in sessions] == [SESSION]
    assert (lease.place, lease.lease_id, lease.group_key, lease.digest) == (place, 5, KEY, DIGEST)
    assert lease.slots() == [100, 101, 102, 7]
    found.close()


def test_what_has_ended_is_not_there_and_its_place_is_used_again_after_a_restart_too(ledger):
    first = ledger.note_lease(1, KEY, DIGEST, [(1, 1)])
    ledger.note_lease(2, KEY, DIGEST, [(2, 1)])
    ledger.void(first)
    assert noted(bytes(ledger._table))[1] == {2: [2]}
    found = reopened(bytes(ledger._table))
    assert found.note_lease(3, KEY, DIGEST, [(3, 1)]) == first
    assert ledger.note_lease(3, KEY, DIGEST, [(3, 1)]) == first
    found.close()


def test_a_full_ledger_says_so_and_has_room_again_when_a_lease_ends():
    ledger = LeaseLedger(4096)
    places = []
    while place := ledger.note_lease(len(places) + 1, KEY, DIGEST, [(1, 1)]):
        places.append(place)
    assert len(places) == (4096 - 64) // 128
    ledger.void(places[3])
    assert ledger.note_lease(99, KEY, DIGEST, [(1, 1)]) == places[3]
    assert ledger.note_lease(99, KEY, DIGEST, [(1, 1)]) == 0
    ledger.close()


def test_after_freezing_what_ends_stays_noted(ledger):
    place = ledger.note_lease(1, KEY, DIGEST, [(1, 1)])
    ledger.freeze()
    ledger.void(place)
    assert noted(bytes(ledger._table))[1] == {1: [1]}


def test_another_format_is_refused(ledger):
    struct.pack_into("=I", ledger._table, 8, 99)
    with pytest.raises(CorruptData, match="format 99, this daemon reads 1"):
        reopened(bytes(ledger._table))


@pytest.mark.parametrize("word", [0, 12, 1 << 40, SIZE])
def test_a_chunk_of_an_impossible_size_never_leads_astray(ledger, word):
    ledger.note_lease(1, KEY, DIGEST, [(1, 1)])
    ledger._words[8] = word
    data = bytes(ledger._table)
    if word:
        with pytest.raises(CorruptData, match="impossible size"):
            reopened(data)
    else:
        assert noted(data) == ([], {})


def test_nonsense_is_passed_over(ledger):
    places = [ledger.note_lease(number, KEY, DIGEST, [(1, 1)]) for number in (1, 2, 3)]
    ledger._words[places[0] // 8 + 1] = 1 << 32 | 4000  # more runs than the chunk has room for
    ledger._words[places[1] // 8 + 9] = 1 << 50  # so many slots
    ledger._words[places[2] // 8 + 1] = 2 << 32 | 8  # a session whose text is none
    assert noted(bytes(ledger._table)) == ([], {})


class Chunk:
    """The struct of a chunk's head, as a store that shows."""

    def __init__(self, inner):
        self.inner = inner

    def pack_into(self, table, at, *values):
        data = self.inner.pack(*values)
        table[at : at + len(data)] = data


STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=8)


@settings(max_examples=20, deadline=None)
@given(STEPS)
def test_a_kill_between_any_two_stores_leaves_every_lease_right_or_not_there(steps):
    ledger = LeaseLedger(8192)
    pictures, held, places = [], {}, {}
    table, words = ledger._table, ledger._words
    ledger._table, ledger._words = Watched(table, table, pictures, 24), Watched(words, table, pictures, 24)
    with pytest.MonkeyPatch.context() as patch:
        from kvstored.tiers import lease_ledger

        patch.setattr(lease_ledger, "_CHUNK", Chunk(lease_ledger._CHUNK))
        for number, (which, runs) in enumerate(steps, 1):
            before = dict(held)
            if which in places:
                ledger.void(places.pop(which))
                del held[next(i for i in held if i % 10 == which)]
            else:
                lease_id = 10 * number + which
                wanted = [(1000 * number + 10 * run, 2) for run in range(runs)]
                places[which] = ledger.note_lease(lease_id, KEY, DIGEST, wanted)
                held[lease_id] = [slot for first, _ in wanted for slot in (first, first + 1)]
            patch.undo()
            for picture in pictures:
                assert noted(picture)[1] in (before, held)
            pictures.clear()
            patch.setattr(lease_ledger, "_CHUNK", Chunk(lease_ledger._CHUNK))
    ledger.close()
