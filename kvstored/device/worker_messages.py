"""What the daemon and a device worker say to one another: MessagePack in the frames of the session socket.

Descriptors of tier memory ride beside a `Segment`, of an engine's beside `Chunks`. Every other
request has one answer, and an answer to a `Transfer` means that nothing of it touches memory any
more, on either side. The end of the connection means the same once the process is reaped.
"""

from __future__ import annotations

from typing import Final

import msgspec

OPERATION: Final = 1  # of every frame: the message says itself what it is
MESSAGE_BYTES_MAX: Final = 64 << 20


TELLS_NOTHING: Final = 0
TELLS_BLOCKS: Final = 1  # how many leading blocks are copied
TELLS_LAYERS: Final = 2  # how many leading layers of all blocks are copied: they go layer by layer


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Part of an engine's allocation on the device, or of its chunks one after the other."""

    handle: bytes  # for cuIpcOpenMemHandle; empty: in the chunks
    offset: int
    size_bytes: int
    probe: bytes = b""  # what its owner reads at its start: the proof that it is the memory that is meant
    probe_end: bytes = b""  # and at its end: the proof that all of it is there


class Segment(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Memory of the DRAM tier; its descriptor comes along."""

    segment_id: int
    size_bytes: int


class DropSegment(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Unmap it; nothing uses it. Answered by `Dropped`."""

    segment_id: int


class Register(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Open an engine's memory. Answered by `Registered`."""

    registration: int
    regions: list[Region]
    fragments: list[tuple[int, int, int, int]]
    blocks: int
    chunk_bytes: list[int] = []  # of memory by chunks, whose descriptors came with `Chunks`: the size of each


class Unregister(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Let what runs end, give up what waits, close the memory. Answered by `Unregistered`."""

    registration: int


class Transfer(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Copy stored blocks to an engine's or back. Answered by `Done`; before it, `Copied` where it `tells`."""

    transfer: int
    registration: int
    to_device: bool
    ids: bytes  # uint32, as many for each stored block
    segments: bytes  # uint64: where each stored block lies: the segment, and
    offsets: bytes  # uint64: the offset in it
    owner: int = 0  # transfers of different owners do not wait for one another
    cuts: list[int] = []  # of the fragments: layer i has those from cuts[i] to cuts[i + 1]; empty: all of them
    tells: int = TELLS_NOTHING


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Submit nothing more of a transfer; its `Done` comes when what is under way has ended."""

    transfer: int


class Pin(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Pin a segment when there is nothing else to do. Answered by `Pinned`."""

    segment_id: int


class Chunks(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Descriptors of some of the chunks that the next `Register` of this number names come along; without answer."""

    registration: int


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """The first that a worker says. `error`: why it is of no use; it ends then."""

    error: str
    uuids: list[bytes]  # of all devices that it may use
    device: str = ""
    driver: int = 0
    method: str = ""  # batch or loop: how it submits copies


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """The segment is not mapped here any more."""

    segment_id: int


class Registered(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """The memory is open; or `error`, and nothing of it is."""

    registration: int
    error: str


class Unregistered(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """Nothing of it is open here any more."""

    registration: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """A transfer is over: all of it was copied, or `error`."""

    transfer: int
    error: str


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=25):
    """Said when more is pinned, and now and then while a long transfer runs: the worker does not hang."""

    pinned_bytes: int


class Copied(msgspec.Struct, frozen=True, array_like=True, tag=26):
    """So much of a transfer is copied: see `Transfer.tells`."""

    transfer: int
    done: int


class Pinned(msgspec.Struct, frozen=True, array_like=True, tag=27):
    """The segment is pinned; or `error`, and it is not."""

    segment_id: int
    error: str


ToWorker = Segment | DropSegment | Register | Unregister | Transfer | Chunks | Cancel | Pin
ToDaemon = Hello | Dropped | Registered | Unregistered | Done | Progress | Copied | Pinned

to_worker: Final = msgspec.msgpack.Decoder(ToWorker)
to_daemon: Final = msgspec.msgpack.Decoder(ToDaemon)
encode: Final = msgspec.msgpack.encode
