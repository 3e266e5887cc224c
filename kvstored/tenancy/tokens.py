"""Bearer tokens: made here, shown once, known afterwards by a salted hash.

A token is `kvs_ID_SECRET`: the id finds its record, the secret is 256 random bits. Plain SHA-256 is enough
for those: nobody can try 2**256 of them, and a slow hash is for secrets that people think of. The salt keeps
two daemons' files from telling that a token is the same.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import Final

import msgspec

PREFIX: Final = "kvs"
ID_BYTES: Final = 8
SECRET_BYTES: Final = 32
SALT_BYTES: Final = 16
_FORM: Final = re.compile(rf"{PREFIX}_([0-9a-f]{{{2 * ID_BYTES}}})_[A-Za-z0-9_-]{{43}}")
_SHOWN: Final = re.compile(rf"({PREFIX}_[0-9a-f]{{{2 * ID_BYTES}}})_[A-Za-z0-9_-]+")
_NO_SALT: Final = bytes(SALT_BYTES)
_NO_DIGEST: Final = bytes(32)


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is kept of one token. Times are seconds since 1970.

    Defaults are left out of the file: versions that know of no rotations read it while nothing is rotated.
    """

    token_id: str
    tenant: str
    salt: bytes
    digest: bytes
    created_s: float
    expires_s: float = 0.0  # 0: never
    label: str = ""
    rotated_to: str = ""  # the id of the token in its place
    unrotated_expires_s: float = 0.0  # of one that was rotated: what `expires_s` was before that

    @property
    def lifetime_end_s(self) -> float:
        """When it would end (0: never) if nobody had rotated it."""
        return self.unrotated_expires_s if self.rotated_to else self.expires_s

    def expired(self, wall_s: float) -> bool:
        """Whether its time is over."""
        return 0 < self.expires_s <= wall_s


def make_token(tenant: str, now_s: float, *, expires_s: float = 0.0, label: str = "") -> tuple[Token, str]:
    """A record to keep, and the token itself, which nobody can tell again."""
    token_id, salt = secrets.token_hex(ID_BYTES), secrets.token_bytes(SALT_BYTES)
    text = f"{PREFIX}_{token_id}_{secrets.token_urlsafe(SECRET_BYTES)}"
    return Token(token_id, tenant, salt, _digest(salt, text), now_s, expires_s, label), text


def id_of(text: str) -> str:
    """The id in a token of this form; empty where it has another."""
    match = _FORM.fullmatch(text)
    return match[1] if match else ""


def without_secrets(text: str) -> str:
    """The same text for a record that others read: of a token in it, which somebody put in a wrong place, its id."""
    return _SHOWN.sub(r"\1_...", text)


def matches(known: Token | None, text: str) -> bool:
    """Whether this is that token; takes as long where there is no such record."""
    salt, digest = (known.salt, known.digest) if known is not None else (_NO_SALT, _NO_DIGEST)
    return hmac.compare_digest(digest, _digest(salt, text)) and known is not None


def _digest(salt: bytes, text: str) -> bytes:
    return hashlib.sha256(salt + text.encode()).digest()
