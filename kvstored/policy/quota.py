"""How much of a tier each tenant may use, and who gives up room for whom.

What counts: in DRAM the bytes of the slots that a tenant's blocks take (sizes rounded up to 4 KiB), whether
committed, reserved or on their way up; on NVMe those of its records, live or being written, rounded alike.
Pure: who uses how much is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec


class Quota(msgspec.Struct, frozen=True):
    """One tenant's part of one tier.

    `limit_bytes` is hard; None is no limit of its own. What it has within `guaranteed_bytes` nobody else takes.
    `weight` is its part of what is guaranteed to nobody, relative to the other tenants' weights.
    """

    limit_bytes: int | None = None
    guaranteed_bytes: int = 0
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.limit_bytes is not None and self.limit_bytes < 0:
            raise ValueError(f"limit_bytes is {self.limit_bytes}: it must be 0 or more, or unset for no limit")
        if self.guaranteed_bytes < 0 or self.weight < 0:
            raise ValueError("guaranteed_bytes and weight must be 0 or more")
        if self.limit_bytes is not None and self.guaranteed_bytes > self.limit_bytes:
            raise ValueError(f"guaranteed_bytes ({self.guaranteed_bytes}) must not exceed limit_bytes")

    def room(self, used_bytes: int, wanted_bytes: int) -> int:
        """How many of the wanted bytes the tenant may take when it uses `used_bytes` already."""
        if self.limit_bytes is None:
            return wanted_bytes
        return max(0, min(wanted_bytes, self.limit_bytes - used_bytes))

    def excess(self, used_bytes: int) -> int:
        """Bytes over the limit: what must go first, as after a limit was lowered."""
        return 0 if self.limit_bytes is None else max(0, used_bytes - self.limit_bytes)

    def spare(self, used_bytes: int) -> int:
        """Bytes over the guarantee: what others may take at most."""
        return max(0, used_bytes - self.guaranteed_bytes)


UNKNOWN: Final = Quota(weight=0.0)  # of a tenant that is configured no more: all it has is above its share


class Loser(NamedTuple):
    """A tenant that may have to give up room, and how many bytes of it at most."""

    tenant: str
    bytes: int


class Allotments:
    """The quotas of all tenants in one tier. `change` replaces them at run time."""

    def __init__(self, capacity_bytes: int, quotas: Mapping[str, Quota] | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self._quotas: dict[str, Quota] = {}
        self._shares: dict[str, int] = {}
        self.guarded = False
        """Whether any tenant has a guarantee."""
        self.guaranteed_bytes = 0
        self.change(quotas or {})

    def change(self, quotas: Mapping[str, Quota]) -> None:
        """These hold from here on; who is not among them has no guarantee and no share."""
        self._quotas = dict(quotas)
        self.guaranteed_bytes = sum(quota.guaranteed_bytes for quota in quotas.values())
        self.guarded = self.guaranteed_bytes > 0
        rest = max(0, self.capacity_bytes - self.guaranteed_bytes)
        weights = sum(quota.weight for quota in quotas.values())
        self._shares = {name: _share(quota, rest, weights) for name, quota in quotas.items()}

    def of(self, tenant: str) -> Quota:
        """A tenant's quota."""
        return self._quotas.get(tenant, UNKNOWN)

    def share_bytes(self, tenant: str) -> int:
        """What is guaranteed to it and its part, by weight, of what is guaranteed to nobody; no more than its limit."""
        return self._shares.get(tenant, 0)

    def room(self, tenant: str, used_bytes: int, wanted_bytes: int) -> int:
        """How many of the wanted bytes a tenant may take: see `Quota.room`."""
        quota = self._quotas.get(tenant)
        return wanted_bytes if quota is None else quota.room(used_bytes, wanted_bytes)

    def excess(self, tenant: str, used_bytes: int) -> int:
        """Bytes over a tenant's limit: see `Quota.excess`."""
        return self.of(tenant).excess(used_bytes)

    def spare(self, tenant: str, used_bytes: int) -> int:
        """Bytes over a tenant's guarantee: see `Quota.spare`."""
        return self.of(tenant).spare(used_bytes)

    def guarantees(self) -> list[int]:
        """Of all tenants, in bytes."""
        return [quota.guaranteed_bytes for quota in self._quotas.values()]

    def guaranteed(self, tenant: str) -> int:
        """A tenant's guarantee in bytes."""
        return self.of(tenant).guaranteed_bytes

    def entitled(self, tenant: str, used_bytes: int, wanted_bytes: int) -> bool:
        """Whether so much more is within the tenant's guarantee: then others have to make room."""
        return self.guarded and 0 < used_bytes + wanted_bytes <= self.of(tenant).guaranteed_bytes

    def losers(self, asker: str, used_bytes: Mapping[str, int], wanted_bytes: int) -> list[Loser]:
        """Who else has to make room for the asker, the one most above its share first, and what it may lose at most.

        To one that stays within its guarantee all who are above theirs, down to it; to one that stays within its
        share those above theirs, down to it; to others nobody: they pay themselves.
        """
        used = used_bytes.get(asker, 0)
        if self.entitled(asker, used, wanted_bytes):
            found = [Loser(name, self.of(name).spare(used_bytes[name])) for name in used_bytes if name != asker]
        elif used + wanted_bytes <= self.share_bytes(asker):
            found = [Loser(name, used_bytes[name] - self.share_bytes(name)) for name in used_bytes if name != asker]
        else:
            return []
        above = self._above(used_bytes)
        return sorted((one for one in found if one.bytes > 0), key=lambda one: (-above[one.tenant], one.tenant))

    def thin_out(self, used_bytes: Mapping[str, int]) -> dict[str, int]:
        """Who may lose blocks before anybody asks for room, and how many bytes: all above their share, down to it.

        Where nobody is, all above their guarantee.
        """
        above = {name: over for name, over in self._above(used_bytes).items() if over > 0}
        return above or {name: spare for name, used in used_bytes.items() if (spare := self.of(name).spare(used)) > 0}

    def held_max_bytes(self, tenant: str, held_bytes: Mapping[str, int], reserve_bytes: int) -> int:
        """What a tenant may hold in place, given what each holds, so that every guarantee can still be met.

        Up to its own guarantee always; beyond it all tenants together no more than what is guaranteed to nobody,
        less the reserve.
        """
        rest = max(0, self.capacity_bytes - self.guaranteed_bytes - reserve_bytes)
        rest -= sum(self.of(name).spare(held) for name, held in held_bytes.items() if name != tenant)
        return self.of(tenant).guaranteed_bytes + max(0, rest)

    def _above(self, used_bytes: Mapping[str, int]) -> dict[str, int]:
        return {name: used - self.share_bytes(name) for name, used in used_bytes.items()}


def _share(quota: Quota, rest_bytes: int, weights: float) -> int:
    share = quota.guaranteed_bytes + (int(rest_bytes * (quota.weight / weights)) if weights else 0)
    return share if quota.limit_bytes is None else min(share, quota.limit_bytes)


def reserve_bytes(guarantees: Iterable[int], unit_bytes: int) -> int:
    """What of a tier must be guaranteed to nobody, so that all guarantees can be met in whole segments or extents.

    One unit for each tenant with a guarantee, whose last one is filled in part or holds a second size of blocks,
    and one that is on its way from one tenant to another.
    """
    return (sum(guarantee > 0 for guarantee in guarantees) + 1) * unit_bytes


def check_guarantees(tier: str, guarantees: Mapping[str, int], capacity_bytes: int, unit_bytes: int) -> None:
    """Raises ValueError where a tier cannot keep what is guaranteed in it (bytes per tenant)."""
    total = sum(guarantees.values())
    reserve = reserve_bytes(guarantees.values(), unit_bytes)
    if total and total + reserve > capacity_bytes:
        raise ValueError(
            f"tenants: {tier}_guaranteed_bytes are {total} in all; with a reserve of {reserve} (a piece of "
            f"{unit_bytes} for each tenant that has a guarantee, and one more) that is over the {capacity_bytes} "
            f"of {tier}: guarantee less, or raise {tier}.capacity_bytes"
        )
