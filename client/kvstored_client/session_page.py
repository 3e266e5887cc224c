"""The session page in this process: releases that cost no system call (see `kvstored_proto.page`)."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence

from kvstored_proto import page

from kvstored_client.errors import Unavailable
from kvstored_client.mapping import Mapping


class SessionPage:
    """Any thread may post, finalizers included: nothing here waits for a lock."""

    def __init__(self, mapping: Mapping) -> None:
        """Raises ValueError for a page that a newer daemon lays out in another way."""
        self._memory = mapping.view(0, page.PAGE_BYTES)
        self._poster = page.Poster(self._memory)
        self._posting = threading.Lock()
        self._words = deque(range(1, page.TRANSFER_WORDS))

    def post(self, lease_ids: Sequence[int]) -> bool:
        """End leases. False: there is no room, or somebody else is posting; then a frame must do it."""
        if not self._posting.acquire(blocking=False):
            return False
        try:
            return self._poster.post(lease_ids)
        finally:
            self._posting.release()

    def take_word(self) -> int:
        """A word for a transfer to tell its end or its layers in; 0: there is none left."""
        try:
            return self._words.popleft()
        except IndexError:
            return 0

    def give_back_word(self, word: int) -> None:
        """The daemon writes to it no more: its reply has come."""
        if word:
            self._words.append(word)

    def layers(self, word: int, transfer_id: int) -> tuple[int, int]:
        """How many layers of how many blocks the load that named this word has brought: blocks, layers."""
        return page.layers(self._memory, word, transfer_id)

    def ended(self, word: int, transfer_id: int) -> bool:
        """Whether the transfer that named this word is over."""
        return page.ended(self._memory, word) == transfer_id


def open_page(fd: int, size_bytes: int) -> SessionPage | None:
    """The page behind a descriptor, which is closed. None: it is of no use here, and releases go by frames."""
    try:
        mapping = Mapping(fd, size_bytes, writable=True)
    except (Unavailable, MemoryError):
        os.close(fd)
        return None
    try:
        return SessionPage(mapping)
    except ValueError:
        return None
