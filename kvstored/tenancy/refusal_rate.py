"""How often refusals go on record: a budget for each peer, and one for all of them together."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from kvstored.clock import Clock

PEERS_MAX: Final = 1024
BURST: Final = 10
REFILL_PER_S: Final = 0.1
BURST_ALL: Final = 200
REFILL_ALL_PER_S: Final = 2.0


class _Budget:
    """Tokens that come back with time."""

    def __init__(self, burst: int, per_s: float, now: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._left, self._at_s = float(burst), now
        self.held_back = 0

    def refill(self, now: float) -> bool:
        """Whether there is one to take."""
        self._left = min(self._burst, self._left + (now - self._at_s) * self._per_s)
        self._at_s = now
        return self._left >= 1

    def take(self) -> int:
        """Take one; how many were held back since the last."""
        self._left -= 1
        held_back, self.held_back = self.held_back, 0
        return held_back


class RefusalRate:
    """Ten at once for a peer, then one in ten seconds; 200 and two a second for all, however many they are."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._all = _Budget(BURST_ALL, REFILL_ALL_PER_S, clock.monotonic())
        self._peers: OrderedDict[str, _Budget] = OrderedDict()

    def admit(self, peer: str) -> int | None:
        """How many refusals of this peer were held back before this one; None: hold this back too."""
        now = self._clock.monotonic()
        budget = self._peers.get(peer)
        if budget is None:
            budget = self._peers[peer] = _Budget(BURST, REFILL_PER_S, now)
            if len(self._peers) > PEERS_MAX:
                self._peers.popitem(last=False)
        self._peers.move_to_end(peer)
        own, common = budget.refill(now), self._all.refill(now)
        if not (own and common):
            budget.held_back += 1
            return None
        self._all.take()
        return budget.take()
