"""What the store may answer, and what it must.

Each put of a block has a version of its own, and its bytes tell tenant, namespace, key and version. A
reader may get any version whose commit has begun, until a delete was answered that began after that commit had
ended. What was acknowledged as durable is owed until it is deleted or evicted, or until the device spoils it.
"""

import itertools
import zlib


class Violation(Exception):
    """An invariant does not hold."""


class Model:
    def __init__(self):
        self._numbers = itertools.count(1)
        self._tags = {}  # of every payload ever made: key, version, payload
        self._possible = {}  # key -> versions that a reader may get
        self._settled = {}  # key -> versions whose commit was answered
        self._clock = itertools.count(1)
        self._gone_at = {}  # key -> when it was last deleted or evicted from NVMe
        self.owed = {}  # key -> None: acknowledged as durable
        self.hits = 0
        self.hit_bytes = 0

    # ---- puts ----

    def payload(self, key, size):
        """Bytes for a put of this key, and their version."""
        version = next(self._numbers)
        tag = version.to_bytes(8, "big") + zlib.crc32(repr(key).encode()).to_bytes(4, "big")
        pages = range(-(-size // 4096))
        data = b"".join([(tag + page.to_bytes(4, "big")) * 256 for page in pages])[:size]
        self._tags[tag] = (key, version, data)
        return version, data

    def begins(self, key, version):
        self._possible.setdefault(key, set()).add(version)

    def answered(self, key, version, *, hit):
        if hit:
            self._settled.setdefault(key, set()).add(version)
        else:
            self._possible[key].discard(version)

    # ---- deletes ----

    def delete_begins(self, keys):
        """What must not be seen any more once the delete is answered."""
        for key in keys:
            self.gone(key)
        return {key: set(self._settled.get(key, ())) for key in keys}

    def deleted(self, forbidden):
        for key, versions in forbidden.items():
            self.gone(key)
            self._possible.get(key, set()).difference_update(versions)
            self._settled.get(key, set()).difference_update(versions)

    # ---- gets ----

    def check(self, key, data):
        """Raises Violation where these are not the bytes of the key."""
        found = self._tags.get(data[:12])
        if found is None or data != found[2]:
            what = "of no block" if found is None else f"like version {found[1]} of {found[0]}, but not all of them"
            raise Violation(f"wrong bytes: {key} has bytes {what}")
        if found[0] != key:
            raise Violation(f"wrong bytes: {key} has the bytes of {found[0]}")
        if found[1] not in self._possible.get(key, ()):
            raise Violation(f"wrong bytes: {key} has version {found[1]}, which was deleted or never committed")
        self.hits += 1
        self.hit_bytes += len(data)

    def may_be_there(self, key, began):
        """Raises Violation where the key is said to be there, by a call that began then, and cannot be."""
        if not self._possible.get(key) and self._gone_at.get(key, 0) < began:
            raise Violation(f"{key} is said to be there: it was never put, or was deleted")

    # ---- durability ----

    def now(self):
        return next(self._clock)

    def stored(self, key, began):
        """A store that began then was acknowledged."""
        if self._gone_at.get(key, 0) < began:
            self.owed[key] = None

    def gone(self, key):
        """It was deleted, evicted, or dropped for a good reason."""
        self._gone_at[key] = self.now()
        self.owed.pop(key, None)

    def must_be_owed(self, key, began):
        """A put that began then was answered as durable."""
        if key not in self.owed and self._gone_at.get(key, 0) < began:
            raise Violation(f"{key} was acknowledged as durable before it was")
