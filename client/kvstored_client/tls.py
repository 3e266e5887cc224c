"""How a client over TCP knows its daemon, and is known by it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstored_client.errors import Unavailable

if TYPE_CHECKING:
    import grpc

CA_VARIABLE: Final = "KVSTORED_TLS_CA"
CERTIFICATE_VARIABLE: Final = "KVSTORED_TLS_CERTIFICATE"
KEY_VARIABLE: Final = "KVSTORED_TLS_KEY"
File = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM, read at each connect, so that what is renewed needs no restart of an engine.

    Args:
        ca: of the authority that signed the daemon's certificate; None: as KVSTORED_TLS_CA says, else the system's.
        certificate: the client's own, by which a daemon with `server.tls_client_ca` knows its tenant; None: as
            KVSTORED_TLS_CERTIFICATE says, else none is shown.
        key: of that certificate; None: as KVSTORED_TLS_KEY says.

    Raises ValueError for a certificate without key, a key without certificate, and a path that is empty; TypeError for
    what is no path, such as the bytes of a certificate.
    """

    ca: File | None = None
    certificate: File | None = None
    key: File | None = None

    def __post_init__(self) -> None:
        for name in ("ca", "certificate", "key"):
            path = getattr(self, name)
            if path is None:
                continue
            if not isinstance(path, (str, os.PathLike)):
                raise TypeError(f"{name} is a {type(path).__name__}: it must be the path of a file")
            if not os.fspath(path):
                raise ValueError(f"{name} is an empty path: leave it out, or name a file")
        if (self.certificate is None) != (self.key is None):
            raise ValueError("a certificate of a client needs its key, and a key its certificate")

    def credentials(self) -> grpc.ChannelCredentials:
        """For a channel. Raises Unavailable for files that cannot be read."""
        import grpc

        own = [self.certificate, self.key]
        if own == [None, None]:
            own = [os.environ.get(CERTIFICATE_VARIABLE), os.environ.get(KEY_VARIABLE)]
        certificate, key = (_read(path) for path in own)
        if (certificate is None) != (key is None):
            raise Unavailable(f"{CERTIFICATE_VARIABLE} needs {KEY_VARIABLE}, and that needs it")
        return grpc.ssl_channel_credentials(_read(self.ca or os.environ.get(CA_VARIABLE)), key, certificate)


def _read(path: File | None) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: no path, as one with a zero byte
        raise Unavailable(f"reading {path!s} for TLS: {getattr(error, 'strerror', None) or error}") from None
