"""The session page, without I/O: memory through which a client ends leases without a system call.

Nobody waits for a release, but as a frame it is a system call that wakes the daemon, and its sender
pays for that. So it is written down where the daemon looks anyway. Each session that asks for it
(feature `session_page`) has one page of 4 KiB, mapped writable by both sides, in the byte order of
the machine:

    offset 0     u32 version | u32 ring length n, in words
    offset 8     u64 head: how many words the client ever posted
    offset 16    u64 tail: how many of them the daemon has taken
    offset 24    u64 x n: the ring; word number i, from 0, lies at i % n
    offset 2048  u64 x 256: word w, from 1, holds the id of the transfer that ended last of those that named it; or, for
                 a load that tells its layers, (id mod 2^24) << 40 | blocks << 16 | layers: so many leading layers of so
                 many leading blocks are in place

    word := lease id << 1 | lap      lap: 1 in the first round of the ring, 0 in the second, 1 in the third ...

Every store is one of 8 aligned bytes: first words, then head. Another CPU may see them in another
order; a word with the lap of the round before is one that has not become visible yet. Where the
ring has no room the client sends RELEASE frames.

The client may write anything here at any time. The daemon keeps a tail of its own and believes
nothing but lease ids, and those only where the session's group has such a lease.

The words of transfers are written by the daemon: a load or store names one, and its id stands there
when no copy of it runs any more. Its reply, which follows, says what came of it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

FEATURE: Final = "session_page"
PAGE_BYTES: Final = 4096
VERSION: Final = 1

_HEADER: Final = struct.Struct("=II")
_HEAD, _TAIL, _RING = 1, 2, 3  # in words
_RING_END_BYTES: Final = 2048
RING_WORDS: Final = _RING_END_BYTES // 8 - _RING
TRANSFER_WORDS: Final = (PAGE_BYTES - _RING_END_BYTES) // 8
_BLOCKS_MASK: Final = (1 << 24) - 1
_LAYERS_MASK: Final = (1 << 16) - 1
_COUNT_MASK: Final = (1 << 64) - 1


def say_ended(memory: memoryview, word: int, transfer_id: int) -> None:
    """The daemon's: note in a word, from 1, that a transfer is over. One aligned store of 8 bytes."""
    assert 0 < word < TRANSFER_WORDS, "word 0 is nobody's"
    with memory.cast("Q") as words:
        words[_RING_END_BYTES // 8 + word] = transfer_id


def ended(memory: memoryview, word: int) -> int:
    """The client's: the id of the transfer that ended last of those that named the word; 0: none."""
    with memory.cast("Q") as words:
        return words[_RING_END_BYTES // 8 + word]


def say_layers(memory: memoryview, word: int, transfer_id: int, blocks: int, layers: int) -> None:
    """The daemon's: note that these layers of these blocks of a load are in place. One aligned store of 8 bytes."""
    assert 0 < word < TRANSFER_WORDS, "word 0 is nobody's"
    assert blocks <= _BLOCKS_MASK, "a call has fewer"
    assert layers <= _LAYERS_MASK, "a memory has fewer"
    with memory.cast("Q") as words:
        words[_RING_END_BYTES // 8 + word] = _told(transfer_id) | blocks << 16 | layers


def layers(memory: memoryview, word: int, transfer_id: int) -> tuple[int, int]:
    """The client's: how many leading blocks a load brings, and how many layers of all of them are in place."""
    with memory.cast("Q") as words:
        value = words[_RING_END_BYTES // 8 + word]
    if value & ~((1 << 40) - 1) != _told(transfer_id):
        return 0, 0
    return value >> 16 & _BLOCKS_MASK, value & _LAYERS_MASK


def _told(transfer_id: int) -> int:
    return (transfer_id & _BLOCKS_MASK) << 40


class Poster:
    """The client's half. For one thread at a time."""

    def __init__(self, memory: memoryview) -> None:
        """`memory` is the whole page. Raises ValueError for a layout that is not known here."""
        version, length = _HEADER.unpack_from(memory)
        if version != VERSION or not 0 < length <= RING_WORDS:
            raise ValueError(f"a session page of version {version} with a ring of {length} words is not known here")
        self._length: int = length
        self._words = memory.cast("Q")

    def post(self, lease_ids: Sequence[int]) -> bool:
        """Write down that these leases end. False: there is no room for all of them, and none was posted."""
        words, length = self._words, self._length
        head = words[_HEAD]
        if not 0 <= head - words[_TAIL] <= length - len(lease_ids):
            return False
        for number, lease_id in enumerate(lease_ids, head):
            words[_RING + number % length] = lease_id << 1 | _lap(number, length)
        words[_HEAD] = head + len(lease_ids)
        return True


class Taker:
    """The daemon's half. The other side may be hostile."""

    def __init__(self, memory: memoryview, length: int = RING_WORDS) -> None:
        """`memory` is the whole page, all zeros: this lays it out."""
        assert 0 < length <= RING_WORDS, "what follows the ring is reserved"
        _HEADER.pack_into(memory, 0, VERSION, length)
        self._length = length
        self._words = memory.cast("Q")
        self._tail = 0  # the page's is the client's to write

    def take(self, most: int = RING_WORDS) -> list[int] | None:
        """The lease ids posted since, in order, `most` of them at most; the next call goes on.

        None: head makes no sense, and what was posted is passed over.
        """
        words, length, tail = self._words, self._length, self._tail
        head = words[_HEAD]
        waiting = (head - tail) & _COUNT_MASK
        if waiting > length:
            self._tail = words[_TAIL] = head
            return None
        taken: list[int] = []
        for number in range(tail, tail + min(waiting, most)):
            word = words[_RING + number % length]
            if word & 1 != _lap(number, length):
                break  # on its way: the next call finds it
            taken.append(word >> 1)
        if taken:
            self._tail = words[_TAIL] = (tail + len(taken)) & _COUNT_MASK
        return taken

    def close(self) -> None:
        """Let go of the memory, before it is unmapped."""
        self._words.release()


def _lap(number: int, length: int) -> int:
    return 1 - (number // length & 1)
