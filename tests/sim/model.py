"""What the store may answer, and what it must.

Each put of a block has a version of its own, and its bytes tell tenant, namespace, key and version. A
reader may get any version whose commit has begun, until a delete was answered that began after that commit had
ended, or until its end. What was acknowledged as durable is owed until it is deleted or evicted, or ends, or until
the device spoils it. A key is tenant, namespace (in whatever epoch) and hash; ends are wall-clock times.
"""

import itertools
import zlib
from collections import Counter
from math import inf

TAG_BYTES = 12  # at the beginning of each page of a payload


class Violation(Exception):
    """An invariant does not hold."""


class Model:
    def __init__(self):
        self._numbers = itertools.count(1)
        self._tags = {}  # of every payload ever made: key, version, payload
        self._possible = {}  # key -> versions that a reader may get
        self._settled = {}  # key -> versions whose commit was answered
        self._over = set()  # versions whose commit was answered, whatever became of them
        self._clock = itertools.count(1)
        self._gone_at = {}  # key -> when it was last deleted or evicted from NVMe
        self._purging = Counter()  # tenants: what they put meanwhile may go, too
        self._bumping = set()  # (tenant, namespace): the same, until the bump, or the process, has ended
        self._ends = {}  # version -> its end, of a sliding one without uses; and how far each use moves it
        self._used_s = {}  # key -> its last use that may have counted
        self._first_end_s = {}  # key -> the earliest end of what was stored since it was last deleted
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

    def begins(self, key, version, end_s=inf, sliding_s=0.0):
        if end_s < inf:
            self._ends[version] = (end_s, sliding_s)
        self._possible.setdefault(key, set()).add(version)

    def answered(self, key, version, *, hit):
        self._over.add(version)
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
            self._first_end_s.pop(key, None)

    def bump_begins(self, tenant, digest):
        """What must not be seen any more once a namespace is in its next epoch."""
        self._bumping.add((tenant, digest))
        return self.delete_begins([key for key in self._possible if key[:2] == (tenant, digest)])

    def bump_ends(self, tenant, digest):
        self._bumping.discard((tenant, digest))
        for key in self._possible:
            if key[:2] == (tenant, digest):
                self.gone(key)

    def process_ended(self):
        """With it ends what it was doing."""
        for tenant, digest in list(self._bumping):
            self.bump_ends(tenant, digest)

    def all_gone(self):
        """All may be missing from here on."""
        for key in self._possible:
            self.gone(key)

    def is_bumped(self, key):
        """Whether it may or may not be seen, for its namespace may be in its next epoch or not."""
        return key[:2] in self._bumping

    def purge_begins(self, tenant):
        """What must not be seen any more once the purge is complete."""
        self._purging[tenant] += 1
        return self.delete_begins([key for key in self._possible if key[0] == tenant])

    def bytes_before(self, tenant, digest=b""):
        """Tags of all whose put is over: of a tenant, or of one namespace."""
        ours = {tag: key for tag, (key, version, _) in self._tags.items() if key[0] == tenant and version in self._over}
        return {tag for tag, key in ours.items() if digest in (b"", key[1])}

    def purge_ends(self, tenant):
        self._purging[tenant] -= 1
        for key in self._possible:
            if key[0] == tenant:
                self.gone(key)

    # ---- gets ----

    def check(self, key, data):
        """Raises Violation where these are not the bytes of the key."""
        found = self._tags.get(data[:TAG_BYTES])
        if found is None or data != found[2]:
            what = "of no block" if found is None else f"like version {found[1]} of {found[0]}, but not all of them"
            raise Violation(f"wrong bytes: {key} has bytes {what}")
        if found[0] != key:
            raise Violation(f"wrong bytes: {key} has the bytes of {found[0]}")
        if found[1] not in self._possible.get(key, ()):
            raise Violation(f"wrong bytes: {key} has version {found[1]}, which was deleted or never committed")
        self.hits += 1
        self.hit_bytes += len(data)

    def check_end(self, key, data, now_s):
        """Raises Violation where what is given to a reader now has ended."""
        version = self._tags[data[:TAG_BYTES]][1]
        if self._end_s(key, version) <= now_s:
            raise Violation(f"{key} was given to a reader {now_s - self._end_s(key, version)} s after its end")

    def _end_s(self, key, version):
        end_s, sliding_s = self._ends.get(version, (inf, 0.0))
        return max(end_s, self._used_s.get(key, 0.0) + sliding_s) if sliding_s else end_s

    def prolonged(self, keys, end_s):
        """What of them ends may end as late as that."""
        for key in keys:
            for version in self._possible.get(key, set()) & self._ends.keys():
                end, sliding_s = self._ends[version]
                self._ends[version] = max(end, end_s), sliding_s

    def used(self, keys, now_s):
        """They may have been used just now."""
        self._used_s.update(dict.fromkeys(keys, now_s))

    def may_be_there(self, key, began, began_s):
        """Raises Violation where the key is said to be there, by a call that began then, and cannot be."""
        if self.went(key, began):
            return  # it was there when it was looked at
        possible = self._possible.get(key, ())
        if not possible:
            raise Violation(f"{key} is said to be there: it was never put, or was deleted")
        if all(self._end_s(key, version) <= began_s for version in possible):
            raise Violation(f"{key} is said to be there: it has ended")

    # ---- durability ----

    def now(self):
        return next(self._clock)

    def stored(self, key, began, end_s=inf):
        """A store that began then was acknowledged, of a block with that end."""
        self._first_end_s[key] = min(end_s, self._first_end_s.get(key, inf))
        if self._purging[key[0]] or self.is_bumped(key):
            self.gone(key)
        elif self._gone_at.get(key, 0) < began:
            self.owed[key] = None

    def is_owed(self, key, now_s):
        """Whether it must be there now."""
        return key in self.owed and self._first_end_s.get(key, inf) > now_s

    def gone(self, key):
        """It was deleted, evicted, or dropped for a good reason."""
        self._gone_at[key] = self.now()
        self.owed.pop(key, None)

    def went(self, key, since):
        """Whether it was deleted, evicted or dropped since then."""
        return self._gone_at.get(key, 0) > since

    def must_be_owed(self, key, began):
        """A put that began then was answered as durable."""
        if key not in self.owed and self._gone_at.get(key, 0) < began:
            raise Violation(f"{key} was acknowledged as durable before it was")
