"""Where master keys come from: a file, a program, or the service manager's credentials. Read when needed, not kept.

What is read is one key a line: 64 hex digits or base64 of 32 bytes; the first is the present one, others are
earlier ones that it is to replace. Empty lines and those that begin with # are passed over. A file of exactly
32 bytes that are no text is a key as it is.
"""

from __future__ import annotations

import base64
import binascii
import os
import select
import signal
import stat
import string
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvstored.config.tenants import Tenant
from kvstored.errors import FailedPrecondition

KEY_BYTES: Final = 32
KEYS_MAX: Final = 8
SOURCE_BYTES_MAX: Final = 16 << 10
CREDENTIALS: Final = "CREDENTIALS_DIRECTORY"
_PRINTABLE: Final = frozenset(string.printable.encode())


class KeyUnavailable(FailedPrecondition):
    """A master key cannot be had; says why and what to do."""


def has_source(tenant: Tenant) -> bool:
    """Whether the tenant's settings say where its key is."""
    return bool(tenant.key_file or tenant.key_command or tenant.key_credential)


def read_masters(tenant: Tenant) -> list[bytes]:
    """The tenant's master keys, the present one first. Blocks; raises KeyUnavailable."""
    if tenant.key_file is not None:
        return parse_keys(_read(tenant.key_file), f"key_file {tenant.key_file}")
    if tenant.key_credential is not None:
        return parse_keys(_read(_credential(tenant.key_credential)), f"credential {tenant.key_credential}")
    if tenant.key_command:
        what = f"key_command {tenant.key_command[0]}"
        return parse_keys(_output(tenant.key_command, tenant.key_timeout_s, what), what)
    raise KeyUnavailable("no key is configured: set key_file, key_command or key_credential of the tenant")


def parse_keys(data: bytes, what: str) -> list[bytes]:
    """The keys in what was read; raises KeyUnavailable, which never says what was there."""
    if len(data) == KEY_BYTES and not _PRINTABLE.issuperset(data):
        return [data]
    lines = [line.strip() for line in data.splitlines()]
    keys = [_key(line) for line in lines if line and not line.startswith(b"#")]
    whole = [key for key in keys if key is not None]
    if not keys or len(whole) < len(keys) or len(keys) > KEYS_MAX:
        raise KeyUnavailable(
            f"{what} must hold a key of 256 bits a line, {KEYS_MAX} at most, as 64 hex digits or base64: "
            "`openssl rand -hex 32` makes one"
        )
    return whole


def _key(line: bytes) -> bytes | None:
    try:
        key = bytes.fromhex(line.decode()) if len(line) == 2 * KEY_BYTES else base64.b64decode(line, validate=True)
    except (ValueError, binascii.Error):
        return None
    return key if len(key) == KEY_BYTES else None


def _credential(name: str) -> Path:
    directory = os.environ.get(CREDENTIALS)
    if not directory:
        raise KeyUnavailable(
            f"credential {name}: the service manager gave none (${CREDENTIALS} is not set): "
            f"add LoadCredential={name}:/path to the unit"
        )
    return Path(directory) / name


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise KeyUnavailable(f"{path} is no regular file: what comes from a program is a key_command")
            return file.read(SOURCE_BYTES_MAX)
    except OSError as error:
        raise KeyUnavailable(f"{path} cannot be read: {error.strerror}") from error


def _open_at_once(path: str, flags: int) -> int:
    """A pipe without a writer is not waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def _output(command: Sequence[str], timeout_s: float, what: str) -> bytes:
    """What a program prints. It has the daemon's standard error, so that what it says is in the same log."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
        )
    except OSError as error:
        raise KeyUnavailable(f"{what} cannot be run: {error.strerror}") from error
    try:
        data = _until_end(process, time.monotonic() + timeout_s)
    except TimeoutError:
        raise KeyUnavailable(f"{what} did not end within key_timeout_s ({timeout_s:g} s)") from None
    finally:
        _end(process)
    if process.returncode:
        raise KeyUnavailable(f"{what} ended with exit status {process.returncode}: see the log for what it said")
    return data


def _until_end(process: subprocess.Popen[bytes], end_s: float) -> bytes:
    """All of its output, as far as it may be long; raises TimeoutError."""
    assert process.stdout is not None, "it has a pipe"
    data = b""
    while len(data) <= SOURCE_BYTES_MAX:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, end_s - time.monotonic()))
        if not ready:
            raise TimeoutError
        piece = os.read(process.stdout.fileno(), SOURCE_BYTES_MAX)
        if not piece:
            break
        data += piece
    try:
        process.wait(max(0.0, end_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    return data


def _end(process: subprocess.Popen[bytes]) -> None:
    """Whatever it started goes with it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
