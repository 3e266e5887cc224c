"""Sessions whose credential means nothing any more, or something else, end: at once, whoever changed it.

A tenant that was removed, an identity or a role that was taken from it, a token that was revoked or has
expired. The client may come back with what it has; what it gets then is what holds now.
"""

from __future__ import annotations

import asyncio
from typing import Final

from kvstored.catalog.leases import Session
from kvstored.rpc.context import Context
from kvstored.store.release_times import Cause

LOOK_EVERY_S: Final = 30.0  # at the latest: the wall clock, by which tokens expire, may be set


class Standing:
    """Watches tenants and the clock from `start` to `stop`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._timer: asyncio.TimerHandle | None = None
        self._running = False
        context.store.parts.tenants.watch(self._changed)

    def start(self) -> None:
        """From now on sessions end with their credential."""
        self._running = True
        self._look_again()

    def stop(self) -> None:
        """The daemon parts with everybody itself."""
        self._running = False
        if self._timer is not None:
            self._timer.cancel()

    def _changed(self, name: str) -> None:
        self._end([session for session in self._context.store.parts.sessions if session.caller.tenant == name])
        if self._running:
            self._look_again()

    def _end(self, sessions: list[Session]) -> None:
        for session in sessions:
            if not self._context.identity.stands(session.caller):
                self._context.store.parts.counters["sessions_disowned"] += 1
                self._context.store.part_with(session, "its credential does not count any more", Cause.PREEMPTED)

    def _look_again(self) -> None:
        """Wake up when the next token expires."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_s = self._context.clock.wall()
        ends = [token.expires_s for token in self._context.store.parts.tenants.tokens if token.expires_s]
        if ends:
            # Those that are over too: where the clock is set back they count again, and end once more.
            wait_s = min([LOOK_EVERY_S, *(end_s - now_s for end_s in ends if end_s > now_s)])
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._expired)

    def _expired(self) -> None:
        with_token = [s for s in self._context.store.parts.sessions if s.caller.credential.startswith("token ")]
        self._end(with_token)
        self._look_again()
