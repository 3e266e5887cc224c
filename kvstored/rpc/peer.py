"""What the kernel tells of the other end of a Unix socket: who it is, and what it sent."""

from __future__ import annotations

import array
import socket
import struct
from typing import Final

from kvstored_proto import frames

_PEERCRED: Final = struct.Struct("3i")
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(4 * frames.MAX_FDS_PER_FRAME)
_FLAGS: Final = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)  # to put flags together takes as long as a call


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel says."""
    pid, uid, _gid = _PEERCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
    return pid, uid


def received(sock: socket.socket, buffer: bytearray) -> tuple[int, array.array[int]]:
    """Bytes that came into the buffer, 0 at the end, and descriptors beside them.

    Raises BlockingIOError, InterruptedError.
    """
    fds = array.array("i")
    try:
        size, ancillary, _flags, _ = sock.recvmsg_into([buffer], _ANCILLARY_BYTES, _FLAGS)
    except (BlockingIOError, InterruptedError):
        raise
    except OSError:
        return 0, fds
    for _level, _type, data in ancillary:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return size, fds
