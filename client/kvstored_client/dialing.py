"""Addresses of a daemon, and the socket to it."""

from __future__ import annotations

import os
import socket
from typing import Final

from kvstored_client.errors import Unavailable
from kvstored_client.tls import Tls

DEFAULT_ADDRESS: Final = "unix:/run/kvstored/session.sock"
ADDRESS_VARIABLE: Final = "KVSTORED_ADDRESS"
REMOTE: Final = "grpc:"
SOCKET_BUFFER_BYTES: Final = 1 << 20


def target_of(address: str | None) -> str:
    """PATH of `unix:PATH`, or `grpc:TARGET` as it is; None: of KVSTORED_ADDRESS, or the default.

    Raises ValueError, or TypeError for what is no text.
    """
    wanted = address or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
    if not isinstance(wanted, str):
        raise TypeError(f"address is a {type(wanted).__name__}: it must be text, as unix:PATH")
    scheme, _, rest = wanted.partition(":")
    if scheme == "grpc" and rest:
        return wanted
    if scheme != "unix" or not rest:
        raise ValueError(f"address {wanted!r}: it must be unix:PATH, the daemon's session socket, or grpc:HOST:PORT")
    return rest


def check_tls(target: str, tls: Tls | None) -> Tls:
    """The same, or what the environment says. Raises ValueError where there is no TLS to be had, TypeError for none."""
    if tls is not None and not isinstance(tls, Tls):
        raise TypeError(f"tls is a {type(tls).__name__}: it must be a Tls")
    if tls is not None and (not target.startswith(REMOTE) or target.startswith(f"{REMOTE}unix:")):
        raise ValueError(f"tls is for an address grpc:HOST:PORT, not for {target}")
    return tls or Tls()


class Carrier:
    """What carries a session without shared memory."""

    why = ""  # it ended


def why_closed(carrier: Carrier | None) -> str:
    """For a connection that was closed at its other end."""
    return (carrier.why if carrier is not None else "") or "the daemon closed the connection"


def dial(target: str, tls: Tls) -> tuple[socket.socket, Carrier | None]:
    """Connect, without waiting; and what carries the session where it has no shared memory. Raises Unavailable."""
    if target.startswith(REMOTE):
        # They import gRPC. Both now, and not in the midst of a call, when perhaps no file can be opened.
        from kvstored_client import inline  # noqa: F401
        from kvstored_client.bridge import Bridge

        bridge = Bridge(target.removeprefix(REMOTE), tls)
        return bridge.ours, bridge
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise Unavailable(f"connecting to {target}: {error.strerror or error}") from None
    try:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        sock.connect(target)
    except OSError as error:
        sock.close()
        raise Unavailable(f"connecting to {target}: {error.strerror or error}") from None
    return sock, None
