"""Runs verbs in threads: waits, copies and sleeps where it is called."""

from __future__ import annotations

import threading
import time
from typing import Any, TypeVar

from kvstored_client.core import Core
from kvstored_client.effects import Connect, Effect, Finish, Verb, Work
from kvstored_client.errors import FAILURES, SHORTAGES, KVStoredClientError, Timeout, Unavailable, failure_of
from kvstored_client.waiting import ThreadedConnection

T = TypeVar("T")


class ThreadDriver:
    """The synchronous way to run a verb. Safe in threads."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._connecting = threading.Lock()

    def data(self, verb: Verb[T], otherwise: T, *, begun: bool = False) -> T:
        """Run a data verb; `otherwise` where the daemon is absent, late or refuses. `begun`: see `run`."""
        try:
            return self.run(verb, begun=begun)
        except KVStoredClientError as error:
            self.core.failed_open(error)
            return otherwise

    def run(self, verb: Verb[T], *, begun: bool = False) -> T:
        """Run a verb. Raises KVStoredClientError, and RuntimeError after a fork or a close.

        `begun`: what was begun before a close is answered after it, too, as where the daemon has gone.
        """
        self.core.check_process(begun=begun)
        self.core.stats.calls += 1
        return self._drive(verb)

    def connect(self) -> ThreadedConnection:
        """Open a session, one thread for all. Raises KVStoredClientError."""
        core = self.core
        # While the daemon is known to be gone, one thread tries and the others do not wait for it.
        if not self._connecting.acquire(blocking=core.breaker.closed):
            raise Unavailable("another thread is trying to connect")
        try:
            if isinstance(core.connection, ThreadedConnection) and core.connection.alive():
                return core.connection  # another thread was faster
            if not core.breaker.allow():
                raise Unavailable("the daemon could not be reached lately")
            core.check_open()
            self._drop()
            return self._open()
        finally:
            self._connecting.release()

    def close(self) -> None:
        """End the session. In a forked child it is the parent's, and goes on."""
        if self.core.closed:
            return
        self.core.closed = True
        if not self.core.forked:
            self._drop()

    def _open(self) -> ThreadedConnection:
        connection: ThreadedConnection | None = None
        try:
            connection = ThreadedConnection.dial(self.core.settings.path, self.core.settings.tls)
            self._drive(self.core.open_session(connection))
        except BaseException as error:
            if connection is not None:
                connection.close()
            if not isinstance(error, FAILURES):
                raise
            raise self.core.connect_failed(error) from None
        self.core.connected(connection)
        if self.core.closed:  # meanwhile, by another
            self._drop()
            self.core.check_open()
        return connection

    def _drop(self) -> None:
        connection = self.core.connection
        self.core.dropped()
        if connection is not None:
            connection.close()

    def _drive(self, verb: Verb[T]) -> T:
        try:
            effect = next(verb)
            while True:
                try:
                    answer = self._perform(effect)
                except FAILURES as error:
                    effect = verb.throw(failure_of(error))
                else:
                    effect = verb.send(answer)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        except SHORTAGES as error:  # in the verb itself
            raise failure_of(error) from None
        finally:
            verb.close()  # Ctrl-C, or a buffer that does not fit: what the verb holds is given back all the same

    def _perform(self, effect: Effect) -> Any:
        if isinstance(effect, Finish):
            return self._finish(effect)
        if isinstance(effect, Work):
            return effect.action()
        if isinstance(effect, Connect):
            return self.core.current() or self.connect()
        return time.sleep(effect.seconds)

    def _finish(self, effect: Finish) -> bytes:
        connection = effect.connection
        assert isinstance(connection, ThreadedConnection)
        try:
            body = connection.result(effect.ticket, effect.timeout_s)
        except Timeout:
            connection.abandon(effect.ticket)
            self.core.timed_out(connection)
            raise
        except BaseException:
            connection.abandon(effect.ticket)
            raise
        self.core.answered()
        return body
