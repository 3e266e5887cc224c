"""The device worker: a process of its own for one GPU, so that the daemon never loads the driver.

    python -m kvstored.device.worker FD UUID STUCK_S     FD: its end of a socket pair to the daemon

A thread talks to the driver (`copy_engine`), this one to the daemon; so the worker ends when
the daemon does, whatever the driver is doing. The daemon kills it where it does not answer.
"""

from __future__ import annotations

import array
import os
import socket
import sys
import threading
import traceback
from typing import Final

from kvstored_proto import frames

from kvstored.device import numa
from kvstored.device import worker_messages as messages
from kvstored.device.copy_engine import Command, ContextLost, CopyEngine
from kvstored.device.copy_methods import CopyMethods
from kvstored.device.cuda import CudaError, CudaUnavailable, Driver
from kvstored.device.doorbell import Inbox

RECEIVE_BYTES: Final = 1 << 20
EXIT_DAEMON_GONE: Final = 0
EXIT_CONTEXT_LOST: Final = 70
EXIT_USELESS: Final = 71
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(4 * frames.MAX_FDS_PER_FRAME)


class Link:
    """The worker's end of the connection. One thread receives, any may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = frames.FrameReader(messages.MESSAGE_BYTES_MAX)
        self._sending = threading.Lock()

    def send(self, message: messages.ToDaemon) -> None:
        """Send, waiting where the daemon is slow. A daemon that is gone is noticed by who receives."""
        frame = frames.encode(messages.OPERATION, 0, messages.encode(message))
        try:
            with self._sending:
                self._sock.sendall(frame)
        except OSError:
            pass

    def receive_into(self, commands: Inbox[Command]) -> None:
        """Hand on what comes, until the daemon is gone."""
        while True:
            data, ancillary, _, _ = self._sock.recvmsg(RECEIVE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
            if not data:
                return
            fds = array.array("i")
            for _, _, passed in ancillary:
                fds.frombytes(passed[: len(passed) - len(passed) % fds.itemsize])
            for frame in self._reader.feed(data, fds):
                message = messages.to_worker.decode(frame.body)
                if isinstance(message, (messages.Segment, messages.Chunks)):
                    commands.put((message, frame.fds))
                else:
                    commands.put(message)


def _open(link: Link, uuid: bytes) -> tuple[Driver, int, CopyMethods]:
    """The driver and the device's context. Says hello, and ends the process where there is no use in going on."""
    uuids: list[bytes] = []
    try:
        driver = Driver()
        uuids = driver.device_uuids()
        if uuid not in uuids:
            raise CudaUnavailable(f"no device with UUID {uuid.hex()} is visible to the daemon (CUDA_VISIBLE_DEVICES?)")
        ordinal = uuids.index(uuid)
        numa.run_on(_node_of(driver, ordinal))
        context = driver.context(ordinal)
        driver.bind(context)
        name, methods = driver.device_name(ordinal), CopyMethods(driver, ordinal)
    except (CudaUnavailable, CudaError) as error:
        link.send(messages.Hello(str(error), uuids))
        os._exit(EXIT_USELESS)
    link.send(messages.Hello("", uuids, name, driver.version, methods.said()))
    return driver, context, methods


def _node_of(driver: Driver, ordinal: int) -> int:
    """The memory node next to the GPU: as the driver says, else as the kernel says of its PCI device."""
    node = driver.numa_node(ordinal)
    return node if node >= 0 else numa.node_of_pci(driver.pci_address(ordinal))


def main(fd: int, uuid: bytes, stuck_max_s: float) -> None:
    """Serve until the daemon is gone or the context is lost; does not return."""
    link = Link(socket.socket(fileno=fd))
    commands: Inbox[Command] = Inbox()

    def copy() -> None:
        try:
            driver, context, methods = _open(link, uuid)
            CopyEngine(driver, context, commands, link.send, stuck_max_s, methods).run()
        except (ContextLost, CudaError) as error:
            print(f"device worker: {error}", file=sys.stderr, flush=True)
        except Exception:
            traceback.print_exc()
        os._exit(EXIT_CONTEXT_LOST)  # at once: the driver's own tear-down could hang

    threading.Thread(target=copy, name="copies", daemon=True).start()
    try:
        link.receive_into(commands)
    except OSError:
        pass
    finally:
        os._exit(EXIT_DAEMON_GONE)


if __name__ == "__main__":
    main(int(sys.argv[1]), bytes.fromhex(sys.argv[2]), float(sys.argv[3]))
