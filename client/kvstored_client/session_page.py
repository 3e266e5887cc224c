"""The session page in this process: releases that cost no system call (see `kvstored_proto.page`)."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstored_proto import page

from kvstored_client.errors import Unavailable
from kvstored_client.mapping import Mapping


class SessionPage:
    """Any thread may post, finalizers included: nothing here waits for a lock."""

    def __init__(self, mapping: Mapping) -> None:
        """Raises ValueError for a page that a newer daemon lays out in another way."""
        self._poster = page.Poster(mapping.view(0, page.PAGE_BYTES))
        self._posting = threading.Lock()

    def post(self, lease_ids: Sequence[int]) -> bool:
        """End leases. False: there is no room, or somebody else is posting; then a frame must do it."""
        if not self._posting.acquire(blocking=False):
            return False
        try:
            return self._poster.post(lease_ids)
        finally:
            self._posting.release()


def open_page(fd: int, size_bytes: int) -> SessionPage | None:
    """The page behind a descriptor, which is closed. None: it is of no use here, and releases go by frames."""
    try:
        return SessionPage(Mapping(fd, size_bytes, writable=True))
    except (Unavailable, ValueError):
        return None
