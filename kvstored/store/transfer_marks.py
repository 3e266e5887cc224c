"""Transfers under way: how their clients learn what is done of them, and how they are given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec
from kvstored_proto import page

from kvstored.catalog.leases import Session
from kvstored.errors import InvalidArgument
from kvstored.tiers.stop import Stop

CANCELLED: Final = "cancelled"
ENDED: Final = "the session ended"
UNREGISTERED: Final = "the memory is not registered any more"
NO_MORE_LAYERS: Final = "no further layer was ready in time"
LAYER_MAX_S: Final = 60.0  # a store holds room for so long without getting another layer
TOO_LATE: Final = "its deadline has passed"


class Terms(msgspec.Struct, frozen=True):
    """How a client wants a transfer: see `LoadRequest` and `StoreRequest`."""

    transfer_id: int = 0
    done_word: int = 0
    first_layer: int = 0
    layers: int = 0
    layers_word: int = 0
    deadline_s: float = 0.0
    by_layers: bool = False  # of a store: the client says when each layer is ready


class Under(msgspec.Struct, eq=False):
    """A transfer under way."""

    terms: Terms
    registration: int
    stop: Stop
    over: asyncio.Event
    timer: asyncio.TimerHandle | None = None
    ready_layers: int = 0  # of a store by layers: so many may be copied
    news: asyncio.Event = msgspec.field(default_factory=asyncio.Event)  # more of them

    async def layers_beyond(self, done: int) -> int:
        """How many layers are ready, once it is more than `done`, or the transfer is to end."""
        forget = self.stop.then(self.news.set)
        try:
            while self.ready_layers <= done and not self.stop.why:
                self.news.clear()
                await asyncio.wait_for(self.news.wait(), LAYER_MAX_S)
        except TimeoutError:
            self.stop.ask(NO_MORE_LAYERS)
        finally:
            forget()
        return self.ready_layers


class UnderWay:
    """All of them."""

    def __init__(self) -> None:
        self._numbered: dict[tuple[Session, int], Under] = {}

    def begin(self, session: Session, terms: Terms, registration: int = 0) -> Under:
        """A transfer of a registered memory. Raises InvalidArgument."""
        number = terms.transfer_id
        for name, word in (("done_word", terms.done_word), ("layers_word", terms.layers_word)):
            if word and (not number or word >= page.TRANSFER_WORDS):
                raise InvalidArgument(f"{name} is {word}: 1 to {page.TRANSFER_WORDS - 1}, and a transfer_id with it")
        if terms.by_layers and not number:
            raise InvalidArgument("a store by layers needs a transfer_id, by which they are said to be ready")
        if terms.done_word and terms.done_word == terms.layers_word:
            raise InvalidArgument("done_word and layers_word are the same word")
        mark = Under(terms, registration, Stop(), asyncio.Event())
        if number:
            if (session, number) in self._numbered:
                raise InvalidArgument(f"a transfer of number {number} is under way in this session")
            self._numbered[session, number] = mark
        if terms.deadline_s:
            mark.timer = asyncio.get_running_loop().call_later(terms.deadline_s, mark.stop.ask, TOO_LATE)
        return mark

    def end(self, session: Session, mark: Under) -> None:
        """Nothing of it runs any more."""
        terms = mark.terms
        if mark.timer is not None:
            mark.timer.cancel()
        if terms.transfer_id:
            del self._numbered[session, terms.transfer_id]
        if terms.done_word and session.page is not None and not session.ended:
            page.say_ended(session.page.memory, terms.done_word, terms.transfer_id)
        mark.over.set()

    def layers_ready(self, session: Session, transfer_id: int, layers: int) -> bool:
        """The engine's leading layers may be copied. False: there is no transfer of this number."""
        mark = self._numbered.get((session, transfer_id))
        if mark is None:
            return False
        mark.ready_layers = max(mark.ready_layers, layers)
        mark.news.set()
        return True

    def end_session(self, session: Session) -> None:
        """Nobody is interested in its transfers any more. What runs ends by itself."""
        for (owner, _), mark in list(self._numbered.items()):
            if owner is session:
                mark.stop.ask(ENDED)

    def unregister(self, session: Session, registration: int) -> None:
        """The memory is to be let go of."""
        for (owner, _), mark in list(self._numbered.items()):
            if owner is session and mark.registration == registration:
                mark.stop.ask(UNREGISTERED)

    async def cancel(self, session: Session, transfer_id: int) -> bool:
        """End a transfer; when this returns no copy of it runs any more. False: there is none of this number."""
        mark = self._numbered.get((session, transfer_id))
        if mark is None:
            return False
        mark.stop.ask(CANCELLED)
        await mark.over.wait()
        return True


class LayersTold:
    """Tells a client how many layers of all the blocks that it gets are in place.

    Blocks are copied in groups, each layer by layer, as they come up from below; a layer is in place when it is in all
    groups, and that can be said once it is known which blocks there will be.
    """

    def __init__(self, session: Session, terms: Terms) -> None:
        self._session, self._terms = session, terms
        self._groups: list[int] = []
        self._blocks = 0

    def group(self) -> Callable[[int], None]:
        """One more group; call the result with the number of its layers that are in place."""
        number = len(self._groups)
        self._groups.append(0)

        def copied(layers: int) -> None:
            self._groups[number] = layers
            self._say()

        return copied

    def all(self, blocks: int) -> None:
        """All groups are known, and how many blocks they have."""
        self._blocks = blocks
        self._say()

    def _say(self) -> None:
        layers, session = min(self._groups, default=0), self._session
        if self._blocks and layers and session.page is not None and not session.ended:
            page.say_layers(session.page.memory, self._terms.layers_word, self._terms.transfer_id, self._blocks, layers)
