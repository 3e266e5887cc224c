"""One encrypted block, and the file of a data key."""

import ctypes
import os

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from kvstored.device.file import AlignedBuffer, FileDevice
from kvstored.errors import CorruptData
from kvstored.testing.faulty import FakeDevice
from kvstored.tiers.key_file import destroy_key, read_key, tenants_with_keys, unwrap, wrap, write_key
from kvstored.tiers.sealing import (
    ALGORITHMS,
    KEY_BYTES,
    TAG_BYTES,
    DataKey,
    Lock,
    _cipher,
    about,
    key_id,
    lock_of,
    open_into,
    seal_into,
)

ABOUT = about("t", b"d" * 16, b"h" * 32, b"c" * 16, 5000)
VOLUME, MASTER = b"v" * 16, b"m" * 32


class Memory:
    """Plain bytes, room for the ciphertext and its tag, and room for what comes back."""

    def __init__(self, data):
        self._buffer = AlignedBuffer(3 * 8192)
        self.plain, self.cipher, self.back = (self._buffer.address + i * 8192 for i in range(3))
        self.size = len(data)
        ctypes.memmove(self.plain, data, self.size)

    def seal(self, lock):
        return seal_into(lock, self.plain, self.size, self.cipher)

    def opened(self, lock):
        good = open_into(lock, self.cipher, self.size, self.back)
        return ctypes.string_at(self.back, self.size) if good else None

    def ciphertext(self):
        return ctypes.string_at(self.cipher, self.size)

    def flip(self, byte):
        ctypes.memset(self.cipher + byte, self.ciphertext()[byte] ^ 1, 1)


@pytest.fixture
def key():
    return DataKey.random()


@pytest.mark.parametrize("algorithm", ALGORITHMS.values())
def test_what_is_sealed_opens_again_and_looks_like_nothing(key, algorithm):
    data = bytes(5000)
    memory = Memory(data)
    seal = memory.seal(Lock(key, algorithm, ABOUT))
    assert key_id(seal) == key.id
    assert memory.ciphertext().count(0) < 100
    assert memory.opened(lock_of(key, seal, ABOUT)) == data


@pytest.mark.parametrize("algorithm", ALGORITHMS.values())
def test_the_bytes_are_those_of_the_standard_s_cipher(key, algorithm):
    """Another implementation of the derivation that the docstring of `sealing` states, and the library's plain call."""
    from hashlib import blake2b

    data = os.urandom(5000)
    memory = Memory(data)
    seal = memory.seal(Lock(key, algorithm, ABOUT))
    derived = blake2b(seal[:1] + seal[12:36], key=bytes(key.secret), digest_size=44, person=b"kvstored record")
    cipher = {1: AESGCM, 2: ChaCha20Poly1305}[algorithm](derived.digest()[:32])
    assert cipher.decrypt(derived.digest()[32:], memory.ciphertext() + seal[36:], ABOUT) == data


@pytest.mark.parametrize("byte", [0, 1, 2499, 4999])
def test_a_flip_in_the_ciphertext_is_noticed(key, byte):
    memory = Memory(os.urandom(5000))
    seal = memory.seal(Lock(key, 1, ABOUT))
    memory.flip(byte)
    assert memory.opened(lock_of(key, seal, ABOUT)) is None


@pytest.mark.parametrize("byte", [i for i in range(52) if i not in (1, 2, 3)])
def test_a_flip_in_the_seal_is_noticed(key, byte):
    memory = Memory(os.urandom(5000))
    seal = bytearray(memory.seal(Lock(key, 1, ABOUT)))
    seal[byte] ^= 1
    assert memory.opened(lock_of(key, bytes(seal), ABOUT)) is None


@pytest.mark.parametrize(
    "other",
    [
        about("u", b"d" * 16, b"h" * 32, b"c" * 16, 5000),
        about("t", b"e" * 16, b"h" * 32, b"c" * 16, 5000),
        about("t", b"d" * 16, b"i" * 32, b"c" * 16, 5000),
        about("t", b"d" * 16, b"h" * 32, b"d" * 16, 5000),
        about("t", b"d" * 16, b"h" * 32, b"c" * 16, 4999),
        about("th", b"d" * 16, b"h" * 31, b"c" * 16, 5000),
    ],
)
def test_a_record_that_is_said_to_be_another_does_not_open(key, other):
    memory = Memory(os.urandom(5000))
    seal = memory.seal(Lock(key, 1, ABOUT))
    assert memory.opened(lock_of(key, seal, other)) is None
    assert memory.opened(lock_of(DataKey(key.id, os.urandom(32)), seal, ABOUT)) is None


def test_no_pair_of_key_and_nonce_comes_twice_for_the_same_block_at_the_same_place(key):
    memory = Memory(b"a" * 100)
    lock = Lock(key, 1, ABOUT)
    seals = [memory.seal(lock) for _ in range(10_000)]
    salts = {seal[12:36] for seal in seals}
    assert len(salts) == 10_000
    pairs = set()
    for salt in salts:
        cipher_and_nonce = _pair(key, salt)
        pairs.add(cipher_and_nonce)
    assert len(pairs) == 10_000
    assert len({pair[:32] for pair in pairs}) == 10_000  # and no key either


def _pair(key, salt):
    """The record's key and nonce, by what the cipher is made with."""
    made = []

    def spy(algorithm, derived):
        made.append(derived)

    from kvstored.tiers import sealing

    before, sealing.aead = sealing.aead, spy
    try:
        _, nonce = _cipher(key, 1, salt)
    finally:
        sealing.aead = before
    return made[0] + nonce


def test_a_forgotten_key_opens_nothing(key):
    memory = Memory(os.urandom(5000))
    seal = memory.seal(Lock(key, 1, ABOUT))
    key.forget()
    assert bytes(key.secret) == bytes(KEY_BYTES)
    assert memory.opened(lock_of(key, seal, ABOUT)) is None


def test_the_tag_lies_behind_the_bytes_and_nothing_else_does(key):
    memory = Memory(b"x" * 4096)
    ctypes.memset(memory.cipher, 0x77, 8192)
    seal = memory.seal(Lock(key, 1, ABOUT))
    assert ctypes.string_at(memory.cipher + 4096, TAG_BYTES) == seal[36:]
    assert ctypes.string_at(memory.cipher + 4096 + TAG_BYTES, 100) == b"\x77" * 100


# --- the file of a data key ---


def written(tmp_path, key, master=MASTER, tenant="t"):
    write_key(FileDevice(), tmp_path, wrap(tenant, VOLUME, key, master))


def found(tmp_path, master=MASTER, volume=VOLUME, tenant="t"):
    wrapped = read_key(FileDevice(), tmp_path, tenant)
    return None if wrapped is None else unwrap(wrapped, volume, master)


def test_a_data_key_comes_back_with_its_master_key_only(tmp_path, key):
    written(tmp_path, key)
    back = found(tmp_path)
    assert (back.id, back.secret) == (key.id, key.secret)
    assert found(tmp_path, master=b"n" * 32) is None
    assert found(tmp_path, volume=b"w" * 16) is None
    assert tenants_with_keys(FileDevice(), tmp_path) == ["t"]
    assert bytes(key.secret) not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


@pytest.mark.parametrize("name", ["t.key", "t.key.copy"])
def test_one_damaged_or_lost_copy_is_made_good_from_the_other(tmp_path, key, name):
    written(tmp_path, key)
    whole = (tmp_path / name).read_bytes()
    for damage in (whole.replace(b'"key":"', b'"kez":"'), b"", bytes(4096), None):
        if damage is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_bytes(damage)
        assert found(tmp_path).secret == key.secret
        assert (tmp_path / name).read_bytes() == whole


def test_two_damaged_copies_are_an_error_and_not_a_key_to_be_made_anew(tmp_path, key):
    written(tmp_path, key)
    for name in ("t.key", "t.key.copy"):
        (tmp_path / name).write_bytes(b"x" * 4096)
    with pytest.raises(CorruptData, match="put them back from a backup"):
        found(tmp_path)


def test_a_key_whose_writing_did_not_end_was_never_used(tmp_path):
    (tmp_path / "t.key").write_bytes(b"{half")
    assert found(tmp_path) is None


def test_a_file_is_written_in_place_so_that_nothing_wrapped_before_is_left(tmp_path, key):
    written(tmp_path, key)
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    written(tmp_path, key, master=b"n" * 32)
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == before
    assert found(tmp_path) is None
    assert found(tmp_path, master=b"n" * 32).secret == key.secret


def test_destroying_overwrites_both_files_before_they_go(tmp_path, key):
    written(tmp_path, key)
    links = []
    for path in sorted(tmp_path.iterdir()):
        link = tmp_path.parent / f"held-{path.name}"
        link.hardlink_to(path)
        links.append(link)
    destroy_key(FileDevice(), tmp_path, "t")
    assert found(tmp_path) is None
    assert [link.read_bytes() for link in links] == [bytes(4096)] * 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kept", [0, 1])
def test_a_crash_while_a_key_is_destroyed_leaves_it_whole_or_gone(tmp_path, key, kept):
    written(tmp_path, key)
    (tmp_path / "t.key").write_bytes(bytes(4096))
    if not kept:
        (tmp_path / "t.key.copy").write_bytes(bytes(4096))
    assert (found(tmp_path) is not None) == bool(kept)


def test_a_fake_device_serves_too(tmp_path, key):
    device = FakeDevice()
    write_key(device, tmp_path, wrap("t", VOLUME, key, MASTER))
    assert read_key(device, tmp_path, "t") is not None
