"""The same blocks through gRPC messages: what clients in other languages and on other hosts pay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import grpc
from kvstored_proto.v1 import kvstored_pb2 as pb
from kvstored_proto.v1.kvstored_pb2_grpc import KVStoreStub

from bench.buffers import Pool
from bench.common import timed

_CHUNK_BYTES: Final = 1 << 20
_TIMEOUT_S: Final = 120.0


class InlineClient:
    """One gRPC session over the daemon's Unix socket."""

    def __init__(self, target: str, spec: pb.NamespaceSpec) -> None:
        self._channel = grpc.insecure_channel(target, options=[("grpc.max_receive_message_length", 4 << 20)])
        self._stub: Any = KVStoreStub(self._channel)  # type: ignore[no-untyped-call]
        opening = pb.OpenSessionRequest(protocol_min=1, protocol_max=1, client_name="bench.inline")
        session_id = self._stub.OpenSession(opening, timeout=_TIMEOUT_S).session_id
        self._metadata = (("kvstored-session-bin", session_id),)
        request = pb.OpenNamespaceRequest(spec=spec)
        opened = self._stub.OpenNamespace(request, metadata=self._metadata, timeout=_TIMEOUT_S)
        self._namespace_id = opened.namespace_id

    def put(self, hashes: Sequence[bytes], pool: Pool, into: list[float]) -> int:
        """Put the blocks, timed; returns how many are stored."""
        with timed(into):
            parts = self._parts(hashes, pool)
            reply = self._stub.PutInline(parts, metadata=self._metadata, timeout=_TIMEOUT_S)
        return sum(outcome == pb.OUTCOME_HIT for outcome in reply.outcomes)

    def get(self, hashes: Sequence[bytes], pool: Pool, into: list[float]) -> int:
        """Get the blocks into the pool, timed; returns the bytes delivered."""
        request = pb.GetInlineRequest(
            namespace_id=self._namespace_id, hashes=b"".join(hashes), hash_bytes=len(hashes[0])
        )
        filled = [0] * len(hashes)
        with timed(into):
            for reply in self._stub.GetInline(request, metadata=self._metadata, timeout=_TIMEOUT_S):
                index, chunk = reply.index, reply.chunk
                start = filled[index]
                filled[index] = start + len(chunk)
                pool.views[index][start : filled[index]] = chunk
        return sum(filled)

    def delete(self, hashes: Sequence[bytes]) -> None:
        """Delete the blocks."""
        request = pb.DeleteRequest(namespace_id=self._namespace_id, hashes=b"".join(hashes), hash_bytes=len(hashes[0]))
        self._stub.Delete(request, metadata=self._metadata, timeout=_TIMEOUT_S)

    def close(self) -> None:
        """End the session."""
        self._stub.CloseSession(pb.CloseSessionRequest(), metadata=self._metadata, timeout=_TIMEOUT_S)
        self._channel.close()

    def _parts(self, hashes: Sequence[bytes], pool: Pool) -> Iterator[pb.PutInlineRequest]:
        parent = b""
        for hash_, view in zip(hashes, pool.views, strict=True):
            header = pb.PutInlineHeader(
                namespace_id=self._namespace_id, hash=hash_, parent=parent, size_bytes=len(view)
            )
            yield pb.PutInlineRequest(header=header)
            for start in range(0, len(view), _CHUNK_BYTES):
                yield pb.PutInlineRequest(chunk=bytes(view[start : start + _CHUNK_BYTES]))
            parent = hash_
