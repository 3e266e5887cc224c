"""Encryption of one block at rest: AES-256-GCM or ChaCha20-Poly1305, by the package `cryptography`.

Each record has a key and a nonce of its own, derived by keyed BLAKE2b from the tenant's data key and
a random salt of 24 bytes. So no pair of key and nonce ever comes twice, whatever repeats itself in a
place on the device: an extent that is recycled, an offset that is written again after a crash, an
index put back from a copy. (Two equal salts among 2^48 records: 2^-97.) Nothing has to be counted or
kept, and the limit of 2^32 messages of GCM under random nonces does not apply.

A seal is what reading takes besides the data key; it stands in the index and the footer, 52 bytes:

    algorithm (1), zeros (3), id of the data key (8), salt (24), tag (16)

The tag also covers what the record is said to be: tenant, namespace, key, content hash, size. Bytes
of another record, or of another tenant's, are refused under this one's name.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvstored.device import memory
from kvstored.errors import ConfigError
from kvstored.tiers.formats import SEAL_BYTES

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

ALGORITHMS: Final = {"aes-256-gcm": 1, "chacha20-poly1305": 2}
KEY_BYTES: Final = 32
KEY_ID_BYTES: Final = 8
TAG_BYTES: Final = 16
_NONCE_BYTES: Final = 12
_SALT_BYTES: Final = 24
_SEAL: Final = struct.Struct(f"<B3x{KEY_ID_BYTES}s{_SALT_BYTES}s{TAG_BYTES}s")
_PERSON: Final = b"kvstored record"
_ABOUT: Final = struct.Struct("<BBBI16s16s")
assert _SEAL.size == SEAL_BYTES, "the room that records and headers have"


class DataKey:
    """The secret that the blocks of one tenant on one volume are encrypted with. `id` is no secret."""

    __slots__ = ("id", "secret")

    def __init__(self, id_: bytes, secret: bytes) -> None:
        assert len(id_) == KEY_ID_BYTES, "an id of its own"
        assert len(secret) == KEY_BYTES, "256 bits"
        self.id = id_
        self.secret = bytearray(secret)

    @classmethod
    def random(cls) -> DataKey:
        """One that nobody has had."""
        return cls(os.urandom(KEY_ID_BYTES), os.urandom(KEY_BYTES))

    def forget(self) -> None:
        """Overwrite the secret: what was encrypted with it cannot be read with this object any more."""
        self.secret[:] = bytes(KEY_BYTES)


class Lock(NamedTuple):
    """How one block is to be encrypted (with an empty seal) or was; `about` is what its tag covers besides."""

    key: DataKey
    algorithm: int
    about: bytes
    seal: bytes = b""


def installed() -> bool:
    """Whether a version of `cryptography` that can do this is there."""
    if importlib.util.find_spec("cryptography") is None:
        return False
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return hasattr(AESGCM, "encrypt_into")


def aead(algorithm: int, key: bytes) -> AESGCM | ChaCha20Poly1305:
    """The cipher; raises ConfigError where the package is missing."""
    try:
        from cryptography.hazmat.primitives.ciphers import aead as ciphers
    except ImportError:
        raise ConfigError("encryption needs the package cryptography: pip install 'kvstored[encryption]'") from None
    return ciphers.AESGCM(key) if algorithm == ALGORITHMS["aes-256-gcm"] else ciphers.ChaCha20Poly1305(key)


def about(tenant: str, digest: bytes, hash_: bytes, content_hash: bytes, size_bytes: int) -> bytes:
    """What a record is said to be."""
    name = tenant.encode()
    return _ABOUT.pack(1, len(name), len(hash_), size_bytes, digest, content_hash) + name + hash_


def key_id(seal: bytes) -> bytes:
    """Which data key a seal was made with."""
    return seal[4 : 4 + KEY_ID_BYTES]


def lock_of(key: DataKey, seal: bytes, about_: bytes) -> Lock:
    """How a record is read that has this seal."""
    return Lock(key, seal[0], about_, seal)


def seal_into(lock: Lock, source: int, size_bytes: int, target: int) -> bytes:
    """Encrypt bytes at one address to another, which has room for `TAG_BYTES` more; returns the seal.

    The GIL is released while it does so. Source and target must not overlap.
    """
    salt = os.urandom(_SALT_BYTES)
    cipher, nonce = _cipher(lock.key, lock.algorithm, salt)
    out = memory.view(target, size_bytes + TAG_BYTES, writable=True)
    cipher.encrypt_into(nonce, memory.view(source, size_bytes), lock.about, out)
    return _SEAL.pack(lock.algorithm, lock.key.id, salt, bytes(out[size_bytes:]))


def open_into(lock: Lock, source: int, size_bytes: int, target: int) -> bool:
    """Decrypt bytes at one address to another; overwrites `TAG_BYTES` behind the source. False: they are not right.

    The GIL is released while it does so. What is at the target is of no use where this is False.
    """
    from cryptography.exceptions import InvalidTag

    algorithm, id_, salt, tag = _SEAL.unpack(lock.seal)
    if id_ != lock.key.id or algorithm not in ALGORITHMS.values():
        return False
    cipher, nonce = _cipher(lock.key, algorithm, salt)
    ctypes.memmove(source + size_bytes, tag, TAG_BYTES)
    out = memory.view(target, size_bytes, writable=True)
    try:
        cipher.decrypt_into(nonce, memory.view(source, size_bytes + TAG_BYTES), lock.about, out)
    except InvalidTag:
        return False
    return True


def _cipher(key: DataKey, algorithm: int, salt: bytes) -> tuple[Any, bytes]:
    """The cipher and the nonce of one record."""
    made = hashlib.blake2b(
        bytes([algorithm]) + salt, key=key.secret, digest_size=KEY_BYTES + _NONCE_BYTES, person=_PERSON
    ).digest()
    return aead(algorithm, made[:KEY_BYTES]), made[KEY_BYTES:]
