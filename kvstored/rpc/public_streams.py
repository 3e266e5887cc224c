"""The gRPC streams that need no session, health and reflection: few at once, and no peer has all of them.

A stream may be held open for ever, and gRPC counts all calls together: without this whoever can connect could
keep everybody else out.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvstored.rpc.fair_share import FairShare
from kvstored.rpc.remote_sessions import Call, peer_of

STREAMS_MAX: Final = 64


class BoundedHealth(health.aio.HealthServicer):
    """The health service; `share` is that of all public streams."""

    def __init__(self, share: FairShare) -> None:
        super().__init__()
        self._share = share

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Call) -> None:
        """See gRPC's health checking protocol."""
        peer = await _take(self._share, context)
        try:
            await super().Watch(request, context)
        finally:
            self._share.leave(peer)


class BoundedReflection(reflection.aio.ReflectionServicer):
    """The reflection service; `share` is that of all public streams."""

    def __init__(self, share: FairShare, names: Sequence[str]) -> None:
        super().__init__(names)
        self._share = share

    async def ServerReflectionInfo(  # type: ignore[override]  # its stub takes the generator for a coroutine
        self, request_iterator: AsyncIterable[reflection_pb2.ServerReflectionRequest], unused_context: Call
    ) -> AsyncIterator[reflection_pb2.ServerReflectionResponse]:
        """See gRPC's reflection protocol."""
        peer = await _take(self._share, unused_context)
        replies: Any = super().ServerReflectionInfo(request_iterator, unused_context)
        try:
            async for reply in replies:
                yield reply
        finally:
            self._share.leave(peer)


async def _take(share: FairShare, call: Call) -> str:
    peer: Any = peer_of(call)
    if not share.take(peer):
        await call.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams are open from here: end some")
    return str(peer)
