"""Runs verbs in an event loop: replies resolve futures, large copies run in threads.

The socket is watched with `add_reader` and `add_writer`, with no asyncio transport, which
would swallow the descriptors that come beside the bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from kvstored_client import threads
from kvstored_client.connection import Connection
from kvstored_client.core import Core
from kvstored_client.effects import LOST_PAUSE_S, Connect, Effect, Finish, Verb, Work
from kvstored_client.errors import FAILURES, SHORTAGES, KVStoredClientError, Timeout, Unavailable, failure_of
from kvstored_client.tickets import Ticket

T = TypeVar("T")
INLINE_WORK_BYTES: Final = 128 << 10  # less is done faster than a thread is woken
HURRIED_MAX_S: Final = 30.0  # for an answer that was asked for sooner: a daemon kills what hangs in less


class LoopConnection(Connection):
    """A connection that an event loop watches."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._watched_fd = sock.fileno()
        self._loop.add_reader(self._watched_fd, self.receive)
        self.want_write = self._watch_writable
        self.before_close = self._unwatch

    async def result(self, ticket: Ticket, timeout_s: float) -> bytes:
        """The reply's body. Raises Timeout, or what ended the request."""
        if not ticket.done:
            arrived = self._loop.create_future()
            ticket.wake = lambda: self._arrive(arrived)
            try:
                async with asyncio.timeout(timeout_s):
                    await arrived
            except TimeoutError:
                raise Timeout(f"no answer within {timeout_s:g} s") from None
            finally:
                ticket.wake = None
        return ticket.result()

    def _arrive(self, arrived: asyncio.Future[None]) -> None:
        if threading.get_ident() == self._thread_id:
            _resolve(arrived)
        else:  # a finalizer in another thread found the connection dead
            self._soon(_resolve, arrived)

    def _watch_writable(self) -> None:
        """The socket is full; maybe called by a finalizer in another thread."""
        self._soon(self._add_writer)

    def _add_writer(self) -> None:
        if self.error is None and self.unsent:
            self._loop.add_writer(self._watched_fd, self._on_writable)

    def _on_writable(self) -> None:
        if self.flush():
            self._loop.remove_writer(self._watched_fd)

    def close(self) -> None:
        """See `Connection`. Where another thread has ended it the loop may not have heard of that yet."""
        self.fail(Unavailable("the client is closed"))
        if threading.get_ident() == self._thread_id:
            self._stop_watching()  # or its number would be taken for watched when another socket has it
        super().close()

    def _unwatch(self) -> None:
        self.want_write = self.before_close = None
        if threading.get_ident() == self._thread_id:
            self._stop_watching()
        else:
            self._soon(self._stop_watching)

    def _stop_watching(self) -> None:
        if not self._loop.is_closed() and self.fileno() == self._watched_fd:
            self._loop.remove_reader(self._watched_fd)
            self._loop.remove_writer(self._watched_fd)

    def _soon(self, callback: Any, *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody watches, and nobody waits
            self._loop.call_soon_threadsafe(callback, *args)


def _resolve(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)


class LoopDriver:
    """The asyncio way to run a verb. For one event loop."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._connecting = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def data(self, verb: Verb[T], otherwise: T, *, begun: bool = False) -> T:
        """Run a data verb; `otherwise` where the daemon is absent, late or refuses. `begun`: see `run`."""
        try:
            return await self.run(verb, begun=begun)
        except KVStoredClientError as error:
            self.core.failed_open(error)
            return otherwise

    async def run(self, verb: Verb[T], *, begun: bool = False) -> T:
        """Run a verb. Raises KVStoredClientError, and RuntimeError after a fork, a close or in another loop.

        `begun`: what was begun before a close is answered after it, too, as where the daemon has gone.
        """
        self.core.check_process(begun=begun)
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None:
                raise RuntimeError("this kvstored client belongs to another event loop: make one per loop")
            self._loop = loop
        self.core.stats.calls += 1
        return await self._drive(verb)

    async def connect(self) -> LoopConnection:
        """Open a session, one task for all. Raises KVStoredClientError."""
        core = self.core
        if not core.breaker.closed and self._connecting.locked():
            raise Unavailable("another task is trying to connect")
        async with self._connecting:
            if isinstance(core.connection, LoopConnection) and core.connection.alive():
                return core.connection  # another task was faster
            if not core.breaker.allow():
                raise Unavailable("the daemon could not be reached lately")
            core.check_open()
            self._drop()
            return await self._open()

    def close(self) -> None:
        """End the session. In a forked child it is the parent's, and goes on."""
        if self.core.closed:
            return
        self.core.closed = True
        if not self.core.forked:
            self._drop()

    async def _open(self) -> LoopConnection:
        connection: LoopConnection | None = None
        try:
            connection = LoopConnection.dial(self.core.settings.path, self.core.settings.tls)
            await self._drive(self.core.open_session(connection))
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

    async def _drive(self, verb: Verb[T]) -> T:
        try:
            effect = next(verb)
            while True:
                try:
                    answer = await self._perform(effect)
                except FAILURES as error:
                    effect = verb.throw(failure_of(error))
                else:
                    effect = verb.send(answer)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        except SHORTAGES as error:  # in the verb itself
            raise failure_of(error) from None
        finally:
            verb.close()  # cancelled: what the verb holds is given back, and no copy of it runs any more

    async def _perform(self, effect: Effect) -> Any:
        if isinstance(effect, Finish):
            return await self._finish(effect)
        if isinstance(effect, Work):
            if effect.size_bytes <= INLINE_WORK_BYTES:
                return effect.action()
            return await in_thread(effect)
        if isinstance(effect, Connect):
            return self.core.current() or await self.connect()
        return await (_whole(effect.seconds) if effect.whole else asyncio.sleep(effect.seconds))

    async def _hurried(self, waiting: Coroutine[Any, Any, bytes], effect: Finish) -> bytes:
        """Wait; who is cancelled says so to the daemon, and comes back when it uses the caller's memory no more."""
        ticket, connection = effect.ticket, effect.connection
        assert isinstance(connection, LoopConnection)
        try:
            return await _to_its_end(asyncio.create_task(waiting), effect.hurry)
        except asyncio.CancelledError:
            if not ticket.done:  # it takes longer than the call may
                with contextlib.suppress(KVStoredClientError):
                    await _to_its_end(asyncio.create_task(connection.result(ticket, HURRIED_MAX_S)))
            if connection.error is not None:
                await _whole(LOST_PAUSE_S)
            raise

    async def _finish(self, effect: Finish) -> bytes:
        connection = effect.connection
        assert isinstance(connection, LoopConnection)
        waiting = connection.result(effect.ticket, effect.timeout_s)
        try:
            body = await (waiting if effect.hurry is None else self._hurried(waiting, effect))
        except Timeout:
            connection.abandon(effect.ticket)
            self.core.timed_out(connection)
            raise
        except BaseException:
            connection.abandon(effect.ticket)
            raise
        self.core.answered()
        return body


async def in_thread(work: Work) -> Any:
    """Run it in a thread; it uses what the verb holds. Raises Unavailable where there is no thread."""
    submit = partial(asyncio.get_running_loop().run_in_executor, None)
    return await _to_its_end(asyncio.wrap_future(threads.submit(submit, work.action)))


async def _whole(seconds: float) -> None:
    """A pause that is not cut short."""
    await _to_its_end(asyncio.create_task(asyncio.sleep(seconds)))


async def _to_its_end(running: asyncio.Future[T], hurry: Callable[[], None] | None = None) -> T:
    """Wait and, cancelled or not, come back only when it has ended. Who is cancelled calls `hurry`."""
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError as error:
            if cancelled is None and hurry is not None:
                hurry()
            cancelled = error
        except Exception:
            break  # its own: raised by `result` below
    if cancelled is not None:
        running.exception()  # retrieved, so that nobody complains
        raise cancelled
    return running.result()
