"""Lists that are longer than an answer of the daemon: asked for page by page."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.message import Message

from kvstored_client import Client

PAGE_ITEMS: Final = 100


def all_pages(client: Client, operation: int, request: Any, reply_type: type[Message], field: str) -> list[Any]:
    """All items of a reply's list; a daemon that knows of no pages answers with all at once."""
    found: list[Any] = []
    request.limit = PAGE_ITEMS
    while True:
        reply: Any = client.call(operation, request, reply_type)
        found += getattr(reply, field)
        if not reply.cursor:
            return found
        request.cursor = reply.cursor
