"""Epochs: which of a model's blocks count. A bump makes all that was stored before it unreachable, at once.

Blocks are stored under a digest that is derived from their namespace's and from the number of its epoch.
So no block is touched by a bump, none has to be looked at again, and neither an index made anew nor
memory taken over brings back what was bumped: its keys are nobody's any more. The number is the time of
the bump in microseconds, so that none is ever given out twice, whatever became of the last daemon's.

A bump is of a tenant's model, or of one version of it: a rule each. A namespace's number is the highest of
the rules that are about it. `past` are numbers whose blocks may still take up room; `done` are those that
do not, unless an index was made anew from what is left of them.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, NamedTuple, Self

import msgspec

from kvstored.errors import CorruptData, LimitExceeded
from kvstored.keys import Namespace

FORMAT_VERSION: Final = 1
RULES_PER_TENANT_MAX: Final = 1024
PAST_MAX: Final = 64  # of one rule: the space of still older ones comes back with their extents
ALL_VERSIONS: Final = ""
_MAGIC: Final = b"KVSTEPOC"
_CRC_BYTES: Final = 4


class About(NamedTuple):
    """What a rule is about; no version: all of them."""

    tenant: str
    model: str
    version: str = ALL_VERSIONS


class Rule(msgspec.Struct):
    """One model's epoch, or one version's."""

    number: int
    past: list[int]
    done: list[int] = []


class Content(msgspec.Struct):
    """What is written down; whoever reads it passes over fields that it does not know."""

    format: int
    floor: int
    rules: list[tuple[str, str, str, int, list[int], list[int]]]


class EpochTable:
    """All rules. Plain state."""

    def __init__(self) -> None:
        self.rules: dict[About, Rule] = {}
        self.floor = 0  # of every namespace: set where it was lost which epoch it is

    # ---- asking ----

    def number_of(self, namespace: Namespace) -> int:
        """The epoch of a namespace; 0: its model was never bumped."""
        return max([self.floor, *(rule.number for _, rule in self._matching(namespace))])

    def digest_of(self, namespace: Namespace) -> bytes:
        """Under which digest its blocks are stored at present."""
        return (
            stored_digest(namespace.digest, self.number_of(namespace)) if self.floor or self.rules else namespace.digest
        )

    def past_digests(self, namespace: Namespace, about: About | None = None) -> list[bytes]:
        """Under which its blocks were stored in epochs whose space may not be back yet (those of one rule)."""
        matching = self._matching(namespace)
        numbers = {number for key, rule in matching if about in (None, key) for number in rule.past}
        return [stored_digest(namespace.digest, number) for number in sorted(numbers - {self.number_of(namespace)})]

    def stale_digests(self, namespace: Namespace) -> set[bytes]:
        """Under which blocks of it may be found in old footers, though they are of past epochs."""
        numbers = {n for _, rule in self._matching(namespace) for n in (rule.number, *rule.past, *rule.done)}
        return {stored_digest(namespace.digest, number) for number in numbers} - {self.digest_of(namespace)}

    def _matching(self, namespace: Namespace) -> list[tuple[About, Rule]]:
        model, version = namespace.fields.get("model", ""), namespace.fields.get("model_version", "")
        abouts = dict.fromkeys((About(namespace.tenant, model), About(namespace.tenant, model, version)))
        return [(about, rule) for about in abouts if (rule := self.rules.get(about)) is not None]

    @property
    def last_number(self) -> int:
        """The highest that was ever given out, as far as is known here."""
        return max([self.floor, *(rule.number for rule in self.rules.values())])

    # ---- changing ----

    def bump(self, about: About, wall_s: float) -> int:
        """Begin the next epoch; returns its number. Raises LimitExceeded."""
        number = max(int(wall_s * 1e6), self.last_number + 1)
        known = sum(key.tenant == about.tenant for key in self.rules)
        if about not in self.rules and known >= RULES_PER_TENANT_MAX:
            raise LimitExceeded(
                f"{RULES_PER_TENANT_MAX} epochs of single model versions are noted: bump a whole model, "
                "without --model-version, which takes the place of all of its versions"
            )
        covered = [key for key in self.rules if _covers(about, key)]
        past = {number for key in covered for number in (self.rules[key].number, *self.rules[key].past)}
        above = self.rules.get(About(about.tenant, about.model))
        past.add(above.number if above is not None else 0)
        done = {number for key in covered for number in self.rules[key].done}
        for key in covered:
            del self.rules[key]
        self.rules[about] = Rule(number, _last(past | {self.floor}), _last(done))
        return number

    def settle(self, about: About, numbers: set[int]) -> bool:
        """The space of these past epochs is back; whether anything changed."""
        rule = self.rules.get(about)
        if rule is None or not numbers.intersection(rule.past):
            return False
        rule.done = _last({*rule.done, *numbers.intersection(rule.past)})
        rule.past = [number for number in rule.past if number not in numbers]
        return True

    def merge(self, other: EpochTable) -> bool:
        """Take over what is newer in another table; whether any namespace may have another epoch now."""
        before = self.last_number, dict(self.rules), self.floor
        self.floor = max(self.floor, other.floor)
        for about, theirs in other.rules.items():
            ours = self.rules.get(about)
            if ours is None or theirs.number > ours.number:
                past = {*theirs.past, *((ours.number, *ours.past) if ours is not None else ())}
                done = {*theirs.done, *(ours.done if ours is not None else ())}
                self.rules[about] = Rule(theirs.number, _last(past), _last(done))
        for about in list(self.rules):  # a version's, of before its whole model's
            whole = self.rules.get(About(about.tenant, about.model))
            if about.version and whole is not None and whole.number > self.rules[about].number:
                whole.past = _last({*whole.past, self.rules[about].number, *self.rules[about].past})
                whole.done = _last({*whole.done, *self.rules[about].done})
                del self.rules[about]
        return before != (self.last_number, self.rules, self.floor)

    # ---- as bytes ----

    def pack(self) -> bytes:
        """As it is kept, with a CRC."""
        rules = [
            (*about, rule.number, rule.past, rule.done)
            for about, rule in sorted(self.rules.items(), key=lambda r: r[0])
        ]
        body = _MAGIC + msgspec.msgpack.encode(Content(FORMAT_VERSION, self.floor, rules))
        return body + zlib.crc32(body).to_bytes(_CRC_BYTES, "little")

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """What `pack` gave; raises CorruptData."""
        body, crc = data[:-_CRC_BYTES], data[-_CRC_BYTES:]
        if not body.startswith(_MAGIC) or zlib.crc32(body).to_bytes(_CRC_BYTES, "little") != crc:
            raise CorruptData("the epochs are damaged")
        try:
            content = msgspec.msgpack.decode(body[len(_MAGIC) :], type=Content)
        except msgspec.MsgspecError as error:
            raise CorruptData(f"the epochs make no sense: {error}") from error
        if content.format > FORMAT_VERSION:
            raise CorruptData(f"epochs of format {content.format}, this daemon reads up to {FORMAT_VERSION}")
        made = cls()
        made.floor = content.floor
        made.rules = {About(*names): Rule(number, past, done) for *names, number, past, done in content.rules}
        return made

    def copy(self) -> EpochTable:
        """The same, to be changed by itself."""
        return EpochTable.unpack(self.pack())

    def __iter__(self) -> Iterator[tuple[About, Rule]]:
        return iter(sorted(self.rules.items(), key=lambda item: item[0]))


class Epochs:
    """The table that counts, and the one that is to be on every device, which may be ahead of it by a bump."""

    def __init__(self) -> None:
        self.now = EpochTable()
        self.wanted = EpochTable()
        # Set by the store: memory that is kept is to know of these; and namespaces may have other epochs than before.
        self.remember: Callable[[bytes], Awaitable[None]] = _keep_nothing
        self.on_changed: Callable[[], None] = lambda: None

    def found(self, table: EpochTable) -> None:
        """Take over what a device, or memory, has from an earlier time."""
        self.wanted.merge(table)
        if self.now.merge(table):
            self.on_changed()

    async def learn(self, table: EpochTable) -> None:
        """The same of a device that may come while blocks are stored: the next daemon, too, is to find those again."""
        self.wanted.merge(table)
        await self.remember(self.wanted.pack())
        self.found(table)

    def after_loss(self, wall_s: float) -> EpochTable:
        """A device had epochs and does not know which: what is stored anywhere is of a past one."""
        table = EpochTable()
        table.floor = max(int(wall_s * 1e6), self.wanted.last_number + 1)
        return table


async def _keep_nothing(_packed: bytes) -> None:
    """Nobody keeps memory."""


def stored_digest(digest: bytes, number: int) -> bytes:
    """The digest under which a namespace's blocks are stored in an epoch; in the first one, its own."""
    if not number:
        return digest
    return hashlib.blake2b(
        digest + number.to_bytes(8, "big"), digest_size=len(digest), person=b"kvstored-epoch"
    ).digest()


def _last(numbers: set[int]) -> list[int]:
    return sorted(numbers)[-PAST_MAX:]


def _covers(about: About, other: About) -> bool:
    same = (about.tenant, about.model) == (other.tenant, other.model)
    return same and about.version in (ALL_VERSIONS, other.version)
