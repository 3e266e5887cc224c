"""How much of a tier a tenant may use."""

from __future__ import annotations

import msgspec


class Quota(msgspec.Struct, frozen=True):
    """One tenant's share of one tier. `limit_bytes` is hard; None is no limit of its own.

    A guaranteed share and a weight belong here too: callers ask only what there is room for
    and what is in excess, and do not see why.
    """

    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.limit_bytes is not None and self.limit_bytes < 0:
            raise ValueError(f"limit_bytes is {self.limit_bytes}: it must be 0 or more, or unset for no limit")

    def room(self, used_bytes: int, wanted_bytes: int) -> int:
        """How many of the wanted bytes the tenant may take when it uses `used_bytes` already."""
        if self.limit_bytes is None:
            return wanted_bytes
        return max(0, min(wanted_bytes, self.limit_bytes - used_bytes))

    def excess(self, used_bytes: int) -> int:
        """Bytes over the limit: what must go first, as after a limit was lowered."""
        return 0 if self.limit_bytes is None else max(0, used_bytes - self.limit_bytes)
